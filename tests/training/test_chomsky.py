"""The loop on a task: the same checkpoints, resuming and refusals as on text."""

import dataclasses
import functools
import shutil

import jax
import numpy as np
import pytest

from configs import chomsky_small
from dape_jax import config as config_lib
from dape_jax.errors import UserError
from dape_jax.rotary import YaRN
from dape_jax.training import loop
from dape_jax.training.checkpoint import Checkpoints
from dape_jax.training.model import abstract_params, init_params, make_model
from dape_jax.training.objective import Transduction
from dape_jax.training.run import make_run
from dape_jax.training.step import loss_fn
from tests.training.conftest import losses, validations


def make(task="even_pairs", position="randomised_rope", **training):
    mapping = chomsky_small.get_config(position)
    mapping.model.update(num_layers=1, num_heads=2, width=16)
    mapping.data.update(task=task, sequence_length=8)
    mapping.training.update(steps=8, batch_size=16, log_every=4, checkpoint_every=4, validate_every=4)
    mapping.training.update({"validation_windows": 32, **training})
    return make_run(config_lib.from_mapping(mapping))


def test_a_resumed_run_computes_the_losses_of_an_unbroken_one(tmp_path):
    loop.train(make(), tmp_path / "unbroken", show_progress=False)
    half = make()
    with pytest.raises(KeyboardInterrupt):
        _interrupted(half, tmp_path / "run")
    loop.train(make(), tmp_path / "run", show_progress=False)
    assert losses(tmp_path / "run") == losses(tmp_path / "unbroken")
    assert validations(tmp_path / "run") == validations(tmp_path / "unbroken")
    assert len(losses(tmp_path / "run")) == 8
    with pytest.raises(UserError, match="data.task is 'even_pairs' there and 'parity_check' here"):
        loop.train(make("parity_check"), tmp_path / "run", show_progress=False)
    with pytest.raises(UserError, match="is no text"):
        _ = half.tokens


def test_the_checkpoint_of_another_task_is_refused(tmp_path):
    for task in ("even_pairs", "parity_check"):  # of equal shapes
        loop.train(make(task, steps=4), tmp_path / task, show_progress=False)
    shutil.rmtree(tmp_path / "parity_check" / "checkpoints")
    shutil.copytree(tmp_path / "even_pairs" / "checkpoints", tmp_path / "parity_check" / "checkpoints")
    before = sorted(tmp_path.rglob("*"))
    run, refused = make("parity_check", steps=4), "data.task is 'even_pairs' in it and 'parity_check' in this run"
    with pytest.raises(UserError, match=refused):
        loop.train(run, tmp_path / "parity_check", show_progress=False)
    checkpoints = Checkpoints(tmp_path / "parity_check" / "checkpoints")
    with pytest.raises(UserError, match=refused):  # as in evaluation and sampling
        checkpoints.restore_params(4, abstract_params(run.model, run.mesh), config_lib.to_dict(run.config))
    assert sorted(tmp_path.rglob("*")) == before


def test_validation_is_of_lengths_from_the_shortest_to_the_longest():
    batches = make(validation_windows=30).problem.validation(16, 1)
    lengths = [int(batch["valid"].sum(axis=1).max()) - 1 for batch in batches]
    assert lengths == [8, 7, 6, 5, 4, 3, 2, 1]
    assert {len(batch["tokens"]) for batch in batches} == {4}
    two = make(validation_windows=32).problem.validation(16, 16)
    assert [(int(b["valid"].sum(axis=1).max()) - 1, len(b["tokens"])) for b in two] == [(8, 16), (1, 16)]


def _interrupted(run, workdir):
    original = type(run.problem).batches

    def batches(self, *arguments):
        for i, batch in enumerate(original(self, *arguments)):
            if i == 6:
                raise KeyboardInterrupt
            yield batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(run.problem), "batches", batches)
        loop.train(run, workdir, show_progress=False)


def test_the_loss_is_the_mean_over_the_outputs_that_count():
    run = make("binary_addition", "kerple")
    model = dataclasses.replace(run.model, batch_axes=())
    params = init_params(model, jax.random.key(0))
    batch = next(run.problem.batches(5, 0, 1))
    logits = make_model(model, params)(batch["tokens"], valid=batch["valid"]) @ params["head"]["kernel"]
    nll = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), batch["targets"][..., None], axis=-1)[..., 0]
    counted = batch["weights"] > 0
    assert 0 < counted.sum() < batch["valid"].sum()
    got = jax.jit(functools.partial(loss_fn, model, Transduction()))(params, batch)
    assert np.isclose(got, nll[counted].mean(), rtol=1e-5)


def test_yarn_is_relative_to_the_tokens_of_the_longest_row():
    assert make("duplicate_string", "dape_yarn").model.rotary == YaRN(train_length=24)  # 8 in, 16 out


def test_origins_name_the_inputs():
    run = make("even_pairs")
    origins = run.problem.origins(3)
    batch = [b for b, _ in zip(run.problem.batches(0, 0, 1), range(4), strict=False)][3]
    assert len(origins) == 16
    length = int(batch["valid"][0].sum()) - 1
    assert all(len(origin["input"]) == length for origin in origins)


@pytest.mark.parametrize(("change", "message"), [
    ({"task": "even_pair"}, "did you mean 'even_pairs'"),
    ({"task": None}, "data.task=None: one of even_pairs, modular_arithmetic, "),
    ({"source": "stdlib"}, "data.task='even_pairs': is for data.source='chomsky' alone"),
])  # fmt: skip
def test_wrong_tasks_are_named(change, message):
    mapping = chomsky_small.get_config()
    mapping.data.update(change)
    with pytest.raises(UserError, match=message):
        config_lib.from_mapping(mapping)
