"""Commands that are killed, told to stop, or run out of disk: started again, they compute what unbroken ones do."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from dape_jax.training.metrics import read_metrics

RUN = ["--config=configs/quickstart.py:kerple", "--config.model.num_layers=1", "--config.model.width=16",
       "--config.model.num_heads=2", "--config.data.sequence_length=32", "--config.data.source=folder",
       "--config.training.batch_size=8", "--config.training.log_every=1"]  # fmt: skip

SIGNAL_AT = """
import importlib, os, runpy, signal, sys
owner, name, count, number, module, *arguments = sys.argv[1:]
module_name, _, attribute = owner.partition(":")
owner = importlib.import_module(module_name)
owner = getattr(owner, attribute) if attribute else owner
original, calls = getattr(owner, name), []
def wrapped(*args, **kwargs):
    calls.append(0)
    if len(calls) == int(count):
        os.kill(os.getpid(), int(number))
    return original(*args, **kwargs)
setattr(owner, name, wrapped)
sys.argv = [module, *arguments]
runpy.run_module(f"experiments.{module}", run_name="__main__")
"""
"""Runs a command that sends a signal to itself at a certain call of a function."""


@pytest.fixture
def environment(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    return environment | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "xdg")}


@pytest.fixture
def train(environment, text_folder):
    """A function that trains in a folder, whether or not it was begun before, and returns the finished process."""

    def train(workdir, *arguments, at=None):
        arguments = [*RUN, f"--config.data.path={text_folder}", *arguments, f"--workdir={workdir}"]
        return execute(environment, "train", arguments, at)

    return train


def execute(environment, module, arguments, at=None):
    start = ["-m", f"experiments.{module}"] if at is None else ["-c", SIGNAL_AT, *map(str, at), module]
    line = [sys.executable, *start, *arguments]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=600, check=False)


def record(workdir):
    """Everything that a run computes and reports."""
    timing = ("tokens_per_second",)
    return [{k: v for k, v in line.items() if k not in timing} for line in read_metrics(workdir / "metrics.jsonl")]


def messages(process):
    return [line for line in process.stderr.splitlines() if line.startswith("error: ")]


def quiet(process):
    return "Traceback" not in process.stderr and "Exception ignored" not in process.stderr


@pytest.mark.slow
def test_fifty_kills_at_random_moments(train, environment, text_folder, tmp_path):
    steps = (
        "--config.training.steps=900",
        "--config.training.checkpoint_every=7",
        "--config.training.validate_every=20",
    )
    assert train(tmp_path / "straight", *steps).returncode == 0
    broken = tmp_path / "broken"
    arguments = [*RUN, f"--config.data.path={text_folder}", *steps, f"--workdir={broken}"]
    rng = random.Random(0)
    size = lambda: (broken / "metrics.jsonl").stat().st_size if (broken / "metrics.jsonl").exists() else 0  # noqa: E731
    kills = 0
    for _ in range(50):
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.train", *arguments],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # One in five at any moment since the start, which is mostly before the first step; the others among the steps.
        wait, growth = (rng.uniform(0, 8), 0) if rng.random() < 0.2 else (rng.uniform(0, 0.1), rng.randrange(1, 3000))
        before = size()
        while process.poll() is None and not before < size() and growth:
            time.sleep(0.001)
        begun = size()
        while process.poll() is None and size() < begun + growth:
            time.sleep(0.001)
        time.sleep(wait)
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
    assert kills == 50
    assert len(record(broken)) < 900  # so every kill did interrupt the run
    finished = train(broken, *steps)
    assert finished.returncode == 0, finished.stderr
    assert record(broken) == record(tmp_path / "straight")
    assert len(record(broken)) == 900 + 45
    assert sorted(p.name for p in (broken / "checkpoints").iterdir()) == ["896", "900"]


LOOP, VALIDATION = "dape_jax.training.loop", "dape_jax.training.validation"
MOMENTS = {
    "warm-up": (LOOP, "compile_step", 1, "after step 1 of 20"),
    "validation": (VALIDATION, "agreed", 3, "after step 10 of 20"),
    "save": ("dape_jax.training.checkpoint:Checkpoints", "save", 1, "after step 5 of 20"),
    "last step": ("dape_jax.training.recorder:Recorder", "add", 20, "after step 20 of 20"),  # owes its validation
    "tokenizing": ("dape_jax.data.text", "load_source", 1, ""),
}
"""Module and function, its call that brings the signal, and what is then said to be saved."""


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_training_with_a_line_and_a_status(moment, number, train, tmp_path):
    options = ("--config.training.steps=20", "--config.training.checkpoint_every=4",
               "--config.training.validate_every=5", "--config.training.validation_windows=16")  # fmt: skip
    *at, saved = MOMENTS[moment]
    stopped = train(tmp_path / "run", *options, at=[*at, int(number)])
    assert quiet(stopped), stopped.stderr
    assert stopped.returncode == 128 + number, stopped.stderr
    (message,) = messages(stopped)
    assert message.startswith(f"error: stopped by {number.name}")
    assert saved in message
    assert "start the same command again" in message
    finished = train(tmp_path / "run", *options)
    assert finished.returncode == 0, finished.stderr
    straight = train(tmp_path / "straight", *options)
    assert straight.returncode == 0
    assert record(tmp_path / "run") == record(tmp_path / "straight")


@pytest.mark.slow
def test_a_signal_stops_an_evaluation_that_leaves_nothing(train, environment, tmp_path):
    assert train(tmp_path / "run", "--config.training.steps=5").returncode == 0
    before = sorted((tmp_path / "run").rglob("*"))
    arguments = [f"--workdir={tmp_path / 'run'}", "--lengths=16,32,64"]
    at = ("dape_jax.evaluation.extrapolation", "rows_at_once", 2, int(signal.SIGTERM))
    stopped = execute(environment, "evaluate", arguments, at)
    assert stopped.returncode == 143, stopped.stderr
    assert messages(stopped) == [
        "error: stopped by SIGTERM before the report was written; start the same command again"
    ]
    assert sorted((tmp_path / "run").rglob("*")) == before
    # While the report is written the signal waits until it is whole.
    at = ("dape_jax.evaluation.report", "write_json", 1, int(signal.SIGTERM))
    assert execute(environment, "evaluate", arguments, at).returncode == 0
    written = sorted(p.name for p in (tmp_path / "run" / "evaluation").iterdir())
    assert written == [f"last_k_test_step5_k16_16to64.{suffix}" for suffix in ("json", "png")]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1,500 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    line = ["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(folder)]
    if sys.platform != "linux" or subprocess.run(line, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a small file system, and only on Linux")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.slow
def test_on_a_full_disk_the_run_stops_in_one_line_and_goes_on_once_there_is_room(train, small_disk, tmp_path):
    options = ("--config.training.steps=20", "--config.training.checkpoint_every=4")
    (small_disk / "other").write_bytes(b"x" * 900 * 1024)  # what is left has room for two checkpoints and no third
    for _ in range(2):
        failed = train(small_disk / "run", *options)
        assert failed.returncode == 1, failed.stderr
        assert quiet(failed), failed.stderr
        (message,) = messages(failed)
        assert "cannot be written: no space left on device; the latest is that of step" in message
        steps = sorted(int(p.name) for p in (small_disk / "run" / "checkpoints").iterdir())
        assert f"the latest is that of step {steps[-1]}. Make room" in message
    (small_disk / "other").unlink()
    finished = train(small_disk / "run", *options)
    assert finished.returncode == 0, finished.stderr
    assert train(tmp_path / "straight", *options).returncode == 0
    assert record(small_disk / "run") == record(tmp_path / "straight")
