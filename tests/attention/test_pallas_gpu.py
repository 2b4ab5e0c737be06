"""The GPU kernels, interpreted: one small case for each thing that they do, several tiles in each; and lowered.

The whole suite of ``test_backends.py`` runs with them too, among the slow tests; ``test_compile_gpu.py`` compiles them.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dape_jax import FIRE, Adapt, ALiBi, BlockSizes, KerpleLog, KerplePower, T5Bias, UserError, biases, dape_attention
from dape_jax.attention import api, choose_backend, compile_for, gpu, target, tuned
from tests.attention.cases import assert_gradients_close, attend, make, run, segments
from tests.conftest import relative_error

LENGTH, ODD = 48, 37  # three tiles of 16, the last whole or not
ROWS = np.random.default_rng(0)
CASES = {
    "fire, grouped heads": (FIRE(width=8, init_length=16.0), Adapt(width=8), {"kv_heads": 1, "length": ODD, "d": 8},
                            {}),
    "t5, no network, segments": (T5Bias(num_buckets=8, max_distance=20), None, {},
                     {"q_segment_ids": segments(2, LENGTH), "k_segment_ids": segments(2, LENGTH)}),
    "alibi, positions of each row": (ALiBi(), None, {}, {
        "q_positions": jnp.asarray(ROWS.integers(0, 90, (2, LENGTH)), jnp.int32),
        "k_positions": jnp.asarray(ROWS.integers(0, 90, (2, LENGTH)), jnp.int32)}),
    "power, networks of single heads": (KerplePower(), Adapt(width=3, per_head=True), {"kv_heads": 1}, {}),
    "padding, fewer queries, bidirectional": (None, None, {"q_length": 20, "length": ODD}, {
        "causal": False, "k_valid": jnp.asarray(np.arange(ODD)[None] < np.array([[30], [0]]))}),
    "power, convolution, keys that pad": (KerplePower(), Adapt(width=4, kernel_width=3), {"length": ODD, "d": 8}, {
        "k_valid": jnp.asarray(np.arange(ODD)[None] < np.array([[32], [5]]))}),
    "convolutions of single heads, fewer queries": (ALiBi(), Adapt("concat", 3, True, 3), {
        "q_length": 20, "kv_heads": 1}, {"causal": False}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_against_the_reference(name):
    bias, adapt, shape, kwargs = CASES[name]
    shape = {"length": LENGTH, "kv_heads": 2, "d": 16, **shape}
    q_length = shape.get("q_length", shape["length"])
    arrays, cotangent = make(2, q_length, shape["length"], 2, shape["kv_heads"], shape["d"], bias, adapt)
    want, want_grads = run("reference", arrays, cotangent, bias, adapt, **kwargs)
    got, grads = run("pallas_gpu", arrays, cotangent, bias, adapt, BlockSizes(16, 16, 1), **kwargs)
    assert relative_error(got, want) < 2e-6
    assert_gradients_close(grads, want_grads, 3e-5)
    assert not np.any(grads[4].get("b2", 0.0))
    if "padding" in name:
        assert not np.any(np.asarray(got)[1])


@pytest.mark.parametrize("kernel_width", [1, 3])
def test_bfloat16_within_its_bounds(kernel_width):
    """The reference receives the same rounded q, k, v in float32. Neither 3 heads nor 24 numbers are powers of two."""
    bias, adapt = KerpleLog(), Adapt(width=8, kernel_width=kernel_width)
    arrays, cotangent = make(1, ODD, ODD, 3, 3, 24, bias, adapt, jnp.bfloat16)
    got, grads = run("pallas_gpu", arrays, cotangent, bias, adapt)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (arrays, cotangent))
    want, want_grads = run("reference", *exact, bias, adapt)
    assert got.dtype == jnp.bfloat16
    assert relative_error(got, want) < 1e-2
    assert_gradients_close(grads, want_grads, 1e-2)  # 2 % is allowed; one pass over S and B needs more


def test_heads_are_joined_and_split_in_order():
    heads = 5
    x = [jnp.full((2, 3), float(h)) for h in range(heads)]
    joined = gpu._join(x, 16)
    assert joined.shape == (2, 3, 16)
    assert joined[1, 2].tolist() == [*range(heads), *[0] * (16 - heads)]
    assert [y[0, 0].item() for y in gpu._split(joined)][:heads] == list(range(heads))


def test_numbers_are_spread_exactly():
    x = jax.random.normal(jax.random.key(0), (4, 4, 16)) * jnp.exp2(jnp.arange(16.0) * 4 - 30)[None, None]
    assert np.array_equal(gpu._spread(x), x)


@pytest.mark.parametrize("length", [1, 2, 9])
def test_shifted_sums_end_with_the_array(length):
    xs = np.random.default_rng(0).normal(size=(5, 2, length, 3)).astype(np.float32)
    want = np.zeros_like(xs[0])
    for x, shift in zip(xs, range(-2, 3), strict=True):
        for j in range(max(0, shift), min(length, length + shift)):
            want[:, j] += x[:, j - shift]
    assert np.allclose(gpu._shifted_sum(list(xs)), want, atol=1e-6)


@pytest.mark.parametrize("length", [64, 60])
def test_causal_blocks_out_of_reach_are_not_computed(length):
    x = jnp.zeros((1, length, 2, 8))
    spec, arrays = api.check(x, x, x)
    plan, tile = gpu.make_plan(spec, arrays, None, target.Target("interpret", "")), gpu.Tile(16, 32, 4)
    assert gpu._bounds(plan, tile, arrays, "q").tolist() == [[[0, 1], [0, 1], [0, 2], [0, 2]]]
    assert gpu._bounds(plan, tile, arrays, "k").tolist() == [[[0, 4], [2, 4]]]


def test_tuned_tiles():
    """Of the kernels, the device and the shape that the table has; biases with features keep their own."""
    shape = {"device_kind": "NVIDIA H100", "heads": 2, "head_dim": 8, "dtype": "float32", "width": 4, "length": 32}
    entry = {**shape, "kernel": "queries", "block_q": 32, "block_k": 16, "warps": 2, "stages": 3}

    def tiles(device="NVIDIA H100", bias=None, **adapt):
        x, adapt = jnp.zeros((1, 64, 2, 8)), Adapt(**{"width": 4, **adapt})
        params = {} if bias is None else bias.init(jax.random.key(0), 2)
        adapt_params = adapt.init(jax.random.key(0), 2, bias is not None)
        spec, arrays = api.check(x, x, x, bias=bias, bias_params=params, adapt=adapt, adapt_params=adapt_params)
        with tuned.using("gpu", [entry]):
            plan = gpu.make_plan(spec, arrays, None, target.Target("gpu", device))
        return plan.forward, plan.queries, plan.keys

    usual = gpu.Tile(16, 16, 8)
    assert tiles() == tiles(bias=ALiBi()) == (usual, gpu.Tile(32, 16, 2, 3), usual)
    assert tiles(device="NVIDIA A100") == tiles(bias=FIRE(width=4)) == tiles(width=5) == (usual,) * 3


def both(bias, adapt):
    def step(arrays, cotangent):
        out, vjp = jax.vjp(functools.partial(attend, "pallas_gpu", bias=bias, adapt=adapt), *arrays)
        return out, vjp(cotangent)

    return step


def test_no_array_of_length_squared():
    bias, adapt = KerpleLog(), Adapt()
    text = str(jax.make_jaxpr(both(bias, adapt))(*make(1, 2048, 2048, 2, 2, 64, bias, adapt)))
    shapes = [[int(n) for n in dims.split(",")] for dims in re.findall(r"\b(?:f32|bf16|i32|bool)\[([\d,]+)\]", text)]
    assert max(np.prod(s, dtype=np.int64) for s in shapes) < 2048 * 2048


@pytest.mark.parametrize(
    ("bias", "adapt"),
    [(KerpleLog(), Adapt(width=8)), (FIRE(), Adapt("concat", per_head=True)), (T5Bias(), Adapt("add_residual")),
     (KerplePower(), None), (ALiBi(), Adapt(width=8, kernel_width=3))], ids=repr,
)  # fmt: skip
def test_every_operation_lowers_to_triton(bias, adapt):
    """Which needs no GPU and no CUDA."""
    arrays, cotangent = jax.eval_shape(lambda: make(2, 70, 70, 2, 1, 80, bias, adapt, jnp.bfloat16))
    ids, valid = jnp.zeros((2, 70), jnp.int32), jnp.ones((2, 70), bool)

    def step(arrays, cotangent):
        def f(q, k, v, bias_params, adapt_params):
            return dape_attention(
                q, k, v, bias=bias, bias_params=bias_params, adapt=adapt, adapt_params=adapt_params,
                q_segment_ids=ids, k_segment_ids=ids, k_valid=valid, q_positions=ids, k_positions=ids,
                    backend="pallas_gpu",
            )  # fmt: skip

        out, vjp = jax.vjp(f, *arrays)
        return out, vjp(cotangent)

    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), (jax.sharding.AxisType.Auto,), abstract_device=device)
    with (
        compile_for("gpu", device.device_kind),
        jax.sharding.use_abstract_mesh(mesh),
    ):  # JAX 0.12 asks for the GPU's generation
        text = jax.jit(step).trace(arrays, cotangent).lower(lowering_platforms=("cuda",)).as_text()
    for kernel in ("forward", "queries", "keys"):
        assert f"dape_attention_{kernel}" in text


def test_the_choice_by_platform(caplog):
    arrays, _ = make(1, 5, 5, 2, 2, 4, None, None)
    with pytest.raises(UserError, match="backend='pallas_gpu' needs a GPU, and JAX runs on cpu"):
        dape_attention(*arrays[:3], backend="pallas_gpu")
    with compile_for("tpu"), pytest.raises(UserError, match="backend='pallas_gpu' needs a GPU, and JAX runs on tpu"):
        choose_backend("pallas_gpu")
    with compile_for("gpu", "NVIDIA L4"):
        assert choose_backend() == "blockwise"
        assert choose_backend("pallas_gpu") == "pallas_gpu"
    with compile_for("gpu", "NVIDIA H100 80GB HBM3"):
        assert choose_backend() == "pallas_gpu"
        with pytest.raises(UserError, match="backend='pallas_tpu' needs a TPU, and JAX runs on gpu"):
            choose_backend("pallas_tpu")
        call = api.check(*(jnp.zeros((1, 5, 2, 256)) for _ in range(3)))
        with caplog.at_level("INFO", logger="dape_jax.attention.api"):
            assert choose_backend(call=call) == "blockwise"
        assert "pallas_gpu is not used: q has head dimension 256" in caplog.text
        adapt = Adapt(width=4, kernel_width=3)
        params = adapt.init(jax.random.key(0), 2, has_bias=False)
        x = jnp.zeros((1, 5, 2, 8), jnp.bfloat16)
        call = api.check(x, x, x, adapt=adapt, adapt_params=params)
        assert choose_backend(call=call) == "blockwise"  # untimed, and more than the registers hold
        assert choose_backend("pallas_gpu", call=call) == "pallas_gpu"
    with compile_for("interpret"):
        assert choose_backend() == "blockwise"


class Mine(biases.Bias):
    def value(self, params, q_position, k_position):
        return 0.0 * (q_position + k_position)


REFUSED = {
    "q has dtype float16": {"q": jnp.zeros((1, 5, 2, 8), jnp.float16)},
    "q has head dimension 200": {"q": jnp.zeros((1, 5, 2, 200))},
    "bias Mine has no kernel": {"bias": Mine()},
    "q has 32 heads of 128, mixed by the network": {"q": jnp.zeros((1, 16, 32, 128)), "adapt": Adapt(width=4)},
    "adapt has width=65": {"adapt": Adapt(width=65)},
    "adapt has kernel_width=7": {"adapt": Adapt(width=4, kernel_width=7)},
    "adapt has width=64, padded to 64, and the bias 32 features": {"adapt": Adapt(width=64), "bias": T5Bias()},
    "block size rows=2": {"block_sizes": BlockSizes(16, 16, 2)},
    "block size q=8": {"block_sizes": BlockSizes(8, 16, 1)},
    "block sizes q=16, k=32: a GPU program holds at most 256 positions": {
        "block_sizes": BlockSizes(16, 32, 1),
        "adapt": Adapt(),
    },
    "block size k=48": {"block_sizes": BlockSizes(16, 48, 1)},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_served_is_refused_by_name(message):
    kwargs = {"q": jnp.zeros((1, 5, 2, 8)), **REFUSED[message]}
    q, adapt, bias, key = kwargs.pop("q"), kwargs.get("adapt"), kwargs.get("bias"), jax.random.key(0)
    params = {} if adapt is None else adapt.init(key, q.shape[2], has_bias=bias is not None)
    kwargs["bias_params"] = {} if bias is None else bias.init(key, q.shape[2])
    with compile_for("interpret"), pytest.raises(UserError, match=message) as error:
        dape_attention(q, q, q, adapt_params=params, backend="pallas_gpu", **kwargs)
    assert "\n" not in str(error.value)
