"""Cases and helpers that the tests of all backends share."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dape_jax import FIRE, Adapt, ALiBi, BlockSizes, KerpleLog, KerplePower, T5Bias, dape_attention
from dape_jax.attention import compile_for
from tests.conftest import relative_error

BIASES = [None, ALiBi(), KerpleLog(), KerplePower(), T5Bias(), FIRE(width=8, init_length=16.0)]
ADAPTS = [None, Adapt(width=8), Adapt("concat", width=8), Adapt("add_residual", width=4), Adapt(width=4, per_head=True),
          Adapt(width=16, kernel_width=3), Adapt("bias_only", width=8)]  # fmt: skip
CONVOLVING = [Adapt("concat", width=4, kernel_width=5), Adapt("add_residual", width=4, kernel_width=3),
              Adapt("bias_only", width=4, kernel_width=3), Adapt(width=4, per_head=True, kernel_width=3)]  # fmt: skip
# Interpreted; test_pallas_tpu.py and test_pallas_gpu.py have the fast tests.
KERNELS = [pytest.param(name, marks=pytest.mark.slow) for name in ("pallas_tpu", "pallas_gpu")]
TILED = ["blockwise", *KERNELS]
EVERY = [*TILED, "reference"]


def make(batch, q_length, k_length, heads, kv_heads, d, bias, adapt, dtype=jnp.float32, seed=0):
    keys = jax.random.split(jax.random.key(seed), 6)
    q = jax.random.normal(keys[0], (batch, q_length, heads, d), dtype)
    k = jax.random.normal(keys[1], (batch, k_length, kv_heads, d), dtype)
    v = jax.random.normal(keys[2], (batch, k_length, kv_heads, d), dtype)
    bias_params = {} if bias is None else bias.init(keys[3], heads)
    adapt_params = {} if adapt is None else adapt.init(keys[4], heads, bias is not None)
    cotangent = jax.random.normal(keys[5], q.shape, dtype)
    return (q, k, v, bias_params, adapt_params), cotangent


def attend(backend, *arrays, blocks=None, kernel_blocks=None, device_kind="", bias=None, adapt=None, **kwargs):
    """``dape_attention`` of (q, k, v, bias_params, adapt_params); the kernels interpreted, in small tiles, as for a TPU
    of ``device_kind``.

    ``blocks`` are the blockwise backend's; the kernels take their smallest where any are given, or ``kernel_blocks``.
    """
    q, k, v, bias_params, adapt_params = arrays
    smallest = {"pallas_tpu": BlockSizes(q=16, k=128, rows=1), "pallas_gpu": BlockSizes(q=16, k=16, rows=1)}
    sizes = {"blockwise": blocks, **{name: kernel_blocks or (blocks and size) for name, size in smallest.items()}}
    with compile_for("interpret", device_kind) if backend in smallest else contextlib.nullcontext():
        return dape_attention(
            q, k, v, bias=bias, bias_params=bias_params, adapt=adapt, adapt_params=adapt_params,
            backend=backend, block_sizes=sizes.get(backend), **kwargs,
        )  # fmt: skip


OPTIMISED = {"xla_backend_optimization_level": 3}
"""As users compile, where the fast tests do not."""


def run(backend, arrays, cotangent, bias, adapt, blocks=None, compiler_options=None, **kwargs):
    """Output and gradients of everything, for a random cotangent."""

    @functools.partial(jax.jit, compiler_options=compiler_options)
    def both(arrays, cotangent):
        of = functools.partial(attend, backend, blocks=blocks, bias=bias, adapt=adapt, **kwargs)
        out, vjp = jax.vjp(of, *arrays)
        return out, vjp(cotangent)

    return both(arrays, cotangent)


def assert_gradients_close(got, want, tolerance, **wider):
    """``wider``: parameters by name that are allowed more."""
    paths = jax.tree.leaves_with_path(want)
    leaves = jax.tree.leaves(got)
    assert len(paths) == len(leaves)
    for (path, w), g in zip(paths, leaves, strict=True):
        w = np.asarray(w, np.float64)
        if path == (jax.tree_util.SequenceKey(4), jax.tree_util.DictKey("b2")):  # zero but for rounding, at any length
            assert max(np.abs(g).max(), np.abs(w).max()) < 1e-3
        elif np.linalg.norm(w) < 1e-5 * max(1.0, w.size**0.5):  # zero up to rounding: a row constant, cancelled
            assert np.abs(np.asarray(g, np.float64)).max() < 1e-4, path
        else:
            # FIRE's c is one number, a difference of large sums: both sides carry more rounding there.
            allowed = {"c": max(tolerance, 2e-4), **wider}.get(getattr(path[-1], "key", None), tolerance)
            assert relative_error(g, w) < allowed, (path, relative_error(g, w))


def segments(batch, length):
    ids = np.sort(np.random.default_rng(1).integers(0, 3, (batch, length)), axis=1)
    return jnp.asarray(ids, jnp.int32)


ARGUMENTS = {
    "grouped heads": ({"kv_heads": 2}, {}),
    "one key head": ({"kv_heads": 1}, {}),
    "fewer queries than keys": ({"q_length": 5}, {}),
    "segments": ({}, {"q_segment_ids": segments(3, 21), "k_segment_ids": segments(3, 21)}),
    "padding": ({}, {"k_valid": jnp.asarray(np.arange(21)[None] < np.asarray([[21], [13], [1]]))}),
    "a row that sees nothing": ({}, {"k_valid": jnp.asarray(np.arange(21)[None] >= np.asarray([[0], [4], [21]]))}),
    "dealt positions": ({}, {"q_positions": jnp.arange(21, dtype=jnp.int32) * 7 % 21,
                             "k_positions": jnp.arange(21, dtype=jnp.int32) * 5 % 21}),
    "positions of each row": ({}, {
        "q_positions": jnp.asarray(np.random.default_rng(2).integers(0, 9000, (3, 21)), jnp.int32),
        "k_positions": jnp.asarray(np.random.default_rng(3).integers(0, 9000, (3, 21)), jnp.int32)}),
    "a scale": ({}, {"scale": 0.7}),
}  # fmt: skip
