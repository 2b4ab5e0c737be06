"""Accuracy at every length, against one unpadded forward a length."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import chomsky_small
from dape_jax import config as config_lib
from dape_jax import sharding
from dape_jax.data.chomsky import get_task
from dape_jax.data.chomsky.batches import EVALUATION, draw, longest, total_length
from dape_jax.errors import UserError
from dape_jax.evaluation import chomsky, chomsky_report
from dape_jax.rotary import YaRN
from dape_jax.training.model import init_params, make_model
from dape_jax.training.objective import read
from dape_jax.training.run import make_run
from tests.conftest import relative_error


def make(position, task="binary_addition", kernel_width=1):
    mapping = chomsky_small.get_config(position)
    mapping.model.update(num_layers=1, num_heads=2, width=16)
    mapping.model.dape.update(width=4, kernel_width=kernel_width)
    mapping.data.task = task
    run = make_run(config_lib.from_mapping(mapping))
    params = init_params(run.model, jax.random.key(0))
    params["head"]["kernel"] *= 20.0
    for name in "qko":
        params["blocks"]["attention"][name]["kernel"] *= 10.0
    return run, params


POSITIONS = ["dape_kerple", "randomised_rope", "randomised_learned", "dape_fire", "yarn"]


@pytest.mark.parametrize(("position", "kernel_width"), [*((p, 1) for p in POSITIONS), ("dape_kerple", 3)])
def test_padding_changes_nothing(position, kernel_width):
    run, params = make(position, kernel_width=kernel_width)
    model, task, key = dataclasses.replace(run.model, batch_axes=()), get_task("binary_addition"), jax.random.key(1)
    total = total_length(task, 9)
    exact, padded = (draw(task, 0, 0, EVALUATION, 3, 9, width) for width in (total, total + 14))
    other = {**padded, "tokens": np.where(padded["valid"], padded["tokens"], 0)}  # whatever stands there
    want, got, again = (jax.jit(lambda b: read(model, params, b, key))(b)[:, :total] for b in (exact, padded, other))
    assert relative_error(got, want) < 1e-5
    assert np.array_equal(got, again)


def test_attention_sees_both_ways():
    config = dataclasses.replace(make("dape_kerple")[0].model, batch_axes=())
    model, tokens = make_model(config, init_params(config, jax.random.key(0))), jnp.arange(8)[None] % 4
    hidden, changed = (model(t) for t in (tokens, tokens.at[0, 7].set(0)))
    assert np.all(np.linalg.norm(hidden - changed, axis=-1) > 1e-4 * np.linalg.norm(hidden, axis=-1))


@pytest.mark.parametrize(
    "position", ["dape_kerple", pytest.param("randomised_rope", marks=pytest.mark.slow), "dape_yarn"]
)
def test_accuracies_equal_one_forward_a_length(position, monkeypatch):
    monkeypatch.setattr(chomsky, "TOKENS_PER_DEVICE", 15)  # several batches of a length, the last one partial
    monkeypatch.setattr(chomsky, "WIDTHS", 3)
    run, params = make(position)
    task, samples, seed = get_task("binary_addition"), 11, 7
    yarn = isinstance(run.model.rotary, YaRN)
    if yarn:
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, rotary=YaRN(train_length=5)))
    got = chomsky.score(run.model, params, run.mesh, task, 5, 6, samples, seed, show_progress=False)
    assert got.lengths.tolist() == list(range(1, 7))
    assert got.widths.tolist() == [5, 5, 9, 9, 13, 13]
    assert got.compilations == 3
    models = {run.model.for_length(width) for width in (5, 9, 13)}
    assert sum(chomsky._counter(model, run.mesh)._cache_size() for model in models) == 3
    scales = chomsky_report.make_report(run, task, got, 9, 0).get("yarn_scales")
    assert scales == ([1.0, 1.0, 1.8, 1.8, 2.6, 2.6] if yarn else None)
    model = dataclasses.replace(run.model, batch_axes=(), backend="reference")
    for i, length in enumerate(got.lengths):
        if yarn:
            model = dataclasses.replace(model, rotary=YaRN(train_length=5, scale=scales[i]))
        batch = draw(task, seed, int(length), EVALUATION, samples, int(length), total_length(task, int(length)))
        hidden = read(model, params, batch, jax.random.fold_in(jax.random.key(seed), int(length)))
        right = np.argmax(hidden @ params["head"]["kernel"], axis=-1) == batch["targets"]
        counted = batch["weights"] > 0
        assert got.counted[i] == counted.sum()
        assert got.correct[i] == (right & counted).sum()
        assert got.solved[i] == (right | ~counted).all(axis=1).sum()
    assert 0.2 < got.correct.sum() / got.counted.sum() < 0.8


def test_report(tmp_path):
    run, _ = make("dape_kerple")
    lengths = np.arange(1, 51)
    accuracies = chomsky.Accuracies(lengths, lengths, np.full(50, 100), np.full(50, 3), 10, lengths, 1.0)
    made = chomsky_report.make_report(run, get_task("binary_addition"), accuracies, 9, 0)
    assert made["score"] == pytest.approx(45.5)
    assert made["score_in_training_range"] == pytest.approx(20.5)
    assert made["score_of_sequences"] == 30.0
    path = chomsky_report.write_report(made, tmp_path)
    assert path.name == "chomsky_binary_addition_step9_1to50.json"
    assert path.with_suffix(".png").stat().st_size > 10_000
    assert "45.50 % of outputs right at lengths 41 to 50, 20.50 % up to 40 (chance 50 %" in chomsky_report.summary(made)
    short = chomsky.Accuracies(*(x[:30] for x in accuracies[:4]), 10, lengths[:30], 1.0)
    line = chomsky_report.summary(chomsky_report.make_report(run, get_task("binary_addition"), short, 9, 0))
    assert "no length beyond 40 was scored" in line


def test_rows_that_the_model_has_no_positions_for_are_refused():
    run, params = make("randomised_learned", "duplicate_string")
    with pytest.raises(UserError, match="3000 tokens are more than the 2048 positions that are drawn from"):
        chomsky.score(run.model, params, run.mesh, get_task("duplicate_string"), 80, 1000, 1)
    assert longest(get_task("duplicate_string"), 500) <= 2048


def test_padded_widths():
    widths = chomsky.padded_widths(np.arange(2, 502), 41)
    assert len(np.unique(widths)) <= chomsky.WIDTHS
    assert np.all(widths >= np.arange(2, 502))
    assert np.all(widths[:40] == 41)  # those of training by themselves
    assert widths.max() == 501
    assert chomsky.padded_widths(np.asarray([2, 3]), 41).tolist() == [3, 3]
    assert chomsky.padded_widths(np.asarray([2, 3, 5]), 2).tolist() == [2, 3, 5]
    assert sharding.make_mesh(-1, 1).size == chomsky.rows_at_once(10**6, 5, 8)
