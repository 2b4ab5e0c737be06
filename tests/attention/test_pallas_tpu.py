"""The TPU kernels, interpreted: one small case for each thing that they do, several tiles in each.

The whole suite of ``test_backends.py`` runs with them too, among the slow tests.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dape_jax import FIRE, Adapt, ALiBi, BlockSizes, KerpleLog, KerplePower, T5Bias, UserError, biases, dape_attention
from dape_jax.attention import api, choose_backend, compile_for, target, tpu, tpu_blocks, tpu_plan, tpu_rows, tuned
from tests.attention.cases import assert_gradients_close, attend, make, run, segments
from tests.conftest import relative_error

LENGTH = 135  # two key tiles of 128, three query tiles of 64, none of them whole
ROWS = np.random.default_rng(0)
OWN_TILES = BlockSizes(32, 256, backward=BlockSizes(64, 128))
# What interpreting costs is tracing: wide networks, of which few queries make a group, are traced sooner.
CASES = {
    "fire, grouped heads": (FIRE(width=8, init_length=16.0), Adapt(width=8), {"kv_heads": 1}, {}),
    "t5, segments": (T5Bias(), Adapt("add_residual", width=4), {},
                     {"q_segment_ids": segments(2, LENGTH), "k_segment_ids": segments(2, LENGTH)}),
    "alibi, positions of each row": (ALiBi(), Adapt("concat", width=4), {}, {
        "q_positions": jnp.asarray(ROWS.integers(0, 300, (2, LENGTH)), jnp.int32),
        "k_positions": jnp.asarray(ROWS.integers(0, 300, (2, LENGTH)), jnp.int32)}),
    "kerple, networks of single heads": (KerpleLog(), Adapt(width=3, per_head=True), {}, {}),
    "power, convolution, padding": (KerplePower(), Adapt(width=4, kernel_width=3), {}, {
        "k_valid": jnp.asarray(np.arange(LENGTH)[None] < np.array([[126], [LENGTH]]))}),
    "bias alone, bidirectional": (KerpleLog(), Adapt("bias_only", width=4), {}, {"causal": False}),
    "nothing, fewer queries": (None, None, {"q_length": 70}, {}),
    "alibi from tables, fewer queries": (
        ALiBi(), Adapt(width=32), {"q_length": 70, "k_length": 300, "blocks": OWN_TILES}, {}),
    "t5 from tables, bidirectional": (
        T5Bias(), Adapt("concat", width=32), {"q_length": 90, "blocks": BlockSizes(16, 256)}, {"causal": False}),
    "power from tables, segments": (KerplePower(), Adapt("add_residual", width=32), {}, {
        "q_segment_ids": segments(2, LENGTH), "k_segment_ids": segments(2, LENGTH)}),
    "no bias, positions of each row": (None, Adapt(width=5), {}, {
        "q_positions": jnp.asarray(ROWS.integers(0, 300, (2, LENGTH)), jnp.int32),
        "k_positions": jnp.asarray(ROWS.integers(0, 300, (2, LENGTH)), jnp.int32)}),
    "padding": (KerpleLog(), None, {"blocks": BlockSizes(16, 128)}, {
        "k_valid": jnp.asarray(np.arange(LENGTH)[None] >= np.array([[130], [LENGTH]]))}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_against_the_reference(name):
    bias, adapt, shape, kwargs = CASES[name]
    shape = {"q_length": LENGTH, "k_length": LENGTH, "kv_heads": 2, "blocks": BlockSizes(64, 128), **shape}
    arrays, cotangent = make(2, shape["q_length"], shape["k_length"], 2, shape["kv_heads"], 8, bias, adapt)
    want, want_grads = run("reference", arrays, cotangent, bias, adapt, **kwargs)
    got, grads = run("pallas_tpu", arrays, cotangent, bias, adapt, kernel_blocks=shape["blocks"], **kwargs)
    assert relative_error(got, want) < 2e-6
    assert_gradients_close(grads, want_grads, 3e-5)
    assert not np.any(grads[4].get("b2", 0.0))
    if name == "padding":
        assert not np.any(np.asarray(got)[1])
    if name == "power from tables, segments":  # without a backward to follow, W1 enters with less
        alone = functools.partial(attend, "pallas_tpu", bias=bias, adapt=adapt, kernel_blocks=shape["blocks"], **kwargs)
        assert relative_error(jax.jit(alone)(*arrays), want) < 2e-6


def test_bfloat16_within_its_bounds():
    """The reference receives the same rounded q, k, v in float32. Six heads fill no tile of eight rows; two slabs of
    keys are one product of v6e's wide matrix unit."""
    bias, adapt = KerpleLog(), Adapt(width=32)
    arrays, cotangent = make(1, LENGTH, LENGTH, 6, 6, 16, bias, adapt, jnp.bfloat16)
    got, grads = run(
        "pallas_tpu", arrays, cotangent, bias, adapt, kernel_blocks=BlockSizes(32, 256), device_kind="TPU v6 lite"
    )
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (arrays, cotangent))
    want, want_grads = run("reference", *exact, bias, adapt)
    assert got.dtype == jnp.bfloat16
    assert relative_error(got, want) < 1e-2
    assert_gradients_close(grads, want_grads, 1e-2)  # 2 % is allowed; one pass over S and B needs more


@pytest.mark.parametrize("bias", [T5Bias(num_buckets=12, max_distance=50), FIRE(width=5, activation="leaky_relu")])
def test_features_times_weights_are_the_formula(bias):
    heads, group = 2, 4
    rows = tpu_rows.Rows(api.Spec(bias, None, True, 1.0, heads), group, 128, True)
    params = bias.init(jax.random.key(0), heads)
    q, k = jnp.arange(60, 60 + group), jnp.arange(128)
    each = tuple(jnp.full((1, 128), x) for x in q)
    geometry = tpu_rows.Geometry(None, each, k[None], None, None)
    got = tpu_rows.logits(rows, tpu_rows.pack(rows, params, {}), jnp.zeros((group * heads, 128)), geometry)
    want = biases.bias_values(bias, params, heads, q, k)
    assert relative_error(got.reshape(group, heads, 128), want.swapaxes(0, 1)) < 1e-6


@pytest.mark.parametrize("length", [256, 250])
def test_causal_blocks_out_of_reach_are_not_fetched(length):
    """The range of the inner grid axis that the index maps stay within, for both kernels."""
    x = jnp.zeros((1, length, 2, 8))
    spec, arrays = api.check(x, x, x)
    plan = tpu_plan.make_plan(spec, arrays, BlockSizes(64, 128), target.Target("tpu", ""), saving=True)
    keys = tpu._key_info(plan, arrays)
    forward = tpu._scalars(plan, arrays, keys, "k")
    assert (forward.first.tolist(), forward.last.tolist()) == ([0] * 4, [1, 1, 2, 2])
    backward = tpu._scalars(plan, arrays, keys, "q")
    assert (backward.first.tolist(), backward.last.tolist()) == ([0, 2], [4, 4])
    blocks = tpu._Blocks(plan, "qk")
    assert blocks.keys(8).index_map(0, 1, 1, *forward) == (0, 0, 0)


def test_a_nan_stays_in_its_row_and_group():
    bias, adapt = KerpleLog(), Adapt(width=32)
    (q, *rest), _ = make(2, 48, 48, 2, 2, 8, bias, adapt)
    of = functools.partial(attend, "pallas_tpu", bias=bias, adapt=adapt, kernel_blocks=BlockSizes(16, 128))
    before, after = of(q, *rest), of(q.at[0, 20].set(jnp.nan), *rest)
    assert np.all(np.isnan(after[0, 20]))
    assert np.array_equal(before[1], after[1])
    assert np.array_equal(before[0, :16], after[0, :16])
    assert np.array_equal(before[0, 24:], after[0, 24:])


def test_no_array_of_length_squared():
    bias, adapt = KerpleLog(), Adapt()
    arrays, cotangent = make(1, 2048, 2048, 2, 2, 64, bias, adapt)

    def step(arrays, cotangent):
        out, vjp = jax.vjp(functools.partial(attend, "pallas_tpu", bias=bias, adapt=adapt), *arrays)
        return out, vjp(cotangent)

    text = str(jax.make_jaxpr(step)(arrays, cotangent))
    shapes = [[int(n) for n in dims.split(",")] for dims in re.findall(r"\b(?:f32|bf16|i32|bool)\[([\d,]+)\]", text)]
    assert max(np.prod(s, dtype=np.int64) for s in shapes) < 2048 * 2048


def test_a_backward_with_tiles_of_its_own_is_for_kernels():
    x = jnp.zeros((1, 5, 2, 8))
    with pytest.raises(UserError, match="block size backward"):
        dape_attention(x, x, x, backend="blockwise", block_sizes=OWN_TILES)


def test_tuned_tiles():
    """The entry of the longest length that is not longer; others than of the same shape, and what does not fit, do
    not count."""
    device = target.Target("tpu", "TPU v5 lite")
    shape = {"device_kind": "TPU v5 lite", "heads": 2, "head_dim": 8, "dtype": "float32", "width": 4}
    entries = [
        (kernel, n, (16 * (i + 1), 128)) for i, n in enumerate((64, 128, 512)) for kernel in ("forward", "backward")
    ]
    entries[3] = ("backward", 128, (8192, 8192))
    table = [{**shape, "kernel": kernel, "length": n, "block_q": q, "block_k": k} for kernel, n, (q, k) in entries]

    def tiles(length, **adapt):
        x, adapt = jnp.zeros((1, length, 2, 8)), Adapt(**{"width": 4, **adapt})
        spec, arrays = api.check(x, x, x, adapt=adapt, adapt_params=adapt.init(jax.random.key(0), 2, False))
        with tuned.using("tpu", table):
            plans = tpu_blocks.make_plans(spec, arrays, None, device)
        return plans.forward.block_q, plans.backward.block_q

    assert tiles(70) == (16, 16)
    assert tiles(200) == (32, 128)
    assert tiles(600) == (48, 48)
    default = (128, 128)
    assert tiles(200, width=5) == tiles(200, per_head=True) == tiles(200, kernel_width=3) == default


@pytest.mark.parametrize(
    ("kind", "budget", "heads", "d"),
    [("TPU v4", 11, 1, 64), ("TPU v4", 13.125, 25, 64), ("TPU v5 lite", 48, 12, 64), ("", 48, 64, 64),
     ("TPU v5", 56, 112, 128), ("TPU v5 lite", 104, 224, 128)],
)  # fmt: skip
def test_default_blocks_fit_the_memory(kind, budget, heads, d):
    """The last two fit only what kernels may take where nothing fits the usual share."""

    def f(x):
        spec, arrays = api.check(x, x, x)
        device = target.Target("tpu", kind)
        for backward in (False, True):
            blocks = tpu_blocks.default_blocks(spec, arrays, device, backward)
            assert tpu_blocks.vmem_bytes(spec, arrays, blocks, device, backward) <= budget * 2**20
        return x

    jax.eval_shape(f, jax.ShapeDtypeStruct((1, 4096, heads, d), jnp.bfloat16))


def test_the_choice_by_platform(caplog):
    arrays, _ = make(1, 5, 5, 2, 2, 4, None, None)
    with pytest.raises(UserError, match="backend='pallas_tpu' needs a TPU, and JAX runs on cpu"):
        dape_attention(*arrays[:3], backend="pallas_tpu")
    assert choose_backend() == "blockwise"
    with compile_for("tpu", "TPU v5 lite"):
        assert choose_backend() == "pallas_tpu"
        call = api.check(*(jnp.zeros((1, 5, 2, 256)) for _ in range(3)))
        with caplog.at_level("INFO", logger="dape_jax.attention.api"):
            assert choose_backend(call=call) == "blockwise"
        assert "pallas_tpu is not used: q has head dimension 256" in caplog.text
    with pytest.raises(UserError, match="platform='tpux' is unknown; did you mean 'tpu'"), compile_for("tpux"):
        pass
    with pytest.raises(UserError, match="device_kind='v5e': a name as JAX has it"), compile_for("tpu", "v5e"):
        pass


class Mine(biases.Bias):
    def value(self, params, q_position, k_position):
        return 0.0 * (q_position + k_position)


REFUSED = {
    "q has dtype float16": {"q": jnp.zeros((1, 5, 2, 8), jnp.float16)},
    "q has head dimension 200": {"q": jnp.zeros((1, 5, 2, 200))},
    "bias Mine has no kernel": {"bias": Mine()},
    "no block size fits 56 MiB": {"q": jnp.zeros((1, 16, 512, 128))},
    "block size rows=2": {"block_sizes": BlockSizes(16, 128, 2)},
    "block size q=8": {"block_sizes": BlockSizes(8, 128, 1)},
    "block size backward: block size q=8": {"block_sizes": BlockSizes(16, 128, backward=BlockSizes(8, 128))},
    "block size k=64": {"block_sizes": BlockSizes(16, 64, 1)},
    "need about .* MiB of VMEM": {"block_sizes": BlockSizes(2048, 2048, 1)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(message):
    kwargs = {"q": jnp.zeros((1, 5, 2, 8)), **REFUSED[message]}
    q = kwargs.pop("q")
    with compile_for("interpret"), pytest.raises(UserError, match=message) as error:
        dape_attention(q, q, q, backend="pallas_tpu", **kwargs)
    assert "\n" not in str(error.value)
