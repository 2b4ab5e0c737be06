"""Spikes, updates that are not finite, TensorBoard, validation in batches."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dape_jax.data.batches import Windows, row_origins, training_batches
from dape_jax.errors import UserError
from dape_jax.training import loop, metrics, validation
from dape_jax.training import model as model_lib
from dape_jax.training import step as step_lib
from dape_jax.training.checkpoint import Checkpoints
from dape_jax.training.objective import NextToken
from dape_jax.training.recorder import NonFiniteUpdate, name_rows
from dape_jax.training.spikes import DEVIATIONS, FEWEST, SpikeDetector
from dape_jax.training.stop import StopFlag
from tests.training.conftest import lines, losses


def poison(monkeypatch, rows):
    """Makes the loss of the batch whose first row is ``rows`` infinite."""
    original = step_lib.loss_fn

    def loss_fn(config, objective, params, batch, *others):
        bad = (batch[0] == jnp.asarray(rows)).all()
        return original(config, objective, params, batch, *others) * jnp.where(bad, jnp.inf, 1.0)

    monkeypatch.setattr(step_lib, "loss_fn", loss_fn)


def test_a_non_finite_update_is_not_applied_and_the_state_before_it_is_saved(make, tmp_path, monkeypatch):
    run = make("rope")
    batch = next(training_batches(run.tokens, 32, 8, 0, 6))
    with monkeypatch.context() as patch:
        poison(patch, batch[0])
        with pytest.raises(NonFiniteUpdate) as error:
            loop.train(run, tmp_path / "run", show_progress=False)
        message = str(error.value)
        assert message.startswith("step 7 was not applied: grad_norm ")
        assert ", loss inf, " in message
        assert "; its batch: row 0 from token " in message
        assert message.endswith(
            " 5 more rows that metrics.jsonl names; the state before it is the checkpoint of step 6"
        )
        assert "\n" not in message
        assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
        record = lines(tmp_path / "run")[-1]
        assert record["step"] == 7
        assert record["not_applied"]["loss"] == "inf"
        assert record["batch"] == row_origins(run.tokens, 32, 8, 0, 6)
        assert Checkpoints(tmp_path / "run" / "checkpoints").latest() == 6
        with pytest.raises(NonFiniteUpdate, match="step 7 was not applied"):  # the same again, and nothing is lost
            loop.train(make("rope"), tmp_path / "run", show_progress=False)
    loop.train(make("rope"), tmp_path / "run", show_progress=False)
    loop.train(make("rope"), tmp_path / "straight", show_progress=False)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")


def test_a_first_update_that_is_not_finite_leaves_no_checkpoint(make, tmp_path, monkeypatch):
    run = make("rope")
    poison(monkeypatch, next(training_batches(run.tokens, 32, 8, 0, 0))[0])
    with pytest.raises(NonFiniteUpdate, match="step 1 was not applied: .*; there is no earlier step"):
        loop.train(run, tmp_path / "run", show_progress=False)
    assert Checkpoints(tmp_path / "run" / "checkpoints").latest() is None


def test_rows_are_named_by_their_documents(make):
    run = make("rope")
    names, bounds = run.tokens.split_documents("train")
    windows = Windows(run.tokens, "train", 32)
    several = 0
    for number, batch in zip(range(len(windows) // 8), training_batches(run.tokens, 32, 8, 0, 0), strict=False):
        origins = row_origins(run.tokens, 32, 8, 0, number)
        assert [o["row"] for o in origins] == list(range(8))
        for tokens, origin in zip(batch, origins, strict=True):
            start, end = bounds[names.index(origin["documents"][0])]
            assert np.array_equal(run.tokens.tokens[start + origin["offset"] :][:33], tokens)
            # One end-of-document id (256) between two documents.
            assert start + origin["offset"] < end
            assert len(origin["documents"]) == 1 + (tokens[:-1] == 256).sum()
            several += len(origin["documents"]) > 1
    assert several
    rows = [{"row": 0, "documents": ["a", "b"], "offset": 5}]
    assert name_rows(rows) == "row 0 from token 5 of a"


def test_spikes_stand_out_and_noise_does_not():
    rng = np.random.default_rng(0)
    detector = SpikeDetector()
    found = {}
    for step in range(2000):
        line = {"loss": 3 + 2 * np.exp(-step / 200) + 0.05 * rng.normal(), "grad_norm": np.exp(0.3 * rng.normal())}
        line["loss"] += 1.0 * (step in (FEWEST - 1, 500, 501, 1500))  # the first comes before anything is compared
        line["grad_norm"] += 50 * (step == 900)
        if exceeded := detector.thresholds_exceeded(line):
            found[step] = exceeded
    assert {step: sorted(names) for step, names in found.items()} == {
        500: ["loss"], 501: ["loss"], 900: ["grad_norm"], 1500: ["loss"],
    }  # fmt: skip
    assert 3 + 2 * np.exp(-1500 / 200) < found[1500]["loss"] < 3 + 0.05 * 1.5 * DEVIATIONS


def test_a_spike_is_reported_with_its_batch_and_changes_nothing(make, tmp_path, monkeypatch):
    settings = {"steps": 24, "log_every": 8, "checkpoint_every": 8}
    loop.train(make("rope", **settings), tmp_path / "straight", show_progress=False)
    assert not [line for line in lines(tmp_path / "straight") if "spike" in line]
    monkeypatch.setattr("dape_jax.training.spikes.DEVIATIONS", -10.0)  # everything is one
    loop.train(make("rope", **settings), tmp_path / "run", show_progress=False)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    spikes = {line["step"]: line["spike"] for line in lines(tmp_path / "run") if "spike" in line}
    assert sorted(spikes) == list(range(FEWEST + 1, 25))
    assert spikes[20]["batch"] == row_origins(make("rope").tokens, 32, 8, 0, 19)
    assert set(spikes[20]["above"]) == {"loss", "grad_norm"}
    unbroken = lines(tmp_path / "run")
    # The detector of a resumed run knows the steps before.
    for step in ("24", "16"):
        (tmp_path / "run" / "checkpoints" / step).rename(tmp_path / step)
    (tmp_path / "16").rename(tmp_path / "run" / "checkpoints" / "16")
    loop.train(make("rope", **settings), tmp_path / "run", show_progress=False)
    assert [line.get("spike") for line in lines(tmp_path / "run")] == [line.get("spike") for line in unbroken]


def scalars(folder):
    board = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: {e.step: e.value for e in board.Scalars(tag)} for tag in board.Tags()["scalars"]}


def test_tensorboard_reads_the_metrics_also_of_a_resumed_run(make, tmp_path):
    settings = {"tensorboard": True, "validate_every": 6, "validation_windows": 8, "keep_checkpoints": 9}
    loop.train(make("rope", **settings), tmp_path / "run", show_progress=False)
    first = scalars(tmp_path / "run" / "tensorboard")
    for step in ("12", "8"):  # resumes at 4
        (tmp_path / "run" / "checkpoints" / step).rename(tmp_path / step)
    (event_file,) = (tmp_path / "run" / "tensorboard").iterdir()
    with event_file.open("ab") as file:
        file.write(b"cut short by a kill")
    loop.train(make("rope", **settings), tmp_path / "run", show_progress=False)
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 2
    for found in (first, scalars(tmp_path / "run" / "tensorboard")):
        for name in ("loss", "grad_norm", "update_norm", "learning_rate"):
            want = {line["step"]: line[name] for line in lines(tmp_path / "run") if name in line}
            assert found[f"train/{name}"] == pytest.approx(want, rel=1e-6)
            assert len(want) == 12
        assert sorted(found["validation/loss"]) == [6, 12]
        assert "train/tokens_per_second" in found


def test_steps_after_the_resumed_one_are_dropped_by_tensorboard(tmp_path):
    for first, steps, value in ((0, range(1, 10), 1.0), (4, range(5, 7), 2.0)):
        board = metrics.TensorBoard(tmp_path, first)
        for step in steps:
            board.write([{"step": step, "loss": value}], wall_time=float(step))
        board.close()
    assert scalars(tmp_path)["train/loss"] == {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 2.0, 6: 2.0}


def test_tensorboard_without_its_library_is_refused_before_anything_is_written(make, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(UserError, match=re.escape("training.tensorboard=True: install tensorboardX first")):
        loop.train(make("rope", tensorboard=True), tmp_path / "run", show_progress=False)
    assert not (tmp_path / "run").exists()


def test_validation_in_batches_is_the_mean_over_all_windows(make):
    run = make("rope", validation_windows=24, batch_size=16)  # 16 windows, then 8
    params = model_lib.init_params(run.model, jax.random.key(1))
    windows = Windows(run.tokens, "validation", 32)
    rows = np.stack([windows[int(i)] for i in np.linspace(0, len(windows) - 1, 24)])
    with jax.set_mesh(run.mesh):
        found = validation.make_validation(run, StopFlag())(params)
        want = float(jax.jit(lambda p: step_lib.loss_fn(run.model, NextToken(), p, jnp.asarray(rows)))(params))
    assert found == pytest.approx(want, rel=1e-6)
