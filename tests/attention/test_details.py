"""Details that the broad comparisons would let pass: skipped tiles, precision, keys of initial parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dape_jax import FIRE, Adapt, BlockSizes, KerpleLog, T5Bias, biases, dape_attention, rope
from dape_jax.attention import api, blocks, blockwise, reference
from tests.attention.cases import EVERY, attend, make, run
from tests.conftest import relative_error


@pytest.mark.parametrize("length", [16, 15, 17])
def test_causal_skips_tiles_also_at_odd_lengths(length):
    x = jnp.zeros((1, length, 2, 4))
    spec, arrays = api.check(x, x, x)
    first, last = blockwise._key_range(spec, BlockSizes(q=4, k=4, rows=1), arrays)
    assert first.tolist() == [0] * len(first)
    assert last.tolist() == list(range(1, len(last) + 1))


def test_tiles_are_kept_when_a_key_is_the_latest_query():
    q = jnp.zeros((1, 15, 1, 4))
    v = jax.random.normal(jax.random.key(0), q.shape)  # 5 and 3 divide 15: no padding
    got = dape_attention(q, q, v, backend="blockwise", block_sizes=BlockSizes(q=5, k=3, rows=1))
    assert relative_error(got, dape_attention(q, q, v, backend="reference")) < 1e-6


def test_parameters_draw_from_keys_of_their_own():
    p = KerpleLog().init(jax.random.key(0), 64)
    assert abs(np.corrcoef(p["p"], p["a"])[0, 1]) < 0.5
    f = FIRE(width=64).init(jax.random.key(0), 4)
    assert abs(np.corrcoef(f["w1"], f["b1"])[0, 1]) < 0.5
    a = Adapt(
        width=64,
    ).init(jax.random.key(0), 32)
    assert not np.array_equal(a["w1"][0, 0] * 8, a["b1"] * 8)


def test_initial_ranges_of_the_rest():
    f = FIRE(width=100).init(jax.random.key(0), 1000)
    assert 0.09 < float(jnp.abs(f["b2"]).max()) <= 0.1
    assert 0.9 < float(jnp.abs(f["b1"]).max()) <= 1
    a = Adapt(width=1000).init(jax.random.key(0), 50)
    assert 0.09 < float(jnp.abs(a["b1"]).max()) <= 0.1
    assert 0.02 < float(jnp.abs(a["b2"]).max()) <= 1000**-0.5
    assert abs(float(T5Bias().init(jax.random.key(0), 100)["table"].std()) / 0.02 - 1) < 0.05


def test_fire_takes_absolute_values_of_c_and_L():
    bias = FIRE(width=4, init_length=8.0)
    p, t = bias.init(jax.random.key(0), 3), jnp.arange(20)
    n = {**p, "c": -p["c"], "L_multiplier": -p["L_multiplier"]}
    assert np.array_equal(biases.bias_values(bias, p, 3, t, t), biases.bias_values(bias, n, 3, t, t))


def test_fire_at_c_zero_is_finite():
    bias, t = FIRE(width=4), jnp.arange(5)
    p = {**bias.init(jax.random.key(0), 3), "c": jnp.asarray(0.0)}
    assert np.all(np.isfinite(biases.bias_values(bias, p, 3, t, t)))


def test_differences_before_floats():
    base = 2**30
    q, k = jnp.asarray([base + 3]), base + jnp.arange(4)
    p = KerpleLog().init(jax.random.key(0), 2)
    near = biases.bias_values(KerpleLog(), p, 2, q - base, k - base)
    assert np.array_equal(biases.bias_values(KerpleLog(), p, 2, q, k), near)


def test_rope_in_bfloat16_rounds_once():
    x = jax.random.normal(jax.random.key(0), (1, 64, 2, 64)).astype(jnp.bfloat16)
    t = jnp.arange(4000, 4064)
    assert np.array_equal(rope(x, t), rope(x.astype(jnp.float32), t).astype(jnp.bfloat16))


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_product_has_its_precision(backend, dtype):
    q = jnp.zeros((1, 8, 2, 4), dtype)
    bias, adapt = KerpleLog(), Adapt(width=4)
    bp, ap = bias.init(jax.random.key(0), 2), adapt.init(jax.random.key(1), 2)

    def f(q, ap):
        out = dape_attention(q, q, q, bias=bias, bias_params=bp, adapt=adapt, adapt_params=ap, backend=backend)
        return out.astype(jnp.float32).sum()

    text = jax.jit(jax.grad(f, (0, 1))).lower(q, ap).as_text()
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert dots
    highest = sum("HIGHEST" in line for line in dots)
    assert highest == len(dots) if dtype == jnp.float32 else highest >= 6  # at least the network's


@pytest.mark.parametrize("chosen", ["reference", "blockwise"])
def test_forced_backend_with_every_argument(chosen, monkeypatch):
    other = blockwise if chosen == "reference" else reference
    monkeypatch.setattr(other, "attend", lambda *_: pytest.fail("the other backend ran"))
    q, ids = jnp.zeros((2, 5, 2, 4)), jnp.zeros((2, 5), jnp.int32)
    pos = jnp.broadcast_to(jnp.arange(5), (2, 5))
    for kw in (
        {"k_valid": jnp.ones((2, 5), bool)},
        {"q_segment_ids": ids, "k_segment_ids": ids},
        {"causal": False},
        {"q_positions": pos, "k_positions": pos},
        {"scale": 0.1},
    ):
        dape_attention(q, q, q, backend=chosen, **kw)


@pytest.mark.parametrize("backend", EVERY)
def test_bfloat16_logits_are_float32(backend):
    """S carries no bfloat16 rounding: large logits that differ by less than a bfloat16 step."""
    d = 64
    q = jnp.full((1, 1, 1, d), 8.0, jnp.bfloat16)
    k = jnp.full((1, 2, 1, d), 8.0, jnp.bfloat16).at[0, 1, 0, 0].set(8.0625)
    v = jnp.asarray([0.0, 1.0], jnp.bfloat16).reshape(1, 2, 1, 1) * jnp.ones((1, 2, 1, d), jnp.bfloat16)
    out = attend(backend, q, k, v, {}, {}, causal=False)
    assert abs(float(out[0, 0, 0, 0]) - 1 / (1 + np.exp(-0.0625))) < 3e-3


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_huge_logits_are_finite(backend, dtype):
    b, a = FIRE(width=4), Adapt(width=4)
    (q, *arrays), cotangent = make(1, 9, 9, 4, 4, 8, b, a, dtype)
    out, grads = run(backend, (1e4 * q, *arrays), cotangent, b, a)
    for x in jax.tree.leaves((out, grads)):
        assert np.all(np.isfinite(np.asarray(x, np.float32)))


def test_cpu_tiles_stay_small():
    for b, t in ((64, 64), (12, 130), (256, 2048)):
        sizes = blocks.heuristic(b, t, t, "cpu")
        assert sizes.rows * sizes.q * sizes.k <= 16384
        assert b % sizes.rows == 0
