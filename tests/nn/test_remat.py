"""Rematerialisation changes memory and time, not losses or gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dape_jax import Adapt, KerpleLog
from dape_jax.errors import UserError
from dape_jax.nn.transformer import REMAT, TransformerConfig
from dape_jax.training import model as model_lib
from dape_jax.training import step as step_lib
from dape_jax.training.objective import NextToken
from tests.conftest import relative_error

MODEL = TransformerConfig(
    vocab_size=64, num_layers=4, num_heads=2, width=32, mlp_width=128, bias=KerpleLog(), adapt=Adapt(width=8)
)
ROWS = np.random.default_rng(0).integers(0, 64, (4, 129)).astype(np.int32)


@functools.cache
def compiled(remat):
    model = dataclasses.replace(MODEL, remat=remat, backend="blockwise")
    params = model_lib.init_params(model, jax.random.key(0))
    fn = jax.jit(jax.value_and_grad(functools.partial(step_lib.loss_fn, model, NextToken()))).lower(
        params, jnp.asarray(ROWS)
    )
    return fn.compile(), params


@pytest.mark.parametrize("remat", sorted(set(REMAT) - {"none"}))
def test_losses_and_gradients_are_the_same(remat):
    (want_loss, want), (loss, got) = (compiled(r)[0](compiled(r)[1], ROWS) for r in ("none", remat))
    assert np.isclose(loss, want_loss, rtol=1e-6)
    for (path, w), (_, g) in zip(jax.tree.leaves_with_path(want), jax.tree.leaves_with_path(got), strict=True):
        assert np.linalg.norm(w) < 1e-7 or relative_error(g, w) < 2e-5, path


def test_memory_shrinks():
    memory = {remat: compiled(remat)[0].memory_analysis().temp_size_in_bytes for remat in REMAT}
    assert memory["full"] < memory["attention_saved"] < 0.75 * memory["none"]


def test_only_full_computes_the_attention_again():
    def loops(remat):
        model = dataclasses.replace(MODEL, remat=remat, backend="blockwise")
        jaxpr = jax.make_jaxpr(jax.grad(functools.partial(step_lib.loss_fn, model, NextToken())))(
            compiled(remat)[1], ROWS
        )
        return str(jaxpr).count(" while[")

    assert loops("none") > 0
    assert loops("attention_saved") == loops("none")
    assert loops("full") > loops("none")


def test_an_unknown_policy_is_refused():
    with pytest.raises(UserError, match="remat='ful' is unknown; did you mean 'full'"):
        dataclasses.replace(MODEL, remat="ful")
