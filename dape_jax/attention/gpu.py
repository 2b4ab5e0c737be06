"""Fused DAPE attention on GPU (Pallas, Triton lowering): forward and backward without an array of Tq x Tk.

A program holds all heads of a (query block, key block) tile, since the network mixes them: each head's [block_q,
block_k] logits come from a product of their own and are joined pairwise along a new last axis, as a tree, into
[positions, heads], heads padded to a power of two; there the network is two plain matrix products; probabilities are
split again for the products with the values. Where heads are independent (no network, or one for each head) a program
holds one head, by the same code with a last axis of 1.

The forward keeps the output and the log-sum-exp. The backward recomputes each tile's logits, in two kernels: over
query blocks for dQ and the parameters, whose partial sums every program writes to a place of its own, and over key
blocks for dK and dV. So nothing is added up in an order that may change.

A network that convolves along the keys (DAPE V2) reads beside each key, and this lowering cannot move entries along an
axis of a tile. So what it reads there is computed again, from the rows of k at shifts of up to 2p keys (p =
kernel_width // 2), in loops over the taps of both layers: S and the first layer kernel_width^2 times where once would
do, and S as often for the gradient. A tile then has a gradient of S for each shift; dQ adds their products with the
shifted rows, and dK has a partial result for each, [4p + 1, B, Tk, N, d] in float32, that is shifted back and added up
outside.

JAX deprecates this lowering, and everything that depends on it is in this file. A Mosaic GPU version needs, instead of
the trees: the logits of all heads in shared memory, rows (query, head), written by the warpgroups that multiply q k^T
(``plgpu.wgmma``, or ``tcgen05`` on Blackwell) and read back as the network's operand; explicit copies
(``plgpu.copy_gmem_to_smem`` in ``emit_pipeline_warp_specialized``) instead of loads; and row reductions in its
``Layout.WGMMA``. It serves Hopper and later only.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from dape_jax import adapt as adapt_lib
from dape_jax import biases
from dape_jax.attention import tuned
from dape_jax.attention.arguments import Arrays, Spec, saved_dtype
from dape_jax.attention.blocks import BlockSizes
from dape_jax.attention.target import Target

ELEMENTWISE = (biases.ALiBi, biases.KerpleLog, biases.KerplePower)
"""Biases whose formula has one number a head for each parameter: evaluated as it stands, on [positions, heads]."""
FEATURES = (biases.T5Bias, biases.FIRE)
"""Biases that are a product of features of the two positions, shared by all heads, with a [features, heads] matrix."""
KERNELS = ("forward", "queries", "keys")
"""The forward, and the backward over queries and over keys, in the order of a call's tiles."""
LEAST = 16
"""Rows, columns and contracted entries that a product on the matrix units needs."""
LARGEST = 128
WIDEST = 64
MOST_TAPS = 5
MOST_HEADS = 16
MOST_ACCUMULATED = 1024
"""Heads x padded head dimension that one program accumulates for each query, in registers."""
MOST_HIDDEN = {"bfloat16": 96, "float32": 64}
"""Hidden units and features of the bias, padded, that a tile of mixed heads holds in an H100's shared memory."""
AUTOMATIC_ON = ("H100", "H200", "H20", "H800", "GH200")
"""Parts of the device kinds, all Hopper, with the memory that the tiles need."""
LOWEST = float(jnp.finfo(jnp.float32).min)


class Tile(NamedTuple):
    """Queries and keys of a tile, warps of a program, and stages of the loads' pipeline."""

    q: int
    k: int
    warps: int
    stages: int = 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a call.

    Fields:
      spec: formulas and hyper-parameters.
      forward, queries, keys: tiles of the three kernels.
      q_length, k_length, kv_heads, head_dim: of q, k and v.
      exact: float32 inputs, with every product in full float32; else bfloat16.
      rows_of_positions: whether positions differ between batch rows.
    """

    spec: Spec
    forward: Tile
    queries: Tile
    keys: Tile
    q_length: int
    k_length: int
    kv_heads: int
    head_dim: int
    exact: bool
    rows_of_positions: bool

    @property
    def heads(self) -> int:
        """Query heads of one program."""
        return self.spec.num_heads if _mixes(self.spec) else 1

    @property
    def groups(self) -> int:
        return self.spec.num_heads // self.heads

    @property
    def width(self) -> int:
        """Heads of one program, padded."""
        return _padded(self.heads) if _mixes(self.spec) else 1

    @property
    def padded_dim(self) -> int:
        return _padded(self.head_dim)

    @property
    def group(self) -> int:
        """Query heads that read one key head."""
        return self.spec.num_heads // self.kv_heads

    @property
    def halo(self) -> int:
        """Keys to each side that a logit depends on; 0 unless the network convolves."""
        return 0 if self.spec.adapt is None else self.spec.adapt.halo


def _mixes(spec: Spec) -> bool:
    return spec.adapt is not None and not spec.adapt.per_head


def _padded(n: int) -> int:
    return max(LEAST, pl.next_power_of_2(n))


def _features(bias: biases.Bias | None) -> int:
    """Padded; 0 for a bias without."""
    n = bias.num_buckets if isinstance(bias, biases.T5Bias) else bias.width if isinstance(bias, biases.FIRE) else 0
    return _padded(n) if n else 0


def _hidden(spec: Spec) -> int:
    """Numbers of one position besides its logits: hidden units of the network, for each of its taps, and features of
    the bias."""
    return _features(spec.bias) + (0 if spec.adapt is None else _padded(spec.adapt.width) * spec.adapt.kernel_width)


def not_automatic(target: Target, call: tuple[Spec, Arrays] | None) -> str | None:
    """Why these kernels are used only where they are asked for; None where they are the automatic choice."""
    why = None
    if not any(name in target.device_kind for name in AUTOMATIC_ON):
        why = f"their tiles are for the shared memory of an H100, not of {target.device_kind!r}"
    elif call is not None:
        spec, adapt = call[0], call[0].adapt
        # ptxas keeps 4 to 6 KB of each thread in memory, and 40 KB in float32: that may be slower than blockwise.
        if adapt is not None and adapt.kernel_width > 1 and _mixes(spec):
            why = f"adapt has kernel_width={adapt.kernel_width}, which overflows the registers"
    return None if why is None else f"{why}; backend='pallas_gpu' tries"


def refusal(spec: Spec, arrays: Arrays, blocks: BlockSizes | None, target: Target) -> str | None:
    """Why these kernels cannot serve a call, naming the argument; None if they can."""
    del target  # one set of tiles for all kinds so far
    q, bias, adapt, d = arrays.q, spec.bias, spec.adapt, arrays.q.shape[3]
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"q has dtype {q.dtype}; float32 or bfloat16 is needed"
    if d > LARGEST:
        return f"q has head dimension {d}; {LARGEST} or less is needed"
    served = (*ELEMENTWISE, *FEATURES)
    if bias is not None and type(bias) not in served:
        return f"bias {type(bias).__name__} has no kernel; one of {', '.join(c.__name__ for c in served)} is needed"
    if adapt is not None and adapt.width > WIDEST:
        return f"adapt has width={adapt.width}; {WIDEST} or less is needed by the GPU kernels"
    if adapt is not None and adapt.kernel_width > MOST_TAPS:
        return f"adapt has kernel_width={adapt.kernel_width}; {MOST_TAPS} or less is needed by the GPU kernels"
    if _mixes(spec):
        if spec.num_heads > MOST_HEADS or spec.num_heads * _padded(d) > MOST_ACCUMULATED:
            most = f"at most {MOST_HEADS} heads, such as 16 of 64 or 8 of 128"
            return f"q has {spec.num_heads} heads of {d}, mixed by the network; a GPU program's registers hold {most}"
        assert adapt is not None
        width, features, most = _padded(adapt.width), _features(bias), MOST_HIDDEN[str(q.dtype)]
        if width + features > most:
            hidden = f"adapt has width={adapt.width}, padded to {width}, and the bias {features} features"
            return f"{hidden}; the GPU kernels hold {most} together in {q.dtype}"
    return None if blocks is None else _misfit(spec, q.dtype, blocks)


def _misfit(spec: Spec, dtype: Any, blocks: BlockSizes) -> str | None:
    """Why the kernels cannot use these sizes; None if they can."""
    if blocks.backward is not None:
        return "block size backward: the GPU kernels have one tile for all passes; leave it None"
    if blocks.rows != 1:
        return f"block size rows={blocks.rows}: the GPU kernels take one batch row at a time; 1 is needed"
    for name in ("q", "k"):
        n = getattr(blocks, name)
        if n & (n - 1) or not LEAST <= n <= LARGEST:
            return f"block size {name}={n}: a power of two from {LEAST} to {LARGEST} is needed by the GPU kernels"
    hidden, exact = _hidden(spec), dtype == jnp.float32
    most = (64 if exact else LARGEST) ** 2
    if hidden:
        most = LEAST * LEAST * (1 if _mixes(spec) else max(1, MOST_HIDDEN[str(dtype)] // hidden))
    if blocks.q * blocks.k > most:
        return f"block sizes q={blocks.q}, k={blocks.k}: a GPU program holds at most {most} positions of this call"
    return None


def default_tiles(spec: Spec, exact: bool) -> tuple[Tile, Tile, Tile]:
    """Tiles of the forward kernel, and of the backward's over queries and over keys.

    Those of ptxas's fewest spilled bytes for an H100 (``experiments/gpu_registers.py``), not yet timed. Bytes spilled
    for DAPE-Kerple, D = 32, 12 (16) heads of 64 in bfloat16: 40 (128), 696 (1,124), 236 (464); a tile twice as large
    spills two to three times as much for each position. Without a network, and with one for each head, nothing.
    DAPE V2 with a kernel width of 3: 1,344 (2,212), 4,124 (6,024), 4,976 (6,628); the sums for five shifts of the keys
    alone are more than all registers. In float32 42 KB of the second, on which ptxas gives up.
    """
    smallest = Tile(16, 16, 8)
    if _mixes(spec):
        return smallest, smallest, smallest
    # All hidden units of a position, or all its features, are in registers at once.
    if _hidden(spec) > 32:
        return smallest, smallest, smallest
    if _hidden(spec):
        return Tile(32, 16, 8), smallest, Tile(32, 16, 8)
    if exact:
        return Tile(32, 32, 8), Tile(32, 32, 8), Tile(32, 32, 8)
    return Tile(64, 64, 4), Tile(64, 64, 8), Tile(64, 64, 8)


def choose_tiles(spec: Spec, arrays: Arrays, target: Target) -> tuple[Tile, ...]:
    """Those of ``gpu_tuned.json`` for kernels that it has on this device in this shape, else ``default_tiles``."""
    tiles = default_tiles(spec, arrays.q.dtype == jnp.float32)
    if _features(spec.bias):  # they take registers and memory that the others do not
        return tiles
    found = [tuned.find("gpu", spec, arrays, target, kernel) for kernel in KERNELS]
    return tuple(
        tile if e is None else Tile(e["block_q"], e["block_k"], e["warps"], e["stages"])
        for tile, e in zip(tiles, found, strict=True)
    )


def make_plan(spec: Spec, arrays: Arrays, blocks: BlockSizes | None, target: Target) -> Plan:
    if blocks is None:
        tiles = choose_tiles(spec, arrays, target)
    else:
        usual = default_tiles(spec, arrays.q.dtype == jnp.float32)
        tiles = tuple(tile._replace(q=blocks.q, k=blocks.k) for tile in usual)
    return Plan(
        spec=spec,
        forward=tiles[0],
        queries=tiles[1],
        keys=tiles[2],
        q_length=arrays.q.shape[2],
        k_length=arrays.k.shape[2],
        kv_heads=arrays.k.shape[0],
        head_dim=arrays.q.shape[3],
        exact=arrays.q.dtype == jnp.float32,
        rows_of_positions=arrays.q_positions.shape[0] > 1,
    )


def attend(spec: Spec, arrays: Arrays, blocks: BlockSizes | None, target: Target) -> jax.Array:
    """Attention output [H, B, Tq, d] in the dtype of q; rows that may attend to nothing are zero.

    For calls without a ``refusal``. ``blocks`` None takes ``choose_tiles``.
    """
    return cast(jax.Array, _attend(make_plan(spec, arrays, blocks, target), target.interpret, arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(plan: Plan, interpret: bool, arrays: Arrays) -> jax.Array:
    return _heads_first(_forward(plan, interpret, arrays, arrays.q.dtype)[0])


def _attend_fwd(plan: Plan, interpret: bool, arrays: Arrays) -> tuple[jax.Array, Any]:
    out, lse = _forward(plan, interpret, arrays, saved_dtype(arrays))
    # Named for rematerialisation policies: with both saved, the backward needs no second forward.
    out = checkpoint_name(out, "dape_attention_out")
    return _heads_first(out).astype(arrays.q.dtype), (arrays, out, checkpoint_name(lse, "dape_attention_lse"))


# The logits of a tile -------------------------------------------------------------------------------------------------


class Operands(NamedTuple):
    """What the kernels read besides q, k, v, each [groups, rows, columns]: float32 with gradients, and constants."""

    bias: dict[str, Any]
    adapt: dict[str, Any]
    constants: dict[str, Any]


def pack(plan: Plan, bias_params: biases.Params, adapt_params: adapt_lib.Params) -> Operands:
    """Parameters with heads last and every axis padded. Differentiable."""
    f32 = functools.partial(jnp.asarray, dtype=jnp.float32)
    bias_params, adapt_params = ({name: f32(x) for name, x in p.items()} for p in (bias_params, adapt_params))
    bias, constants = _pack_bias(plan, bias_params)
    return Operands(bias, _pack_adapt(plan, adapt_params), constants)


def _pad(x: jax.Array, axis: int, n: int, value: float = 0) -> jax.Array:
    missing = n - x.shape[axis]
    return jnp.pad(x, [(0, missing if a == axis else 0) for a in range(x.ndim)], constant_values=value)


def _heads_last(plan: Plan, x: jax.Array, value: float = 0) -> jax.Array:
    """[H, n] to [groups, n, padded heads]."""
    x = x.reshape(plan.groups, plan.heads, x.shape[1])
    return jnp.swapaxes(_pad(x, 1, plan.width, value), 1, 2)


def _every(plan: Plan, x: jax.Array) -> jax.Array:
    """[n], the same for all heads, to [groups, 1, n]."""
    return jnp.broadcast_to(x.reshape(1, 1, -1), (plan.groups, 1, x.size))


def _pack_bias(plan: Plan, params: dict[str, jax.Array]) -> tuple[dict, dict]:
    bias, heads = plan.spec.bias, plan.spec.num_heads
    if bias is None:
        return {}, {}
    if isinstance(bias, biases.T5Bias):
        n, last = bias.num_buckets, jnp.iinfo(jnp.int32).max
        buckets = biases.t5_bucket(jnp.arange(bias.max_distance + 1), n, bias.max_distance)
        first = jnp.searchsorted(buckets, jnp.arange(n)).astype(jnp.int32)
        # The last bucket has no end, and those that pad are never reached.
        first = _pad(first, 0, _padded(n), last)
        end = jnp.concatenate([first[1:n], jnp.full(len(first) - n + 1, last, jnp.int32)])
        weights = _pad(_heads_last(plan, params["table"]), 1, _padded(n))
        return {"weights": weights}, {"first": _every(plan, first), "end": _every(plan, end)}
    if isinstance(bias, biases.FIRE):
        n = _padded(bias.width)
        return {
            "weights": _pad(_heads_last(plan, params["w2"]), 1, n),
            "b2": _heads_last(plan, params["b2"][:, None]),
            "w1": _every(plan, _pad(params["w1"], 0, n)),
            "b1": _every(plan, _pad(params["b1"], 0, n)),
            "c": _every(plan, jnp.abs(params["c"])),
            "threshold": _every(plan, jnp.abs(params["L_multiplier"] * bias.init_length)),
        }, {}
    fixed = {name: jnp.asarray(x, jnp.float32) for name, x in bias.constants(heads).items() if name not in params}
    # Whatever the parameters of heads that pad are, their bias meets rows of zeros in W1.
    learned, fixed = ({name: _heads_last(plan, x[:, None], 1.0) for name, x in p.items()} for p in (params, fixed))
    return learned, fixed


def _pack_adapt(plan: Plan, params: dict[str, jax.Array]) -> dict[str, Any]:
    adapt, heads, width = plan.spec.adapt, plan.heads, plan.width
    if adapt is None:
        return {}
    n, taps = _padded(adapt.width), adapt.kernel_width
    w1, b1, w2 = params["w1"], params["b1"], params["w2"]  # b2 is a constant along a row, which the softmax cancels
    if not adapt.per_head:
        w1, b1, w2 = w1[None], b1[None], w2[None]
    # [groups, k, inputs (S and B, or one, by heads), D], [groups, D], [groups, k, D, heads]
    w1 = _pad(_pad(w1.reshape(plan.groups, taps, -1, heads, adapt.width), 4, n), 3, width)
    w2 = _pad(_pad(w2, 2, n), 3, width)
    if width > 1:  # as ``_inputs`` joins them
        w1 = jnp.swapaxes(w1, 2, 3).reshape(plan.groups, taps, 1, -1, n)
    return {
        "w1": [[w1[:, t, c] for c in range(w1.shape[2])] for t in range(taps)],
        "b1": _pad(b1, 1, n)[:, None],
        "w2": [w2[:, t] for t in range(taps)],
    }


def logits(plan: Plan, operands: Operands, s: jax.Array, q: jax.Array, k: jax.Array) -> jax.Array:
    """A [positions, heads] from S, both float32 and unmasked; int32 q and k [positions, 1] are the positions."""
    if plan.spec.adapt is None:
        return s if plan.spec.bias is None else s + _bias(plan, operands, q, k)
    residual, inputs = _inputs(plan, operands, s, q, k)
    p, hidden = operands.adapt, operands.adapt["b1"]
    for x, w in zip(inputs, p["w1"][0], strict=True):
        hidden = mix(plan.spec.steep, plan.exact, x, w) + hidden
    return residual + mix(plan.spec.steep, plan.exact, _activated(hidden), p["w2"][0])


def _inputs(
    plan: Plan, operands: Operands, s: jax.Array, q: jax.Array, k: jax.Array
) -> tuple[jax.Array, list[jax.Array]]:
    """The network's residual, and its inputs, one for each matrix in a tap of W1."""
    adapt = plan.spec.adapt
    assert adapt is not None
    b = None if plan.spec.bias is None else _bias(plan, operands, q, k)
    residual = s if b is None or adapt.variant == "concat" else s + b
    if b is None:
        inputs = [s]
    elif adapt.variant == "add_residual":
        inputs = [s + b]
    else:
        inputs = [b] if adapt.variant == "bias_only" else [s, b]
    if plan.width > 1:  # one product for both, S and B of a head side by side
        inputs = [_join(inputs, len(inputs)).reshape(s.shape[0], -1)]
    return residual, inputs


def _activated(hidden: jax.Array) -> jax.Array:
    return jnp.where(hidden >= 0.0, hidden, adapt_lib.SLOPE * hidden)


def _bias(plan: Plan, operands: Operands, q: jax.Array, k: jax.Array) -> jax.Array:
    bias, p, constants = plan.spec.bias, operands.bias, operands.constants
    assert bias is not None
    if isinstance(bias, ELEMENTWISE):
        return bias.value({**constants, **p}, q, k)
    distance = jnp.abs(q - k)
    if isinstance(bias, biases.T5Bias):
        within = (distance >= constants["first"]) & (distance < constants["end"])
        return mix(True, plan.exact, jnp.where(within, 1.0, 0.0), p["weights"])
    assert isinstance(bias, biases.FIRE)
    farthest = jnp.maximum(q, k).astype(jnp.float32)
    top = jnp.log1p(p["c"] * distance.astype(jnp.float32))
    u = top / (jnp.log1p(p["c"] * jnp.maximum(p["threshold"], farthest)) + 1e-6)
    hidden = p["w1"] * u + p["b1"]
    slope = 0.01 if bias.activation == "leaky_relu" else 0.0
    hidden = jnp.where(hidden > 0.0, hidden, slope * hidden)
    return mix(True, plan.exact, hidden, p["weights"]) + p["b2"]


def product(a: jax.Array, b: jax.Array, contract: tuple[int, int], exact: bool) -> jax.Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)


def mix(full: bool, exact: bool, x: jax.Array, w: jax.Array) -> jax.Array:
    """``x @ w``, [positions, c] and [c, n], in float32.

    Unless ``exact``, in bfloat16 passes with float32 sums. x and w are then each a high and a low part, since rounding
    S and B once costs up to 42 % of the gradient of W1; with ``full`` the gradient that arrives is two parts as well.
    """
    if w.shape[0] == 1:
        return x * w
    if w.shape[1] == 1:
        return (x * w.reshape(1, -1)).sum(axis=1, keepdims=True)
    return cast(jax.Array, _mix(full, exact, x, w))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mix(full: bool, exact: bool, x: jax.Array, w: jax.Array) -> jax.Array:
    return _mix_fwd(full, exact, x, w)[0]


def _mix_fwd(full: bool, exact: bool, x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    del full
    if exact:
        return product(x, w, (1, 0), exact=True), (x, w)
    (high, low), (w_high, w_low) = _halves(x), _halves(w)
    # High and low parts side by side, in 64 columns or more: so many rows of a result, in the gradient of w, Hopper's
    # matrix units take from shared memory; with fewer, every warp would hold all positions in its registers.
    parts = max(2, 64 // x.shape[1])
    wide = _join([high, low], parts).reshape(x.shape[0], -1)
    w_wide = _join([w_high.T, w_high.T], parts).reshape(w.shape[1], -1)
    return product(wide, w_wide, (1, 1), exact=False) + product(high, w_low, (1, 0), exact=False), (wide, w)


def _mix_bwd(full: bool, exact: bool, saved: tuple[jax.Array, jax.Array], d_y: jax.Array) -> tuple:
    x, w = saved
    if exact:
        return product(d_y, w, (1, 1), exact=True), product(x, d_y, (0, 0), exact=True)
    (d_high, d_low), (w_high, w_low) = _halves(d_y), _halves(w)
    d_x, d_w = product(d_high, w_high, (1, 1), exact=False), product(x, d_high, (0, 0), exact=False)
    if full:
        d_x = d_x + product(d_high, w_low, (1, 1), exact=False) + product(d_low, w_high, (1, 1), exact=False)
        d_w = d_w + product(x, d_low, (0, 0), exact=False)
    return d_x, d_w.reshape(w.shape[0], -1, w.shape[1]).sum(axis=1)


_mix.defvjp(_mix_fwd, _mix_bwd)


# Kernels --------------------------------------------------------------------------------------------------------------


class Inputs(NamedTuple):
    """What every kernel reads: whole arrays, lengths padded to whole blocks and the head dimension to ``padded_dim``.

    Attributes:
      bounds: int32 [P, blocks, 2], first and one past the last block of the loop of each program.
      q: [B, Tq, H, d]; k, v: [B, Tk, N, d].
      q_positions, k_positions: int32 [P, T]; segments and k_valid int32 [B, T], or None.
    """

    bounds: Any
    q: Any
    k: Any
    v: Any
    q_positions: Any
    k_positions: Any
    q_segments: Any
    k_segments: Any
    k_valid: Any
    operands: Operands


class Gradient(NamedTuple):
    """What the backward kernels read besides: d_out as q; lse and delta float32 [B, Tq, groups, padded heads], delta
    the sum of d_out x out over a head."""

    d_out: Any
    lse: Any
    delta: Any


class _Program:
    """One program's view of its inputs: batch row b, group of heads g, tiles of (query block, key block)."""

    def __init__(self, plan: Plan, tile: Tile, r: Inputs):
        self.plan, self.tile, self.r = plan, tile, r
        self.block, self.g, self.b = (pl.program_id(axis) for axis in range(3))
        self.p = self.b if plan.rows_of_positions else _index(0)
        self.operands = jax.tree.map(lambda ref: ref[self.g], r.operands)

    def range(self, block: Any) -> tuple[Any, Any]:
        return self.r.bounds[self.p, block, 0], self.r.bounds[self.p, block, 1]

    def heads(self) -> list[tuple[Any, Any]]:
        """(query head, key head) of each head of this program."""
        if self.plan.groups > 1:
            return [(self.g, jax.lax.div(self.g, self.plan.group))]
        return [(h, h // self.plan.group) for h in range(self.plan.heads)]

    def mask(self, block: Any, of: str) -> tuple[Any, jax.Array | None]:
        """Rows of a block, and which of them there are; None for all."""
        n, length = getattr(self.tile, of), getattr(self.plan, f"{of}_length")
        at = pl.ds(block * n, n)
        return at, block * n + jnp.arange(n, dtype=jnp.int32) < length if length % n else None

    def neighbours(self, block: Any, shift: Any) -> tuple[jax.Array, jax.Array]:
        """int32 [block_k], the keys ``shift`` after those of a block; and whether they exist: where not, the index is
        that of some other key."""
        row, last = block * self.tile.k + jnp.arange(self.tile.k, dtype=jnp.int32) + shift, self.plan.k_length - 1
        return jnp.minimum(jnp.maximum(row, 0), last), (row >= 0) & (row <= last)

    def vector(self, ref: Any, row: Any, block: Any, of: str, shift: Any = None) -> jax.Array:
        """Of a block, or of the keys ``shift`` after its own."""
        if shift is not None:
            return plgpu.load(ref.at[row, self.neighbours(block, shift)[0]])
        at, mask = self.mask(block, of)
        return plgpu.load(ref.at[row, at], mask=mask, other=None if mask is None else 0)

    def rows(self, ref: Any, block: Any, of: str, head: Any, shift: Any = None) -> jax.Array:
        """[block, padded d] of one head; zeros where there is nothing. ``shift`` as above, and then anything finite."""
        # What does not change in the loop would be loaded before it, and float32 of all heads exceeds the memory then.
        volatile = self.plan.exact and self.plan.groups == 1
        if shift is None:
            at, mask = self.both(block, of)
            index: tuple = (self.b, at, _index(head), slice(None))
        else:
            shape = (self.tile.k, self.plan.padded_dim)
            column = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
            mask = None if self.plan.head_dim == self.plan.padded_dim else column < self.plan.head_dim
            at = jnp.broadcast_to(self.neighbours(block, shift)[0][:, None], shape)
            index = (self.b, at, _index(head), column)
        return plgpu.load(ref.at[index], mask=mask, other=None if mask is None else 0.0, volatile=volatile)

    def store(self, ref: Any, block: Any, of: str, head: Any, x: jax.Array) -> None:
        at, mask = self.both(block, of)
        plgpu.store(ref.at[self.b, at, _index(head), :], x.astype(ref.dtype), mask=mask)

    def both(self, block: Any, of: str) -> tuple[Any, jax.Array | None]:
        (at, mask), plan = self.mask(block, of), self.plan
        if mask is None and plan.head_dim == plan.padded_dim:
            return at, None
        shape = (getattr(self.tile, of), plan.padded_dim)
        column = jax.lax.broadcasted_iota(jnp.int32, shape, 1) < plan.head_dim
        return at, column if mask is None else column & jnp.broadcast_to(mask[:, None], shape)

    def columns(self, ref: Any, block: Any, missing: float) -> jax.Array:
        """[block_q, 1, padded heads] of numbers a row, as lse."""
        at, mask = self.mask(block, "q")
        shape = (self.tile.q, self.plan.width)
        mask = None if mask is None else jnp.broadcast_to(mask[:, None], shape)
        return plgpu.load(ref.at[self.b, at, self.g, :], mask=mask, other=None if mask is None else missing)[:, None]

    def products(self, a: Any, b: Any, i: Any, j: Any, scale: float, shift: Any = None) -> jax.Array:
        """``scale a b^T`` of every head, a rows of queries and b rows of keys: [block_q, block_k, padded heads]."""
        each = []
        for h, n in self.heads():
            x = product(self.rows(a, i, "q", h), self.rows(b, j, "k", n, shift), (1, 1), self.plan.exact)
            each.append(x if scale == 1.0 else scale * x)
        x = _join(each, self.plan.width)
        return x if self.plan.exact or self.plan.width == 1 else _spread(x)

    def geometry(self, i: Any, j: Any, shift: Any = None) -> tuple[jax.Array, jax.Array, Any, Any]:
        """Positions of queries and keys, [positions, 1] each; the mask, [block_q, block_k, 1] or None; and which keys
        there are that are no padding, the same."""
        r, shape = self.r, (self.tile.q, self.tile.k)

        def pair(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
            return jnp.broadcast_to(x[:, None], shape), jnp.broadcast_to(y[None, :], shape)

        q, k = pair(self.vector(r.q_positions, self.p, i, "q"), self.vector(r.k_positions, self.p, j, "k", shift))
        masks = [k <= q] if self.plan.spec.causal else []
        if r.q_segments is not None:
            q_ids, k_ids = self.vector(r.q_segments, self.b, i, "q"), self.vector(r.k_segments, self.b, j, "k", shift)
            q_ids, k_ids = pair(q_ids, k_ids)
            masks.append(q_ids == k_ids)
        _, there = self.mask(j, "k") if shift is None else self.neighbours(j, shift)
        if r.k_valid is not None:
            valid = self.vector(r.k_valid, self.b, j, "k", shift) != 0
            there = valid if shift is None or there is None else valid & there  # a block's are zero beyond the last key
        if there is not None:
            masks.append(jnp.broadcast_to(there[None, :], shape))
        mask = functools.reduce(jnp.logical_and, masks)[:, :, None] if masks else None
        return q.reshape(-1, 1), k.reshape(-1, 1), mask, None if there is None else masks[-1][:, :, None]

    def logits(self, i: Any, j: Any) -> tuple[jax.Array, jax.Array | None, Callable]:
        """A and the mask, [block_q, block_k, padded heads], and A's vjp: from its gradient to those of S, at the
        shifts from -halo to halo, and of the operands."""
        plan, shape = self.plan, (self.tile.q, self.tile.k, self.plan.width)
        if plan.halo:
            a, hidden = self.convolved(i, j)
            _, _, mask, _ = self.geometry(i, j, 0)
            vjp = functools.partial(self.d_convolved, i, j, hidden)
        else:
            s = self.products(self.r.q, self.r.k, i, j, plan.spec.scale)
            q, k, mask, _ = self.geometry(i, j)

            def f(s: jax.Array, bias: Any, adapt: Any) -> jax.Array:
                return logits(plan, self.operands._replace(bias=bias, adapt=adapt), s.reshape(-1, plan.width), q, k)

            # The lowering knows no functions with gradients of their own; differentiated, none is left.
            a, vjp_of_s = jax.vjp(f, s, self.operands.bias, self.operands.adapt)

            def vjp(d_a: jax.Array) -> tuple[list[jax.Array], Any, Any]:
                d_s, d_bias, d_adapt = vjp_of_s(d_a)
                return [d_s], d_bias, d_adapt

        mask = None if mask is None else jnp.broadcast_to(mask, shape)
        return a.reshape(shape), mask, lambda d_a: vjp(d_a.reshape(a.shape))

    def inputs(self, i: Any, j: Any, shift: Any) -> tuple[jax.Array, list[jax.Array], Callable]:
        """Of a convolving network, at the keys ``shift`` after those of block j: its residual; its inputs, zero where
        the query may not attend to the key; and the vjp of both with respect to S and the bias's operands."""
        plan = self.plan
        s = self.products(self.r.q, self.r.k, i, j, plan.spec.scale, shift).reshape(-1, plan.width)
        q, k, mask, _ = self.geometry(i, j, shift)
        assert mask is not None
        allowed = mask.reshape(-1, 1)

        def f(s: jax.Array, bias: Any) -> tuple[jax.Array, list[jax.Array]]:
            residual, xs = _inputs(plan, self.operands._replace(bias=bias), s, q, k)
            return residual, [jnp.where(jnp.broadcast_to(allowed, x.shape), x, 0.0) for x in xs]

        (residual, xs), vjp = jax.vjp(f, s, self.operands.bias)
        return residual, xs, vjp

    def mix(self, x: jax.Array, w: jax.Array) -> tuple[jax.Array, Callable]:
        return jax.vjp(functools.partial(mix, self.plan.spec.steep, self.plan.exact), x, w)

    def activated(self, i: Any, j: Any, shift: Any, hidden: jax.Array) -> tuple[jax.Array, Callable]:
        """The hidden layer as the second convolution sees it, zero beyond the first and last key and on padding, not
        what the first one makes of them; and its vjp."""
        *_, is_key = self.geometry(i, j, shift)
        assert is_key is not None
        is_key = jnp.broadcast_to(is_key.reshape(-1, 1), hidden.shape)
        return jax.vjp(lambda x: jnp.where(is_key, _activated(x), 0.0), hidden)

    def convolved(self, i: Any, j: Any) -> tuple[jax.Array, list[jax.Array]]:
        """A of DAPE V2, [positions, heads], and for each tap of its second layer the hidden layer, not activated.

        Loops over taps, not copies for each: the compiler would hold everything at once.
        """
        plan, p = self.plan, self.operands.adapt
        taps, positions = len(p["w1"]), self.tile.q * self.tile.k
        start = jnp.broadcast_to(p["b1"], (positions, p["b1"].shape[-1]))

        def second(t: Any, carry: tuple) -> tuple:
            def first(s: Any, carry: tuple) -> tuple:
                hidden, a = carry
                residual, xs, _ = self.inputs(i, j, t + s - plan.halo)
                for x, w in zip(xs, _pick(p["w1"], s), strict=True):
                    hidden = hidden + self.mix(x, w)[0]
                return hidden, a + jnp.where(_is_center(plan, t, s), residual, 0.0)

            a, each = carry
            hidden, a = jax.lax.fori_loop(0, taps, first, (start, a))
            act, _ = self.activated(i, j, t - plan.halo // 2, hidden)
            a = a + self.mix(act, _pick(p["w2"], t))[0]
            return a, [jnp.where(t == n, hidden, x) for n, x in enumerate(each)]

        zeros = jnp.zeros((positions, plan.width), jnp.float32)
        return jax.lax.fori_loop(0, taps, second, (zeros, [jnp.zeros_like(start)] * taps))

    def d_convolved(self, i: Any, j: Any, each: list[jax.Array], d_a: jax.Array) -> tuple[list[jax.Array], Any, Any]:
        """The vjp of ``convolved``, with the hidden layers that it gave."""
        plan, p = self.plan, self.operands.adapt
        taps = len(p["w1"])

        def second(t: Any, carry: tuple) -> tuple:
            d_ss, d_bias, d_p = carry
            act, vjp = self.activated(i, j, t - plan.halo // 2, _pick(each, t))
            d_act, d_w2 = self.mix(act, _pick(p["w2"], t))[1](d_a)
            (d_hidden,) = vjp(d_act)

            def first(s: Any, carry: tuple) -> tuple:
                d_ss, d_bias, d_w1 = carry
                _, xs, vjp = self.inputs(i, j, t + s - plan.halo)
                both = [self.mix(x, w)[1](d_hidden) for x, w in zip(xs, _pick(p["w1"], s), strict=True)]
                d_s, d_b = vjp((jnp.where(_is_center(plan, t, s), d_a, 0.0), [d_x for d_x, _ in both]))
                d_w1 = _add_at(d_w1, s, [d_w for _, d_w in both])
                return _add_at(d_ss, t + s, d_s), jax.tree.map(jnp.add, d_bias, d_b), d_w1

            d_ss, d_bias, d_w1 = jax.lax.fori_loop(0, taps, first, (d_ss, d_bias, d_p["w1"]))
            d_b1 = d_p["b1"] + d_hidden.sum(axis=0, keepdims=True)
            return d_ss, d_bias, {"w1": d_w1, "b1": d_b1, "w2": _add_at(d_p["w2"], t, d_w2)}

        zeros = jax.tree.map(jnp.zeros_like, ([d_a] * (2 * plan.halo + 1), self.operands.bias, p))
        d_ss, d_bias, d_p = jax.lax.fori_loop(0, taps, second, zeros)
        return [d_s.reshape(self.tile.q, self.tile.k, plan.width) for d_s in d_ss], d_bias, d_p

    def input(self, x: jax.Array) -> jax.Array:
        return x if self.plan.exact else x.astype(jnp.bfloat16)


def _index(n: Any) -> Any:
    """Interpreted, masked loads take NumPy's integers and not Python's."""
    return np.int32(n) if isinstance(n, int) else n


def _is_center(plan: Plan, t: Any, s: Any) -> Any:
    """Whether taps t and s of the two layers are both the middle one: the key itself, once."""
    return (t == plan.halo // 2) & (s == plan.halo // 2)


def _pick(trees: Sequence[Any], n: Any) -> Any:
    """The n-th of a few alike, n traced."""
    picked = trees[0]
    for at, tree in enumerate(trees[1:], 1):
        picked = jax.tree.map(functools.partial(jnp.where, n == at), tree, picked)
    return picked


def _add_at(trees: Sequence[Any], n: Any, x: Any) -> list[Any]:
    """With x added to the n-th, n traced."""
    return [jax.tree.map(lambda a, b, at=at: a + jnp.where(n == at, b, 0.0), tree, x) for at, tree in enumerate(trees)]


def _join(xs: Sequence[jax.Array], width: int) -> jax.Array:
    """Arrays of one shape to [*shape, width], padded with zeros."""
    shape = xs[0].shape
    xs = [*xs, *[jnp.zeros(shape, xs[0].dtype)] * (width - len(xs))]
    while len(xs) > 1:
        half = len(xs) // 2
        xs = [jnp.stack([x, y], axis=-1) for x, y in zip(xs[:half], xs[half:], strict=True)]
    return xs[0].reshape(*shape, width)


def _spread(x: jax.Array) -> jax.Array:
    """x, exactly: its product with the identity matrix, [.., n] in three bfloat16 parts.

    A 16 x 16 product keeps two of eight warps busy, and the others hold copies; the compiler would carry the copies
    through all that follows. The result of a product over all positions has one owner for each number.
    """
    flat = x.reshape(-1, x.shape[-1])
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (flat.shape[1],) * 2, axis) for axis in (0, 1))
    eye = jnp.where(row == column, 1.0, 0.0).astype(jnp.bfloat16)
    high, middle = _halves(flat)
    low = (flat - high.astype(jnp.float32) - middle.astype(jnp.float32)).astype(jnp.bfloat16)
    same = functools.reduce(jnp.add, [product(part, eye, (1, 0), exact=False) for part in (high, middle, low)])
    return same.reshape(x.shape)


def _split(x: jax.Array) -> list[jax.Array]:
    """The inverse of ``_join``, padding included."""
    *shape, width = x.shape
    if width == 1:
        return [x.reshape(shape)]
    pair = x.reshape(*shape, width // 2, 2)
    even, odd = (half.reshape(*shape, width // 2) for half in jnp.unstack(pair, axis=-1))
    return [x for two in zip(_split(even), _split(odd), strict=True) for x in two]


def _forward_kernel(plan: Plan, r: Inputs, out: Any, lse: Any) -> None:
    """Grid (query block, group, batch row), the longest causal rows first; the online softmax runs over key blocks."""
    program = _Program(plan, plan.forward, r)
    i = pl.num_programs(0) - 1 - program.block
    heads, tile = program.heads(), plan.forward
    # The backward needs the output of its own probabilities: those rounded once make gradients of FIRE's parameters,
    # small differences of large sums, wrong by up to 2 %.
    precise = not plan.exact and out.dtype == jnp.float32

    def body(j: Any, carry: tuple) -> tuple:
        top, total, values = carry
        a, mask, _ = program.logits(i, j)
        a = a if mask is None else jnp.where(mask, a, LOWEST)
        new_top = jnp.maximum(top, a.max(axis=1))
        p = jnp.exp(a - new_top[:, None])
        p = p if mask is None else jnp.where(mask, p, 0.0)
        decay = jnp.exp(top - new_top)
        total = decay * total + p.sum(axis=1)
        values = [x * c[:, None] for x, c in zip(values, _split(decay), strict=False)]
        for part in _halves(p) if precise else [program.input(p)]:
            each = zip(heads, values, _split(part), strict=False)
            values = [x + product(y, program.rows(r.v, j, "k", n), (1, 0), plan.exact) for (_, n), x, y in each]
        return new_top, total, values

    column = (tile.q, plan.width)
    start = [jnp.zeros((tile.q, plan.padded_dim), jnp.float32) for _ in heads]
    carry = (jnp.full(column, LOWEST, jnp.float32), jnp.zeros(column, jnp.float32), start)
    top, total, values = jax.lax.fori_loop(*program.range(i), body, carry)
    empty = total == 0.0
    total = jnp.where(empty, 1.0, total)
    for (h, _), x, c in zip(heads, values, _split(1.0 / total), strict=False):
        program.store(out, i, "q", h, x * c[:, None])
    at, there = program.mask(i, "q")
    there = None if there is None else jnp.broadcast_to(there[:, None], column)
    plgpu.store(lse.at[program.b, at, program.g, :], jnp.where(empty, jnp.inf, top + jnp.log(total)), mask=there)


def _tile_gradient(program: _Program, grad: Gradient, i: Any, j: Any) -> tuple[jax.Array, tuple]:
    """P, and the gradients of S and of the operands."""
    a, mask, vjp = program.logits(i, j)
    p = jnp.exp(a - program.columns(grad.lse, i, float("inf")))
    # Entries that are not allowed may overflow the exponential; they are replaced, not scaled.
    p = p if mask is None else jnp.where(mask, p, 0.0)
    d_p = program.products(grad.d_out, program.r.v, i, j, 1.0)
    return p, vjp(p * (d_p - program.columns(grad.delta, i, 0.0)))


def _queries_kernel(plan: Plan, r: Inputs, grad: Gradient, d_q: Any, *d_operands: Any) -> None:
    """Grid as the forward's. d_q as q; d_operands [B, query blocks, groups, rows, columns] each."""
    program = _Program(plan, plan.queries, r)
    i = pl.num_programs(0) - 1 - program.block
    heads, tile = program.heads(), plan.queries

    def body(j: Any, carry: tuple) -> tuple:
        d_q, sums = carry
        _, (d_ss, *d_operands) = _tile_gradient(program, grad, i, j)

        def add(shift: Any, d_q: list[jax.Array]) -> list[jax.Array]:
            d_s = d_ss[0] if shift is None else _pick(d_ss, shift + plan.halo)
            each = zip(heads, d_q, _split(program.input(d_s)), strict=False)
            return [x + product(y, program.rows(r.k, j, "k", n, shift), (1, 0), plan.exact) for (_, n), x, y in each]

        d_q = jax.lax.fori_loop(-plan.halo, plan.halo + 1, add, d_q) if plan.halo else add(None, d_q)
        return d_q, jax.tree.map(jnp.add, sums, d_operands)

    sums = [program.operands.bias, program.operands.adapt]
    start = [jnp.zeros((tile.q, plan.padded_dim), jnp.float32) for _ in heads], jax.tree.map(jnp.zeros_like, sums)
    total, sums = jax.lax.fori_loop(*program.range(i), body, start)
    for (h, _), x in zip(heads, total, strict=True):
        program.store(d_q, i, "q", h, plan.spec.scale * x)
    for ref, x in zip(d_operands, jax.tree.leaves(sums), strict=True):
        ref[program.b, i, program.g] = x


def _keys_kernel(plan: Plan, r: Inputs, grad: Gradient, d_v: Any, *d_ks: Any) -> None:
    """Grid (key block, group, batch row). d_v as v; d_ks as k, one for each shift from -halo to halo: what the
    logits of a block give the keys beside it. Of each one for each query head, where a program holds one."""
    program = _Program(plan, plan.keys, r)
    j, heads = program.block, program.heads()
    outputs = [program.g] if plan.groups > 1 else list(range(plan.kv_heads))

    def body(i: Any, carry: tuple) -> tuple:
        d_v, d_ks = list(carry[0]), [list(x) for x in carry[1]]
        p, (d_ss, *_) = _tile_gradient(program, grad, i, j)
        for (h, n), x in zip(heads, _split(program.input(p)), strict=False):
            d_v[0 if plan.groups > 1 else n] += product(x, program.rows(grad.d_out, i, "q", h), (0, 0), plan.exact)
        for d_k, d_s in zip(d_ks, d_ss, strict=True):
            for (h, n), y in zip(heads, _split(program.input(d_s)), strict=False):
                d_k[0 if plan.groups > 1 else n] += product(y, program.rows(r.q, i, "q", h), (0, 0), plan.exact)
        return d_v, d_ks

    zeros = [jnp.zeros((plan.keys.k, plan.padded_dim), jnp.float32) for _ in outputs]
    total_v, totals_k = jax.lax.fori_loop(*program.range(j), body, (zeros, [zeros for _ in d_ks]))
    for h, x in zip(outputs, total_v, strict=True):
        program.store(d_v, j, "k", h, x)
    for d_k, total in zip(d_ks, totals_k, strict=True):
        for h, x in zip(outputs, total, strict=True):
            program.store(d_k, j, "k", h, plan.spec.scale * x)


# Calls ----------------------------------------------------------------------------------------------------------------


def _heads_first(x: jax.Array) -> jax.Array:
    """[B, T, H, d] to [H, B, T, d]."""
    return jnp.transpose(x, (2, 0, 1, 3))


def _rows_first(x: jax.Array) -> jax.Array:
    """[H, B, T, d] to [B, T, H, d], what ``dape_attention`` was given."""
    return jnp.transpose(x, (1, 2, 0, 3))


def _bounds(plan: Plan, tile: Tile, arrays: Arrays, of: str) -> jax.Array:
    """int32 [P, blocks, 2]: for each block of queries the range of key blocks it needs, or the other way round."""

    def blocks(x: jax.Array, n: int) -> jax.Array:
        missing = -x.shape[1] % n
        return jnp.pad(x, ((0, 0), (0, missing)), mode="edge").reshape(x.shape[0], -1, n)

    q, k = blocks(arrays.q_positions, tile.q), blocks(arrays.k_positions, tile.k)
    needed = jnp.ones((q.shape[0], q.shape[1], k.shape[1]), bool)
    if plan.spec.causal:
        needed = k.min(-1)[:, None, :] <= q.max(-1)[:, :, None]
    axis = 2 if of == "q" else 1
    index = jax.lax.broadcasted_iota(jnp.int32, needed.shape, axis)
    last = jnp.where(needed, index + 1, 0).max(axis)
    return jnp.stack([jnp.where(needed, index, last.max()).min(axis), last], axis=-1)


def _call(
    plan: Plan, interpret: bool, tile: Tile, of: str, kernel: Callable, arrays: Arrays, grad: Gradient | None,
    outputs: Sequence[tuple[Any, str, int | None]], times: tuple[float, float],
) -> Any:  # fmt: skip
    """``pallas_call`` with a program for each block of the queries or keys, group of heads and batch row.

    ``outputs``: shape, axis of time, and padded last axis of each. ``times``: how often the products of attention and
    of the network run.
    """
    batch = arrays.q.shape[1]
    q, k, v = (_rows_first(x) for x in (arrays.q, arrays.k, arrays.v))
    valid = None if arrays.k_valid is None else arrays.k_valid.astype(jnp.int32)
    operands = pack(plan, arrays.bias_params, arrays.adapt_params)
    inputs = Inputs(
        _bounds(plan, tile, arrays, of), q, k, v, arrays.q_positions, arrays.k_positions, arrays.q_segments,
        arrays.k_segments, valid, operands,
    )  # fmt: skip

    def spec(x: Any, of: str = "", last: int | None = None) -> Any:
        if x is None:
            return None
        shape = list(x.shape)
        if of:
            shape[1] += -shape[1] % getattr(tile, of)
        shape[-1] = last or shape[-1]
        return pl.BlockSpec(tuple(shape), lambda *_: (0,) * len(shape))

    of_inputs = ("", "q", "k", "k", "q", "k", "q", "k", "k")
    lasts = (None, *[plan.padded_dim] * 3, *[None] * 5)
    specs: list[Any] = [Inputs(*map(spec, inputs[:9], of_inputs, lasts), operands=jax.tree.map(spec, operands))]
    if grad is not None:
        specs.append(Gradient(spec(grad.d_out, "q", plan.padded_dim), spec(grad.lse, "q"), spec(grad.delta, "q")))
    blocks = pl.cdiv(q.shape[1] if of == "q" else k.shape[1], getattr(tile, of))
    return pl.pallas_call(
        functools.partial(kernel, plan),
        out_shape=[shape for shape, *_ in outputs],
        grid=(blocks, plan.groups, batch),
        in_specs=specs,
        out_specs=[spec(*output) for output in outputs],
        compiler_params=plgpu.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        cost_estimate=_cost(plan, batch, times),
        interpret=interpret,
        name="dape_attention" + kernel.__name__.removesuffix("_kernel"),
    )(inputs, *([] if grad is None else [grad]))


def _cost(plan: Plan, batch: int, times: tuple[float, float]) -> pl.CostEstimate:
    """Of the positions that a causal mask over default positions leaves."""
    spec, heads = plan.spec, plan.spec.num_heads
    positions = batch * plan.q_length * plan.k_length // (2 if spec.causal and plan.q_length > 1 else 1)
    adapt, network = spec.adapt, 0
    if adapt is not None:
        inputs = adapt.channels(heads, spec.bias is not None)
        network = adapt.kernel_width * adapt.width * ((inputs + 1) * heads if adapt.per_head else inputs + heads)
    size = 4 if plan.exact else 2
    moved = batch * size * plan.head_dim * 2 * (plan.q_length * heads + plan.k_length * plan.kv_heads)
    return pl.CostEstimate(
        flops=int(2 * positions * (times[0] * heads * plan.head_dim + times[1] * network)),
        transcendentals=positions * heads * (1 if spec.bias is None else 2),
        bytes_accessed=int(moved * times[0]),
    )


def _forward(plan: Plan, interpret: bool, arrays: Arrays, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """out [B, Tq, H, d] and log-sum-exp float32 [B, Tq, groups, padded heads] (+inf in rows that see nothing)."""
    heads, batch, length, d = arrays.q.shape
    outputs = [
        (jax.ShapeDtypeStruct((batch, length, heads, d), dtype), "q", plan.padded_dim),
        (jax.ShapeDtypeStruct((batch, length, plan.groups, plan.width), jnp.float32), "q", None),
    ]
    return _call(plan, interpret, plan.forward, "q", _forward_kernel, arrays, None, outputs, (2, 1))


def _shifted_sum(xs: Sequence[jax.Array]) -> jax.Array:
    """``y[:, j] = sum_e xs[e][:, j - e]``, e from -h to h for 2h + 1 arrays [B, T, ..]; zero beyond the ends."""
    h, length = len(xs) // 2, xs[0].shape[1]
    if not h:
        return xs[0]
    rest = [(0, 0)] * (xs[0].ndim - 2)
    padded = [jnp.pad(x, [(0, 0), (n, 2 * h - n), *rest]) for n, x in enumerate(xs)]
    return functools.reduce(jnp.add, padded)[:, h : h + length]


def _attend_bwd(plan: Plan, interpret: bool, saved: Any, d_out: jax.Array) -> tuple[Arrays]:
    arrays, out, lse = saved
    _, batch, length, d = arrays.q.shape
    d_out = _rows_first(d_out)
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)
    delta = _pad(delta.reshape(batch, length, plan.groups, plan.heads), 3, plan.width)
    call = functools.partial(_call, plan, interpret)
    grad = Gradient(d_out, lse, delta)
    params = (dict(arrays.bias_params), dict(arrays.adapt_params))
    packed, unpack = jax.vjp(lambda b, a: pack(plan, b, a)[:2], *params)
    parts = (batch, pl.cdiv(length, plan.queries.q))
    outputs = [(jax.ShapeDtypeStruct(d_out.shape, arrays.q.dtype), "q", plan.padded_dim)]
    outputs += [(jax.ShapeDtypeStruct((*parts, *x.shape), x.dtype), "", None) for x in jax.tree.leaves(packed)]
    d_q, *sums = call(plan.queries, "q", _queries_kernel, arrays, grad, outputs, (3, 3))
    d_params = unpack(jax.tree.unflatten(jax.tree.structure(packed), [x.sum(axis=(0, 1)) for x in sums]))

    # One for each program's heads: those of query heads that share a key head are added up here, as are those of a
    # convolving network's shifts.
    shared, dtype = plan.groups > 1 and plan.group > 1, arrays.k.dtype
    of_keys = (batch, plan.k_length, plan.spec.num_heads if shared else plan.kv_heads, d)
    outputs = [
        (jax.ShapeDtypeStruct(of_keys, jnp.float32 if shared or in_parts else dtype), "k", plan.padded_dim)
        for in_parts in (False, *[plan.halo > 0] * (2 * plan.halo + 1))
    ]
    d_v, *d_ks = call(plan.keys, "k", _keys_kernel, arrays, grad, outputs, (4, 2))
    d_k = _shifted_sum(d_ks)
    if shared:
        d_k, d_v = (x.reshape(batch, plan.k_length, plan.kv_heads, -1, d).sum(axis=3) for x in (d_k, d_v))
    d_k, d_v = d_k.astype(dtype), d_v.astype(dtype)
    gradients: dict[str, Any] = dict.fromkeys(Arrays._fields)  # None for what is not differentiable
    gradients |= {name: _heads_first(x) for name, x in (("q", d_q), ("k", d_k), ("v", d_v))}
    return (Arrays(**gradients | dict(zip(("bias_params", "adapt_params"), d_params, strict=True))),)


_attend.defvjp(_attend_fwd, _attend_bwd)


__all__ = ["attend", "refusal"]
