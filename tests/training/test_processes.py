"""Two processes with four devices each train as one process with eight: same batches, same losses, same checkpoints."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from dape_jax.training.metrics import read_metrics
from tests.conftest import relative_error

WORKER = """
import sys
import jax
from configs import quickstart
from dape_jax import config as config_lib
from dape_jax.evaluation import extrapolation, protocols
from dape_jax.training import loop, run as run_lib, stop

port, index, count, workdir, text, cache, mode = sys.argv[1:]
if int(count) > 1:
    jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
mapping = quickstart.get_config()
mapping.model.update(num_layers=1, num_heads=2, width=16)
mapping.data.update(source="folder", path=text, cache_dir=cache)
mapping.training.update(steps=8, batch_size=16, checkpoint_every=4, log_every=1, validate_every=4)
mapping.mesh.fsdp = 4
run = run_lib.make_run(config_lib.from_mapping(mapping), show_progress=False)
assert run.mesh.size == 8, run.mesh
if mode == "killed":  # after the checkpoint of step 4
    original, loop.Checkpoints.save = loop.Checkpoints.save, lambda *a: (original(*a), a[0].close(), sys.exit(0))
if mode == "stopped" and index == "1":  # a signal that reaches this process alone
    import signal
    add = loop.Recorder.add
    loop.Recorder.add = lambda *a: (add(*a), signal.raise_signal(signal.SIGTERM) if a[1] == 6 else None)
import pathlib
with stop.deferred_signals() as flag:
    try:
        state = loop.train(run, pathlib.Path(workdir), show_progress=False, stop=flag)
    except stop.Stopped as e:
        sys.exit(str(e))
plan = protocols.make_plan("last_k", run.tokens, "test", [64], 16, 11)
segments = protocols.make_plan("non_overlapping", run.tokens, "test", [128], max_tokens=2500)
scores = extrapolation.score(run, state.params, plan.windows + segments.windows, show_progress=False)
if jax.process_index() == 0:
    import numpy
    sums = numpy.concatenate([scores[64].nll_sums, scores[128].nll_sums])
    numpy.save(pathlib.Path(workdir) / "scores.npy", sums)
"""


def start(count, workdir, text, cache, mode="whole"):
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
    environment["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={8 // count}"
    with contextlib.ExitStack() as stack:
        # Files, not pipes: a process that waits for its pipe to be read would keep the other one waiting for it.
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(count)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, str(port), str(i), str(count), workdir, text, cache, mode],
                env=environment,
                stderr=log,
            )
            for i, log in enumerate(logs)
        ]
        codes, said = [process.wait(timeout=600) for process in processes], []
        for log in logs:
            log.seek(0)
            said.append(log.read())
    for code, errors in zip(codes, said, strict=True):
        assert code == (mode == "stopped"), errors[-3000:]
    return said


@pytest.mark.slow
def test_two_processes_equal_one_and_take_over_its_run(text_folder, tmp_path):
    text, cache = str(text_folder), str(tmp_path / "cache")
    start(1, str(tmp_path / "one"), text, cache)
    start(2, str(tmp_path / "two"), text, cache)
    start(1, str(tmp_path / "both"), text, cache, "killed")
    start(2, str(tmp_path / "both"), text, cache)
    for errors in start(2, str(tmp_path / "stopped"), text, cache, "stopped"):
        assert "stopped by SIGTERM after step 6 of 8, which is saved" in errors
    # The newest checkpoint, of step 6, loses what the second process wrote into it.
    shutil.rmtree(tmp_path / "stopped" / "checkpoints" / "6" / "params" / "ocdbt.process_1")
    start(2, str(tmp_path / "stopped"), text, cache)
    assert (tmp_path / "stopped" / "damaged_checkpoints" / "6").is_dir()

    def losses(name):
        lines = read_metrics(tmp_path / name / "metrics.jsonl")
        return np.asarray([[line["loss"], line["grad_norm"]] for line in lines if "loss" in line])

    assert losses("one").shape == (8, 2)
    for name in ("two", "both", "stopped"):
        assert relative_error(losses(name), losses("one")) < 1e-5
        scores = [np.load(tmp_path / n / "scores.npy") for n in (name, "one")]
        assert relative_error(*scores) < 1e-4
