"""The benchmark as a user types it, at lengths that take no time."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from dape_jax import Adapt, KerpleLog, UserError
from experiments import bench_attention, contenders
from tests.attention.oracle import oracle
from tests.conftest import relative_error
from tests.experiments.test_commands import check_refusal, command  # noqa: F401


@pytest.fixture
def python_without_torch(tmp_path):
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'torch'\" >&2\nexit 1\n")
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_tiny_lengths(command, tmp_path):  # noqa: F811
    """Without PyTorch too: the tests' requirements do not have it."""
    done = command("bench_attention", "--lengths=9", "--short_batches=2", "--rounds=1", "--calls=1",
                   f"--output={tmp_path / 'new' / 'bench'}")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "training step, batch 2 at length 64: DAPE-Kerple" in done.stdout
    report = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert [(x["length"], x["pass"]) for x in report["attention"]] == [(9, "forward"), (9, "forward and backward")]
    for entry in report["attention"]:
        assert entry["dape_jax"]["first_call_s"] > entry["dape_jax"]["median_s"] > 0
        assert entry["dape_jax"]["above_base_bytes"] > 0
        assert f"first call {entry['dape_jax']['first_call_s']:.1f} s" in done.stdout
    medians = report["training_step"][0]["medians_s"]
    assert report["training_step"][0]["ratios"]["median"] == medians["dape_kerple"] / medians["kerple"]
    assert f"{report['machine']['threads']} threads" in done.stdout
    assert (tmp_path / "new" / "bench.png").stat().st_size > 10_000


def test_what_is_timed_is_the_formula(tmp_path):
    """Both contenders are compared with each other in a run; this one with the oracle."""
    order = {"contender": "dape_jax", "length": 20, "backward": False, "calls": 1, "save": str(tmp_path / "out.npz")}
    line = [sys.executable, "-m", "experiments.contenders", json.dumps(order)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    figures = json.loads(subprocess.run(line, capture_output=True, text=True, check=True, env=environment).stdout)
    assert len(figures["times_s"]) == 1
    x = contenders.inputs(20)
    adapt_params = {"w1": x["w1"][None], "b1": x["b1"], "w2": x["w2"][None], "b2": x["b2"]}
    want = oracle(
        *(x[name] for name in "qkv"), bias=KerpleLog(), bias_params={"p": x["p"], "a": x["a"]}, adapt=Adapt(width=32),
        adapt_params=adapt_params, causal=True, q_positions=np.arange(20), k_positions=np.arange(20),
    )  # fmt: skip
    assert relative_error(np.load(tmp_path / "out.npz")["out"], want) < 2e-6


def test_wrong_input_gets_one_line(command, python_without_torch, tmp_path):  # noqa: F811
    (tmp_path / "file").touch()
    output = f"--output={tmp_path / 'run' / 'bench'}"
    for arguments, message in {
        ("--short_batches=64,0", output): "--short_batches=64,0: 0 is too small",
        ("--lengths=8", f"--torch_python={python_without_torch}", output): "cannot import torch: ModuleNotFoundError",
        ("--lengths=8", f"--output={tmp_path / 'file' / 'bench'}"): "file/bench: cannot be written",
    }.items():
        check_refusal(command("bench_attention", *arguments), message)
    assert not (tmp_path / "run").exists()


def test_other_wrong_input(tmp_path):
    for value, message in {"64,x": "'x' is not an integer", "": "'' is not", "8,8": "names 8 twice"}.items():
        with pytest.raises(UserError, match=f"--lengths={value}.*{message}"):
            bench_attention._sizes("lengths", value)
    with pytest.raises(UserError, match="none cannot be run: No such file"):
        bench_attention._find_torch(str(tmp_path / "none"))
