"""Property-based: every backend against the float64 oracle, outputs and gradients, over random shapes and arguments.

Compiling dominates, so there is one test for each of many random programs (shapes, formulas, which arguments there
are), and hypothesis draws several sets of values for each: positions, documents, padding, magnitudes, seeds.
"""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from dape_jax import FIRE, Adapt, ALiBi, BlockSizes, KerpleLog, KerplePower, T5Bias
from dape_jax.adapt import VARIANTS
from tests.attention import cases
from tests.attention.oracle import oracle
from tests.attention.oracle_gradients import attention_and_gradients
from tests.conftest import relative_error

PROGRAMS, KERNEL_PROGRAMS, EXAMPLES = 170, 20, 6  # of the slow suite
FAST_PROGRAMS, FAST_EXAMPLES = 5, 3
BIASES = [None, ALiBi(), KerpleLog(), KerplePower(), T5Bias(num_buckets=8, max_distance=20),
          FIRE(width=3, init_length=12.0), FIRE(width=4, init_length=100.0, activation="leaky_relu")]  # fmt: skip
DTYPES = [jnp.float32, jnp.float32, jnp.bfloat16, jnp.float64]


@dataclasses.dataclass(frozen=True)
class Program:
    """Everything that is compiled in."""

    backend: str
    batch: int
    q_length: int
    k_length: int
    heads: int
    kv_heads: int
    d: int
    bias: object
    adapt: Adapt | None
    causal: bool
    scale: float | None
    positions: str  # "default", "shared" or "rows"
    segments: bool
    padding: bool
    dtype: type
    param_dtype: type
    blocks: BlockSizes

    def __str__(self):
        bias = "no bias" if self.bias is None else type(self.bias).__name__
        adapt = "plain" if self.adapt is None else f"{self.adapt.variant}-k{self.adapt.kernel_width}"
        return f"{self.batch}x{self.q_length}x{self.k_length}-{bias}-{adapt}-{jnp.dtype(self.dtype).name}"


def random_program(seed: int, backend: str) -> Program:
    rng = np.random.default_rng(seed)

    def choose(*options):
        return options[rng.integers(len(options))]

    batch, heads, kv_heads = choose(1, 2, 3, 4), choose(1, 2, 3, 4, 6), choose(1, 2, 3)
    bias = choose(*BIASES)
    variants = VARIANTS if bias is not None else VARIANTS[:-1]
    adapt = Adapt(choose(*variants), width=choose(1, 4, 7, 16), per_head=choose(False, False, True),
                  kernel_width=choose(1, 1, 3, 5))  # fmt: skip
    k_length = choose(1, 2, 3, *range(4, 40))
    q_length = choose(k_length, k_length, choose(*range(1, 40)))
    positions = choose("default", "shared", "rows")
    return Program(
        backend, batch, q_length, k_length,
        heads=heads, kv_heads=kv_heads if heads % kv_heads == 0 else heads, d=choose(1, 4, 8, 16),
        bias=bias, adapt=choose(None, adapt, adapt, adapt), causal=choose(True, False), scale=choose(None, 0.7),
        positions="shared" if q_length > k_length and positions == "default" else positions,
        segments=choose(True, False), padding=choose(True, False), dtype=choose(*DTYPES),
        param_dtype=choose(jnp.float32, jnp.float32, jnp.bfloat16),
        blocks=BlockSizes(q=choose(1, 3, 4, 7, 8, 16, 64), k=choose(2, 3, 4, 7, 8, 16, 64),
                          rows=choose(*[n for n in range(1, batch + 1) if batch % n == 0])),
    )  # fmt: skip


def ids(shape, values):
    """A strategy for int32 arrays."""
    size = int(np.prod(shape))
    return st.lists(values, min_size=size, max_size=size).map(lambda x: np.asarray(x, np.int32).reshape(shape))


@st.composite
def arguments(draw, program: Program):
    """The value-level keyword arguments of ``dape_attention`` for a program."""
    made = {}
    if program.positions != "default":
        # As far as float32 logits allow: a bias of -10^6 leaves nothing to compare.
        far = 30 if isinstance(program.bias, ALiBi | KerplePower) else 9000
        offset = draw(st.sampled_from([0, 0, 5, 2**20]))
        span = draw(st.sampled_from([1, 8, 30, far]))
        for name, length in (("q_positions", program.q_length), ("k_positions", program.k_length)):
            shape = (length,) if program.positions == "shared" else (program.batch, length)
            made[name] = offset + draw(ids(shape, st.integers(0, span)))
            if draw(st.booleans()):
                made[name] = np.sort(made[name], axis=-1)
    if program.segments:
        most = draw(st.integers(0, 4))
        q_ids = draw(ids((program.batch, program.q_length), st.integers(0, most)))
        k_ids = draw(ids((program.batch, program.k_length), st.integers(0, most)))
        if draw(st.booleans()):
            q_ids, k_ids = np.sort(q_ids, axis=1), np.sort(k_ids, axis=1)
        if draw(st.booleans()) and q_ids.shape == k_ids.shape:
            q_ids = k_ids
        made |= {"q_segment_ids": q_ids, "k_segment_ids": k_ids}
    if program.padding:
        shape = (program.batch, program.k_length)
        if draw(st.booleans()):
            lengths = draw(ids((program.batch, 1), st.integers(0, program.k_length)))
            made["k_valid"] = np.arange(program.k_length)[None] < lengths
        else:
            made["k_valid"] = draw(ids(shape, st.integers(0, 4))) > 0
    return made


def random_arrays(program: Program, seed: int, magnitude: float):
    rng = np.random.default_rng(seed)
    q_shape = (program.batch, program.q_length, program.heads, program.d)
    k_shape = (program.batch, program.k_length, program.kv_heads, program.d)
    q, k, v, cotangent = (jnp.asarray(rng.normal(size=s), program.dtype) for s in (q_shape, k_shape, k_shape, q_shape))
    bias_params, adapt_params = {}, {}
    if program.bias is not None:
        shapes = jax.eval_shape(lambda: program.bias.init(jax.random.key(0), program.heads))
        bias_params = {name: rng.normal(size=x.shape) for name, x in shapes.items()}
        # Kerple's away from their bounds, at which the gradient is not the formula's by intent.
        bounded = {name: np.clip(np.abs(x), 0.02, 1.9) for name, x in bias_params.items() if name in ("p", "a")}
        bias_params |= bounded | {name: 0.2 + np.abs(x) for name, x in bias_params.items() if x.ndim == 0}
    if program.adapt is not None:
        shapes = program.adapt.shapes(program.heads, program.bias is not None)
        adapt_params = {name: rng.uniform(-0.5, 0.5, shape) for name, shape in shapes.items()}
    bias_params, adapt_params = jax.tree.map(lambda x: jnp.asarray(x, program.param_dtype), (bias_params, adapt_params))
    return ((magnitude * q).astype(q.dtype), k, v, bias_params, adapt_params), cotangent


@functools.lru_cache(maxsize=1)  # a program is compiled in, and every test has its own
def compiled(program: Program):
    def attend(arrays, kwargs):
        return cases.attend(
            program.backend, *arrays, blocks=program.blocks, bias=program.bias, adapt=program.adapt,
            causal=program.causal, scale=program.scale, **kwargs,
        )  # fmt: skip

    def both(arrays, kwargs, cotangent):
        out, vjp = jax.vjp(lambda x: attend(x, kwargs), arrays)
        return out, vjp(cotangent)[0]

    return jax.jit(both)


def check_program(program: Program, seed: int, magnitude: float, kwargs: dict) -> bool:
    """Whether output and gradients could be compared: not where a hidden unit is zero within rounding."""
    with jax.enable_x64(True) if program.dtype == jnp.float64 else contextlib.nullcontext():
        arrays, cotangent = random_arrays(program, seed, magnitude)
        out, gradients = compiled(program)(arrays, kwargs, cotangent)
    offset = program.k_length - program.q_length
    names = {"q_segment_ids": "q_segments", "k_segment_ids": "k_segments"}
    positions = {
        "q_positions": np.arange(offset, program.k_length) if offset >= 0 else None,
        "k_positions": np.arange(program.k_length),
    }
    want = attention_and_gradients(
        *arrays, cotangent, bias=program.bias, adapt=program.adapt, causal=program.causal,
        scale=program.d**-0.5 if program.scale is None else program.scale,
        **{**positions, **{names.get(name, name): x for name, x in kwargs.items()}},
    )  # fmt: skip
    assert out.dtype == program.dtype
    eps = jnp.finfo(jnp.float64 if program.dtype == jnp.float64 else jnp.float32).eps
    if want.nearest_kink < 8 * eps:
        return False
    computed = 16 * eps * (1 + want.logits)  # logits of size L carry L roundings, whatever computes them; 16 for sums
    own = computed + jnp.finfo(program.dtype).eps / 2
    error = np.linalg.norm(np.asarray(out, np.float64) - want.out)
    assert error <= own * np.linalg.norm(want.out), (error, np.linalg.norm(want.out))
    leaves = jax.tree.leaves_with_path(want.gradients)
    got = jax.tree.leaves(gradients)
    assert len(got) == len(leaves)
    for g, (path, w), scale in zip(got, leaves, jax.tree.leaves(want.uncancelled), strict=True):
        error = np.linalg.norm(np.asarray(g, np.float64) - w)
        assert g.shape == w.shape
        bound = (computed + jnp.finfo(g.dtype).eps / 2) * np.linalg.norm(w) + own * scale
        assert error <= bound, (jax.tree_util.keystr(path), error, np.linalg.norm(w), scale)
    return True


def property_of(examples: int):
    return settings(
        max_examples=examples, derandomize=True, database=None, deadline=None,
        phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck),
    )  # fmt: skip


def programs(first: int, count: int, kernels: int = 0):
    """Random programs: ``count`` of the blockwise backend, ``kernels`` of each platform's kernels, in float32."""
    made = [random_program(seed, "blockwise") for seed in range(first, first + count)]
    seeds = range(first, first + kernels)
    interpreted = [random_program(seed, backend) for backend in ("pallas_tpu", "pallas_gpu") for seed in seeds]
    made += [dataclasses.replace(p, dtype=jnp.float32, param_dtype=jnp.float32) for p in interpreted]
    return pytest.mark.parametrize("program", [pytest.param(p, id=f"{p.backend}-{p}") for p in made])


VALUES = {"data": st.data(), "seed": st.integers(0, 2**32 - 1), "magnitude": st.sampled_from([1.0, 0.0, 0.1, 5.0])}


@programs(1000, FAST_PROGRAMS)
@property_of(FAST_EXAMPLES)
@given(**VALUES)
def test_backends_equal_the_oracle(program, data, seed, magnitude):
    assume(check_program(program, seed, magnitude, data.draw(arguments(program))))


@pytest.mark.slow
@programs(0, PROGRAMS, KERNEL_PROGRAMS)
@property_of(EXAMPLES)
@given(**VALUES)
def test_backends_equal_the_oracle_everywhere(program, data, seed, magnitude):
    assume(check_program(program, seed, magnitude, data.draw(arguments(program))))


@pytest.mark.parametrize("backend", ["blockwise", "reference"])
@pytest.mark.parametrize("adapt", [None, Adapt()], ids=["plain", "dape"])
@pytest.mark.parametrize("bias", [ALiBi(), KerpleLog()], ids=["alibi", "kerple"])
def test_far_positions_keep_their_precision_in_bfloat16(bias, adapt, backend):
    """ALiBi's bias reaches -5,800 at distance 8,192: neither positions nor bias nor network pass through bfloat16.

    The oracle receives the same rounded q, k and v, and the result may carry one rounding to bfloat16 more.
    """
    program = Program(
        backend, 1, 4, 64, heads=12, kv_heads=12, d=64, bias=bias, adapt=adapt, causal=True, scale=None,
        positions="shared", segments=False, padding=False, dtype=jnp.bfloat16, param_dtype=jnp.float32,
        blocks=BlockSizes(q=4, k=32, rows=1),
    )  # fmt: skip
    # Far keys alone: near ones would take all of the softmax and hide what happens to the others.
    far = {"q_positions": np.arange(8192, 8196), "k_positions": np.arange(0, 64)}
    assert check_program(program, 0, 1.0, {name: x.astype(np.int32) for name, x in far.items()})


@pytest.mark.parametrize("seed", [3003, 3023, 3024, 3029])  # every variant, every k
def test_the_oracles_gradients_are_those_of_the_oracle(seed):
    """By central differences of the oracle without gradients, along random directions."""
    program = dataclasses.replace(random_program(seed, "reference"), scale=None, dtype=jnp.float32, positions="default")
    k_length = min(program.k_length, 7)
    q_length = min(program.q_length, k_length)
    program = dataclasses.replace(program, q_length=q_length, k_length=k_length, batch=2)
    arrays, cotangent = random_arrays(program, seed, 1.0)
    arrays, cotangent = jax.tree.map(lambda x: np.asarray(x, np.float64), (arrays, cotangent))
    rng = np.random.default_rng(seed)
    kwargs = {
        "bias": program.bias, "adapt": program.adapt, "causal": program.causal,
        "q_positions": np.arange(program.k_length - q_length, program.k_length),
        "k_positions": np.arange(program.k_length),
        "k_valid": rng.random((program.batch, program.k_length)) < 0.7,
    }  # fmt: skip

    def value(arrays):
        q, k, v, bias_params, adapt_params = arrays
        return oracle(q, k, v, bias_params=bias_params, adapt_params=adapt_params, **kwargs)

    want = attention_and_gradients(*arrays, cotangent, scale=program.d**-0.5, **kwargs)
    assert relative_error(want.out, value(arrays)) < 1e-12
    gradients, scales = want.gradients, want.uncancelled
    for _ in range(2):
        # Such steps that each argument has an equal share in the difference.
        step = jax.tree.map(lambda x, s: rng.normal(size=x.shape) / max(s, 1e-3), arrays, scales)
        ends = [value(jax.tree.map(lambda x, d, h=h: x + h * d, arrays, step)) for h in (1e-6, -1e-6)]
        slope = np.vdot(cotangent, ends[0] - ends[1]) / 2e-6
        shares = jax.tree.leaves(jax.tree.map(np.vdot, gradients, step))
        assert abs(slope - sum(shares)) < 1e-6 * np.linalg.norm(shares), (slope, shares)
