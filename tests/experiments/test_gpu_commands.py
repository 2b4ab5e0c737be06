"""The commands for GPUs, as far as a machine without one goes."""

import json

import pytest

from tests.experiments.test_commands import check_refusal, command  # noqa: F401


def test_wrong_input_gets_one_line(command):  # noqa: F811
    for arguments, message in {
        ("bench_gpu",): "JAX runs on cpu; a GPU is needed",
        ("bench_gpu", "--correctness_only", "--interpret", "--cases=0"): "--cases=0: more than 0 is needed",
        ("gpu_registers", "--shapes=0x64"): "'0x64' is not of the form 12x64",
        ("gpu_registers", "--networks=concatt"): "did you mean 'concat'",
    }.items():
        check_refusal(command(*arguments), message)


@pytest.mark.slow
def test_more_wrong_input_gets_one_line(command):  # noqa: F811
    for arguments, message in {
        ("bench_gpu", "--interpret"): "add --correctness_only",
        ("bench_gpu", "--correctness_only", "--interpret", "--minutes=-1"): "--minutes=-1.0: more than 0 is needed",
        ("bench_gpu", "--correctness_only", "--interpret", "--lengths=64,0"): "0 is too small",
        ("bench_gpu", "--correctness_only", "--interpret", "--table=README.md"): "--table=README.md: is no table",
        ("gpu_registers", "--json=/proc/none.json"): "--json=/proc/none.json: cannot be written",
        ("gpu_registers", "--kernel_width=2"): "kernel_width=2",
        ("gpu_registers", "--biases=alibi,alibi"): "names alibi twice",
    }.items():
        check_refusal(command(*arguments), message)


@pytest.mark.slow
def test_correctness_of_one_case(command, tmp_path):  # noqa: F811
    path = tmp_path / "new" / "bench.json"
    done = command("bench_gpu", "--correctness_only", "--interpret", "--cases=1", f"--output={path}")
    assert done.returncode == 0, done.stderr
    report = json.loads(path.read_text())
    (entry,) = report["correctness"]
    assert entry["within_bounds"]
    assert 0 < entry["output"] < 1e-2
    assert len(entry["errors"]) == 9  # out, q, k, v, p, a, b1, w1, w2
