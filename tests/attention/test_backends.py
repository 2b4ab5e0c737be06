"""One suite for all backends: every argument of the contract against the formula in float64."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dape_jax import FIRE, Adapt, ALiBi, BlockSizes, KerpleLog, KerplePower, T5Bias, UserError, dape_attention
from dape_jax.attention import choose_backend
from tests.attention.cases import (
    ADAPTS,
    ARGUMENTS,
    BIASES,
    CONVOLVING,
    EVERY,
    KERNELS,
    OPTIMISED,
    TILED,
    assert_gradients_close,
    attend,
    make,
    run,
)
from tests.attention.oracle import oracle
from tests.conftest import relative_error


def combinations():
    """Every bias with every network; the fast tests take each bias with one network and each network with Kerple."""
    for bias, adapt, causal in itertools.product(BIASES, [*ADAPTS, *CONVOLVING], [True, False]):
        if bias is None and adapt is not None and adapt.variant == "bias_only":
            continue
        fast = bias != KerplePower() and (adapt == ADAPTS[1] or (bias == KerpleLog() and causal))
        name = f"{bias}-{adapt}-{'causal' if causal else 'bidirectional'}"
        yield pytest.param(bias, adapt, causal, id=name, marks=() if fast else pytest.mark.slow)


@pytest.mark.parametrize("backend", TILED)
@pytest.mark.parametrize(("bias", "adapt", "causal"), list(combinations()))
def test_every_bias_with_every_network(bias, adapt, causal, backend):
    arrays, cotangent = make(2, 19, 19, 4, 4, 8, bias, adapt)
    positions = np.arange(19)
    q, k, v, bias_params, adapt_params = arrays
    expected = oracle(
        q, k, v, bias=bias, bias_params=bias_params, adapt=adapt, adapt_params=adapt_params, causal=causal,
        q_positions=positions, k_positions=positions,
    )  # fmt: skip
    results = {}
    for name in (backend, "reference"):
        out, results[name] = run(name, arrays, cotangent, bias, adapt, BlockSizes(q=8, k=4, rows=1), causal=causal)
        assert relative_error(out, expected) < 2e-6, name
    assert_gradients_close(results[backend], results["reference"], 3e-5)


@pytest.mark.parametrize(
    ("causal", "k"),
    [
        (True, 1),
        (False, 3),
        pytest.param(True, 3, marks=pytest.mark.slow),
        pytest.param(False, 1, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("backend", TILED)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_every_argument(name, causal, k, backend):
    shape, kwargs = ARGUMENTS[name]
    shape = {"q_length": 21, "kv_heads": 4, **shape}
    bias, adapt = KerpleLog(), Adapt(width=8, kernel_width=k)
    arrays, cotangent = make(3, shape["q_length"], 21, 4, shape["kv_heads"], 8, bias, adapt)
    q, k, v, bias_params, adapt_params = arrays
    scaled = q * (kwargs["scale"] * 8**0.5) if "scale" in kwargs else q
    expected = oracle(
        scaled, k, v, bias=bias, bias_params=bias_params, adapt=adapt, adapt_params=adapt_params, causal=causal,
        q_positions=kwargs.get("q_positions", np.arange(21 - shape["q_length"], 21)),
        k_positions=kwargs.get("k_positions", np.arange(21)),
        q_segments=kwargs.get("q_segment_ids"), k_segments=kwargs.get("k_segment_ids"), k_valid=kwargs.get("k_valid"),
    )  # fmt: skip
    results, blocks = {}, BlockSizes(q=4, k=8, rows=3)
    for choice in (backend, "reference"):
        out, results[choice] = run(choice, arrays, cotangent, bias, adapt, blocks, causal=causal, **kwargs)
        assert relative_error(out, expected) < 2e-6, choice
    assert_gradients_close(results[backend], results["reference"], 3e-5)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("backend", EVERY)
def test_keys_that_pad_are_beyond_the_last_one_for_a_convolution_too(backend, per_head):
    bias, adapt, length = KerpleLog(), Adapt(width=8, kernel_width=5, per_head=per_head), 13
    arrays, cotangent = make(2, 21, 21, 4, 2, 8, bias, adapt)
    cotangent = cotangent.at[:, length:].set(0.0)
    valid, blocks = jnp.broadcast_to(jnp.arange(21) < length, (2, 21)), BlockSizes(q=4, k=8, rows=2)
    got, grads = run(backend, arrays, cotangent, bias, adapt, blocks, causal=False, k_valid=valid)
    short = (*(x[:, :length] for x in arrays[:3]), *arrays[3:])
    want, want_grads = run(backend, short, cotangent[:, :length], bias, adapt, blocks, causal=False)
    assert relative_error(got[:, :length], want) < 2e-6
    assert not any(np.any(x[:, length:]) for x in grads[:3])
    assert_gradients_close((*(x[:, :length] for x in grads[:3]), *grads[3:]), want_grads, 3e-5)


@pytest.mark.parametrize("backend", EVERY)
def test_fully_masked_rows_give_zeros_and_zero_gradients(backend):
    bias, adapt = FIRE(width=4), Adapt(width=4)
    arrays, cotangent = make(2, 9, 9, 2, 2, 4, bias, adapt)
    k_valid = jnp.asarray(np.stack([np.arange(9) >= 3, np.zeros(9, bool)]))
    out, (d_q, d_k, d_v, d_bias, d_adapt) = run(
        backend, arrays, cotangent, bias, adapt, BlockSizes(q=4, k=4, rows=2), k_valid=k_valid
    )
    for x in (out, d_q):
        assert np.all(np.asarray(x[0, :3]) == 0)
        assert np.all(np.asarray(x[0, 3:]) != 0) or x is d_q
        assert np.all(np.asarray(x[1]) == 0)
    for x in (d_k, d_v):
        assert np.all(np.asarray(x[1]) == 0)
        assert np.all(np.asarray(x[0, :3]) == 0)
    for leaf in jax.tree.leaves((out, d_q, d_k, d_v, d_bias, d_adapt)):
        assert np.all(np.isfinite(leaf))


@pytest.mark.parametrize(
    "adapt", [None, Adapt(), Adapt(per_head=True), Adapt(kernel_width=3), Adapt(kernel_width=5)], ids=repr
)
@pytest.mark.parametrize("backend", EVERY)
def test_causality_by_gradient(backend, adapt):
    """The gradient of the output at position t with respect to every later input is exactly zero."""
    bias, t = FIRE(width=4, init_length=4.0), 6
    arrays, _ = make(1, 12, 12, 4, 4, 8, bias, adapt)
    cotangent = jnp.zeros((1, 12, 4, 8)).at[:, t].set(jax.random.normal(jax.random.key(9), (4, 8)))
    _, (d_q, d_k, d_v, *_) = run(backend, arrays, cotangent, bias, adapt, BlockSizes(q=4, k=4, rows=1))
    for name, grad in {"q": d_q, "k": d_k, "v": d_v}.items():
        assert np.all(np.asarray(grad[:, t + 1 :]) == 0), name
        assert np.any(np.asarray(grad[:, t]) != 0), name
    assert np.all(np.asarray(d_v[:, : t + 1]) != 0)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("length", [1, 7, 130, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("adapt", [None, Adapt()], ids=["plain", "dape"])
@pytest.mark.parametrize("bias", [KerpleLog(), ALiBi()], ids=repr)
@pytest.mark.parametrize("backend", TILED)
def test_against_reference_at_odd_lengths(backend, bias, adapt, length, dtype):
    """The reference receives the same rounded q, k, v in float32."""
    arrays, cotangent = make(2, length, length, 12, 12, 64, bias, adapt, dtype)
    # Interpreted, the GPU's many small tiles take longer to run than to compile well; the TPU's few large ones do not.
    options = OPTIMISED if length == 1000 and backend == "pallas_gpu" else None
    out, grads = run(backend, arrays, cotangent, bias, adapt, compiler_options=options)
    assert out.dtype == dtype
    kernels = backend.startswith("pallas")
    exact, exact_cotangent = jax.tree.map(lambda x: x.astype(jnp.float32), (arrays, cotangent))
    want, want_grads = run("reference", exact, exact_cotangent, bias, adapt)
    if dtype == jnp.float32:
        assert relative_error(out, want) < 2e-6
        # Of tens of millions of hidden values some lie within rounding of LeakyReLU's kink, and then on either side.
        kinks = {"b1": 1e-3, "w1": 5e-3} if kernels and length == 1000 else {}
        assert_gradients_close(grads, want_grads, 3e-5, **kinks)
    else:  # bfloat16's own rounding of the result is 2^-9 an entry; the kernels' network has products in bfloat16
        assert relative_error(out, want) < (1e-2 if kernels else 4e-3)
        assert_gradients_close(grads, want_grads, 2e-2 if kernels else 1e-2)


@pytest.mark.parametrize("shape", [(4, 4, 1), (8, 16, 2), (16, 8, 4), (32, 32, 1), (5, 3, 2)])
def test_block_sizes_do_not_change_the_result(shape):
    bias, adapt = T5Bias(), Adapt(width=8)
    arrays, cotangent = make(4, 29, 29, 4, 2, 8, bias, adapt)
    want = run("reference", arrays, cotangent, bias, adapt)
    got = run("blockwise", arrays, cotangent, bias, adapt, BlockSizes(*shape))
    assert relative_error(got[0], want[0]) < 2e-6
    assert_gradients_close(got[1], want[1], 2e-5)


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("backend", EVERY)
def test_editing_one_document_leaves_its_neighbours_bit_equal(backend, k):
    bias, adapt = KerpleLog(), Adapt(width=8, kernel_width=k)
    (q, key, v, bias_params, adapt_params), _ = make(1, 30, 30, 4, 4, 8, bias, adapt)
    ids = jnp.asarray(np.repeat([0, 1, 2], 10))[None]

    def of(q, key, v):
        blocks, segments = BlockSizes(8, 8, 1), {"q_segment_ids": ids, "k_segment_ids": ids}
        return attend(
            backend, q, key, v, bias_params, adapt_params, bias=bias, adapt=adapt, blocks=blocks, **segments
        )  # fmt: skip

    before, after = of(q, key, v), of(*(x.at[:, 10:20].add(1.0) for x in (q, key, v)))
    outside = np.r_[0:10, 20:30]
    assert np.array_equal(before[:, outside], after[:, outside])
    assert not np.any(np.all(np.isclose(before[:, 10:20], after[:, 10:20]), axis=(2, 3)))


@pytest.mark.parametrize("backend", EVERY)
def test_repeats_exactly(backend):
    bias, adapt = KerpleLog(), Adapt()
    arrays, cotangent = make(2, 70, 70, 4, 4, 8, bias, adapt)
    first, second = (run(backend, arrays, cotangent, bias, adapt) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True))


@pytest.mark.parametrize("backend", KERNELS)
def test_far_positions_keep_their_precision_in_bfloat16(backend):
    """ALiBi's bias reaches -5,800 at distance 8,192. test_properties.py holds the other backends to closer bounds."""
    bias, adapt = ALiBi(), Adapt()
    arrays, _ = make(1, 4, 64, 12, 12, 64, bias, adapt, jnp.bfloat16)
    q, k, v, bias_params, adapt_params = arrays
    q_positions, k_positions = jnp.arange(8192, 8196, dtype=jnp.int32), jnp.arange(0, 8192, 128, dtype=jnp.int32)
    expected = oracle(
        q, k, v, bias=bias, bias_params=bias_params, adapt=adapt, adapt_params=adapt_params, causal=True,
        q_positions=q_positions, k_positions=k_positions,
    )  # fmt: skip
    out = attend(backend, *arrays, bias=bias, adapt=adapt, q_positions=q_positions, k_positions=k_positions)
    assert relative_error(out, expected) < 4e-3


@pytest.mark.parametrize("positions", ["default", "given"])
@pytest.mark.parametrize("bias", [KerplePower(), T5Bias(), FIRE(activation="leaky_relu")], ids=repr)
@pytest.mark.parametrize("backend", TILED)
def test_the_other_biases_in_bfloat16(backend, bias, positions):
    """KerplePower's gradients weigh entries by up to 150 ** 1.97: a row that does not sum to zero shows."""
    adapt = Adapt()
    arrays, cotangent = make(1, 150, 150, 12, 12, 32, bias, adapt, jnp.bfloat16, seed=1)
    kwargs = {}
    if positions == "given":  # the same ones, which the kernels cannot know
        kwargs = {name: jnp.arange(150, dtype=jnp.int32) for name in ("q_positions", "k_positions")}
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (arrays, cotangent))
    want, want_grads = run("reference", *exact, bias, adapt, **kwargs)
    got, grads = run(backend, arrays, cotangent, bias, adapt, **kwargs)
    assert relative_error(got, want) < 1e-2
    assert_gradients_close(grads, want_grads, 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("bias", [KerpleLog(), KerplePower(), ALiBi()], ids=repr)
@pytest.mark.parametrize("backend", ["blockwise", "pallas_tpu"])  # the GPU's small tiles take too long, interpreted
def test_gradients_up_to_distance_8192_in_bfloat16(backend, bias):
    """ALiBi's W1 and W2 sum over biases in the thousands, so that whatever is rounded on the way would show."""
    adapt, blocks = Adapt(), BlockSizes(q=16, k=1024, rows=1)
    arrays, cotangent = make(1, 16, 8192, 12, 12, 64, bias, adapt, jnp.bfloat16)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (arrays, cotangent))
    want, want_grads = run("reference", *exact, bias, adapt)
    got, grads = run(backend, arrays, cotangent, bias, adapt, blocks)
    assert relative_error(got, want) < 1e-2
    assert_gradients_close(grads, want_grads, 2e-2)


def test_no_array_of_length_squared_in_the_blockwise_program():
    """Shapes in the compiled text, and the compiler's own count of memory: linear in T, forward and backward."""
    bias, adapt = KerpleLog(), Adapt()

    def compiled(length):
        arrays, cotangent = jax.eval_shape(lambda: make(1, length, length, 4, 4, 16, bias, adapt))

        def step(arrays, cotangent):
            out, vjp = jax.vjp(
                lambda q, k, v, b, a: dape_attention(
                    q, k, v, bias=bias, bias_params=b, adapt=adapt, adapt_params=a, backend="blockwise"
                ),
                *arrays,
            )
            return out, vjp(cotangent)

        return jax.jit(step).lower(arrays, cotangent).compile()

    sizes = {}
    for length in (2048, 4096, 8192):
        program = compiled(length)
        shapes = [
            [int(n) for n in dims.split(",")]
            for dims in re.findall(r"\b(?:f32|bf16|pred|s32)\[([\d,]+)\]", program.as_text())
        ]
        assert max(np.prod(s, dtype=np.int64) for s in shapes) < length * length
        sizes[length] = program.memory_analysis().temp_size_in_bytes
    assert sizes[8192] - sizes[4096] < 2.2 * (sizes[4096] - sizes[2048])


def test_names_of_backends():
    assert choose_backend() == "blockwise"
    assert choose_backend("reference") == "reference"
    with pytest.raises(UserError, match="did you mean 'blockwise'"):
        choose_backend("blockwize")
    with pytest.raises(UserError, match="the reference backend has no blocks"):
        choose_backend("reference", BlockSizes(1, 1, 1))


def test_a_forced_backend_is_the_one_that_runs(monkeypatch):
    from dape_jax.attention import blockwise, reference

    arrays, _ = make(1, 4, 4, 2, 2, 4, None, None)
    for chosen, module in (("reference", blockwise), ("blockwise", reference)):
        with monkeypatch.context() as patch:
            patch.setattr(module, "attend", lambda *_: pytest.fail("the other backend ran"))
            dape_attention(*arrays[:3], backend=chosen)


BAD = {
    "q has shape": lambda a: dict(a, q=a["q"][0]),
    "no dimension may be 0": lambda a: dict(a, q=a["q"][:, :0]),
    "k has dtype bfloat16": lambda a: dict(a, k=a["k"].astype(jnp.bfloat16)),
    "v has dtype int32": lambda a: dict(a, v=a["v"].astype(jnp.int32)),
    "must be alike": lambda a: dict(a, v=a["v"][:, :3]),
    "no multiple of the 3 heads": lambda a: dict(a, k=a["k"][:, :, :3], v=a["v"][:, :, :3]),
    "give q_positions": lambda a: dict(a, k=a["k"][:, :3], v=a["v"][:, :3]),
    "give both or neither": lambda a: dict(a, q_segment_ids=jnp.zeros((2, 5), jnp.int32)),
    r"k_valid has shape \(5,\)": lambda a: dict(a, k_valid=jnp.ones(5, bool)),
    "k_valid has dtype int32": lambda a: dict(a, k_valid=jnp.ones((2, 5), jnp.int32)),
    "q_positions has dtype float32": lambda a: dict(a, q_positions=jnp.arange(5.0)),
    "k_positions has shape": lambda a: dict(a, k_positions=jnp.arange(4)),
    r"bias_params\['a'\] is missing; shape \(4,\)": lambda a: dict(a, bias_params={"p": jnp.ones(4)}),
    r"bias_params\['b'\] is no parameter": lambda a: dict(a, bias_params={**a["bias_params"], "b": jnp.ones(4)}),
    r"bias_params\['a'\] has dtype int32": lambda a: dict(
        a, bias_params={**a["bias_params"], "a": jnp.ones(4, jnp.int32)}
    ),
    "causal='no': True or False": lambda a: dict(a, causal="no"),
    "batch_axes=3: a tuple of names": lambda a: dict(a, batch_axes=3),
    r"adapt_params\['w1'\] has shape": lambda a: dict(
        a, adapt=Adapt(), adapt_params=Adapt().init(jax.random.key(0), 4, has_bias=False)
    ),
    "given without adapt": lambda a: dict(a, adapt_params={"w1": jnp.ones(1)}),
    "given without a bias": lambda a: dict(a, bias=None),
    "rows=2 does not divide": lambda a: dict(a, **{n: a[n][:1] for n in "qkv"}, block_sizes=BlockSizes(4, 4, 2)),
    "q is of type list": lambda a: dict(a, q=[[1.0]]),
    "k_valid is of type list": lambda a: dict(a, k_valid=[True]),
    "q_segment_ids has dtype float32": lambda a: dict(
        a, q_segment_ids=jnp.zeros((2, 5)), k_segment_ids=jnp.zeros((2, 5))
    ),
    "bias='kerple': a position bias": lambda a: dict(a, bias="kerple"),
    "bias=<class .*KerpleLog'>: a position bias": lambda a: dict(a, bias=KerpleLog),
    "adapt={}: an Adapt": lambda a: dict(a, adapt={}),
    "bias_params is of type list": lambda a: dict(a, bias_params=[1]),
    r"bias_params\['p'\] is of type list": lambda a: dict(a, bias_params={"p": [1.0], "a": jnp.ones(4)}),
    "scale='x': a finite number": lambda a: dict(a, scale="x"),
    "scale=nan: a finite number": lambda a: dict(a, scale=float("nan")),
    r"block_sizes=\(16, 128\): a BlockSizes": lambda a: dict(a, block_sizes=(16, 128)),
    "batch_axes='data': a tuple of names": lambda a: dict(a, batch_axes="data"),
    "no axis 'data' in the ambient mesh": lambda a: dict(a, batch_axes=("data",)),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message):
    arrays, _ = make(2, 5, 5, 4, 4, 8, KerpleLog(), None)
    good = dict(zip(("q", "k", "v", "bias_params"), arrays, strict=False), bias=KerpleLog())
    dape_attention(**good)
    with pytest.raises(UserError, match=message) as error:
        dape_attention(**BAD[message](good))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", ["q", "k", "rows"])
def test_bad_block_sizes_are_named(field):
    with pytest.raises(UserError, match=f"block size {field}=0"):
        BlockSizes(**{"q": 1, "k": 1, "rows": 1, field: 0})
    with pytest.raises(UserError, match=f"block size {field}=True"):
        BlockSizes(**{"q": 1, "k": 1, "rows": 1, field: True})


@pytest.mark.parametrize("backward", [(16, 128), BlockSizes(1, 1, backward=BlockSizes(1, 1))])
def test_a_wrong_tile_of_the_backward_is_named(backward):
    with pytest.raises(UserError, match="block size backward="):
        BlockSizes(1, 1, backward=backward)


@pytest.mark.parametrize("backend", ["pallas_tpu", "pallas_gpu"])
def test_the_kernels_count_in_32_bits(backend):
    arrays, _ = make(1, 4, 4, 2, 2, 4, None, None)
    with jax.enable_x64(True), pytest.raises(UserError, match="jax_enable_x64 is set"):
        attend(backend, *arrays)


@pytest.mark.slow
def test_all_combinations_are_distinct():
    """No two combinations of bias and network compute the same thing: a check on this suite itself."""
    outputs = []
    for bias, adapt in itertools.product(BIASES[1:], ADAPTS):  # without a bias all joint variants are S + f(S)
        arrays, _ = make(1, 6, 6, 4, 4, 8, bias, adapt)
        outputs.append(np.asarray(jax.jit(functools.partial(attend, "blockwise", bias=bias, adapt=adapt))(*arrays)))
    assert not [1 for a, b in itertools.combinations(outputs, 2) if np.allclose(a, b, atol=1e-5)]
