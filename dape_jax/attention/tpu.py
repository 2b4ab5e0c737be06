"""Fused DAPE attention on TPU (Pallas, Mosaic): forward and backward without an array of Tq x Tk.

Arrays stay [B, T, heads x head dimension], so that nothing is padded to 128 lanes in HBM. The forward keeps the output
and the log-sum-exp; the backward is one kernel that recomputes each tile's logits. Causal blocks out of reach are
neither computed nor fetched: an index map that stays at the last block needed makes the pipeline fetch nothing.

Keys of a convolving network (DAPE V2) come in overlapping tiles, each with its halo, as in ``blockwise``.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dape_jax.attention import tpu_backward, tpu_blocks, tpu_forward, tpu_rows, tpu_tables, tpu_tiles
from dape_jax.attention.arguments import Arrays, Spec, saved_dtype
from dape_jax.attention.blocks import BlockSizes
from dape_jax.attention.target import MIB, Target
from dape_jax.attention.tpu_blocks import Plans
from dape_jax.attention.tpu_plan import Plan, Scalars, row_index
from dape_jax.attention.tpu_rows import LANES


def refusal(spec: Spec, arrays: Arrays, blocks: BlockSizes | None, target: Target) -> str | None:
    """Why these kernels cannot serve a call, naming the argument; None if they can."""
    q, bias = arrays.q, spec.bias
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"q has dtype {q.dtype}; float32 or bfloat16 is needed"
    if q.shape[3] > LANES:
        return f"q has head dimension {q.shape[3]}; {LANES} or less is needed"
    served = (*tpu_rows.ELEMENTWISE, *tpu_rows.FEATURES)
    if bias is not None and type(bias) not in served:
        return f"bias {type(bias).__name__} has no kernel; one of {', '.join(c.__name__ for c in served)} is needed"
    if blocks is not None:
        return tpu_blocks.misfit(spec, arrays, blocks, target)
    if None in (tpu_blocks.choose(spec, arrays, target, backward) for backward in (False, True)):
        shape = f"q has {spec.num_heads} heads of {q.shape[3]} in {q.dtype}"
        if spec.adapt is not None:
            shape += f", and adapt width={spec.adapt.width}, per_head={spec.adapt.per_head}"
        return f"{shape}, for which no block size fits {target.vmem[-1].budget // MIB} MiB of VMEM"
    return None


def attend(spec: Spec, arrays: Arrays, blocks: BlockSizes | None, target: Target) -> jax.Array:
    """Attention output [H, B, Tq, d] in the dtype of q; rows that may attend to nothing are zero.

    For calls without a ``refusal``. ``blocks``, of both kernels, counts the keys of a tile with their halo; None takes
    ``tpu_blocks.choose`` for each.
    """
    plans = tpu_blocks.make_plans(spec, arrays, blocks, target)
    return cast(jax.Array, _attend(plans, target, arrays))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(plans: Plans, target: Target, arrays: Arrays) -> jax.Array:
    return _heads_first(_forward(plans.forward, target, arrays, arrays.q.dtype)[0], arrays.q)


def _attend_fwd(plans: Plans, target: Target, arrays: Arrays) -> tuple[jax.Array, Any]:
    out, lse = _forward(plans.saving, target, arrays, saved_dtype(arrays))
    lse = lse[:, : arrays.q.shape[2]]
    # Named for rematerialisation policies: with both saved, the backward needs no second forward.
    out = checkpoint_name(_heads_first(out, arrays.q), "dape_attention_out")
    return out.astype(arrays.q.dtype), (arrays, out, checkpoint_name(lse, "dape_attention_lse"))


# Arguments as the kernels take them -----------------------------------------------------------------------------------


def _heads_last(x: jax.Array) -> jax.Array:
    """[H, B, T, d] to [B, T, H d]."""
    x = jnp.transpose(x, (1, 2, 0, 3))
    return x.reshape(*x.shape[:2], -1)


def _heads_first(x: jax.Array, like: jax.Array) -> jax.Array:
    """[B, padded T, H d] to [H, B, T, d], the shape of ``like``, without the padding."""
    heads, batch, length, d = like.shape
    return jnp.transpose(x[:, :length].reshape(batch, length, heads, d), (2, 0, 1, 3))


def _pad_queries(plan: Plan, x: jax.Array, axis: int = 1, **how: Any) -> jax.Array:
    missing = plan.q_blocks * plan.block_q - x.shape[axis]
    return jnp.pad(x, [(0, missing if n == axis else 0) for n in range(x.ndim)], **how) if missing else x


def _cut_keys(plan: Plan, x: jax.Array, axis: int = 1, **how: Any) -> jax.Array:
    """Pads the keys to whole tiles; with a halo, each tile's copy of its neighbours' keys is inserted."""
    halo, own = plan.halo, plan.own_keys
    missing = plan.k_blocks * own - x.shape[axis]
    if halo or missing:
        x = jnp.pad(x, [(halo, missing + halo) if n == axis else (0, 0) for n in range(x.ndim)], **how)
    if halo:
        index = jnp.arange(plan.k_blocks)[:, None] * own + jnp.arange(plan.block_k)[None, :]
        x = jnp.take(x, index.reshape(-1), axis=axis)
    return x


def _query_info(plan: Plan, arrays: Arrays) -> jax.Array:
    """int32 [1 or B, padded Tq, 2]: position and segment. Queries that pad repeat the last position."""
    positions = _pad_queries(plan, arrays.q_positions, mode="edge")
    if arrays.q_segments is None:
        return jnp.stack([positions, jnp.zeros_like(positions)], axis=-1)
    segments = _pad_queries(plan, arrays.q_segments)
    return jnp.stack([jnp.broadcast_to(positions, segments.shape), segments], axis=-1)


def _key_info(plan: Plan, arrays: Arrays) -> jax.Array:
    """int32 [1 or B, 8, cut Tk], the rows that ``tpu_tiles`` names."""
    batch = arrays.k.shape[1] if plan.rows_of_keys else 1
    shape = (batch, arrays.k.shape[2])
    valid = jnp.ones(shape, jnp.int32) if arrays.k_valid is None else arrays.k_valid.astype(jnp.int32)
    segments = jnp.zeros_like(valid) if arrays.k_segments is None else arrays.k_segments
    lane = jnp.arange(plan.k_blocks * plan.block_k) % plan.block_k
    inner = ((lane >= plan.halo) & (lane < plan.halo + plan.own_keys)).astype(jnp.int32)
    allowed = _cut_keys(plan, valid)
    rows = [
        _cut_keys(plan, jnp.broadcast_to(arrays.k_positions, shape), mode="edge"),
        _cut_keys(plan, segments),
        allowed,
        allowed * inner[None],
    ]
    return jnp.pad(jnp.stack(rows, axis=1), ((0, 0), (0, 8 - len(rows)), (0, 0)))


def _scalars(plan: Plan, arrays: Arrays, keys: jax.Array, inner: str) -> Scalars:
    """``inner`` names the grid axis whose range is asked for: "k" for each query block, "q" for each key block."""
    q = _pad_queries(plan, arrays.q_positions, mode="edge").reshape(-1, plan.q_blocks, plan.block_q)
    tiles = keys.reshape(keys.shape[0], 8, plan.k_blocks, plan.block_k)
    own = tiles[..., plan.halo : plan.halo + plan.own_keys]
    k = own[: q.shape[0], tpu_tiles.POSITION]
    q_min, q_max, k_min, k_max = q.min(-1), q.max(-1), k.min(-1), k.max(-1)
    needed = (k_min[:, None, :] <= q_max[:, :, None]) if plan.spec.causal else None
    axis, blocks = (2, plan.k_blocks) if inner == "k" else (1, plan.q_blocks)
    if needed is None:
        outer = (q.shape[0], plan.q_blocks if inner == "k" else plan.k_blocks)
        first, last = jnp.zeros(outer, jnp.int32), jnp.full(outer, blocks, jnp.int32)
    else:
        index = jax.lax.broadcasted_iota(jnp.int32, needed.shape, axis)
        # Where nothing is needed, one block is fetched and not used.
        first = jnp.where(needed, index, blocks - 1).min(axis)
        last = jnp.where(needed, index + 1, 0).max(axis)
    last = jnp.maximum(last, first + 1)
    k_full = own[:, tpu_tiles.OWN].min(-1)
    return Scalars(*(x.astype(jnp.int32).reshape(-1) for x in (q_min, q_max, k_min, k_max, k_full, first, last)))


_IN_HBM = pl.BlockSpec(memory_space=pl.ANY)

# Calls ----------------------------------------------------------------------------------------------------------------


class _Blocks:
    """Block specifications for a grid of (row, query block, key block) or (row, key block, query block)."""

    def __init__(self, plan: Plan, order: str):
        self.plan, self.order = plan, order

    def _spec(self, shape: tuple[int, ...], index: Callable[[Any, Any, Any], tuple]) -> pl.BlockSpec:
        def index_map(b: Any, outer: Any, inner: Any, *scalars: Any) -> tuple:
            s, plan = Scalars(*scalars), self.plan
            blocks = plan.q_blocks if self.order == "qk" else plan.k_blocks
            at = row_index(b, outer, blocks, plan.rows_of_positions)
            inner = jnp.minimum(jnp.maximum(inner, s.first[at]), s.last[at] - 1)
            return index(b, outer, inner) if self.order == "qk" else index(b, inner, outer)

        return pl.BlockSpec(shape, index_map)

    def queries(self, width: int, by_row: bool = True) -> pl.BlockSpec:
        return self._spec((1, self.plan.block_q, width), lambda b, i, _: (b if by_row else 0, i, 0))

    def keys(self, width: int) -> pl.BlockSpec:
        return self._spec((1, self.plan.block_k, width), lambda b, _, j: (b, j, 0))

    def key_info(self) -> pl.BlockSpec:
        by_row = self.plan.rows_of_keys
        return self._spec((1, 8, self.plan.block_k), lambda b, _, j: (b if by_row else 0, 0, j))

    def whole(self, x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec(x.shape, lambda *_, n=x.ndim: (0,) * n)


def _call(
    plan: Plan, kernel: Callable, fields: type, name: str, grid: tuple[int, ...], inputs: list, in_specs: list,
    outputs: Any, out_specs: Any, scratch: Any, cost: pl.CostEstimate, target: Target, aliases: dict[int, int],
) -> Any:  # fmt: skip
    """``pallas_call`` of a kernel that takes one NamedTuple; inputs, outputs and scratch are trees."""
    scalars, *arrays = inputs
    leaves = jax.tree.leaves
    tree = jax.tree.structure((scalars, *arrays, *outputs, *scratch))

    # The backward adds up along all three axes; chips with two cores may split the forward's blocks.
    semantics = ("arbitrary",) * 3 if aliases else ("parallel", "parallel", "arbitrary")

    def flat(*refs: Any) -> None:
        kernel(plan, fields(*jax.tree.unflatten(tree, refs)))

    out = pl.pallas_call(
        flat,
        out_shape=leaves(outputs),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=leaves(in_specs),
            out_specs=leaves(out_specs),
            scratch_shapes=leaves(scratch),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics, vmem_limit_bytes=tpu_blocks.vmem_limit(plan, target, backward=bool(aliases))
        ),
        cost_estimate=cost,
        input_output_aliases=aliases,
        interpret=target.interpret,
        name=name,
    )(*leaves(inputs))
    return jax.tree.unflatten(jax.tree.structure(outputs), out)


def _cost(plan: Plan, batch: int, backward: bool) -> pl.CostEstimate:
    """Of the tiles that a causal mask over default positions leaves."""
    queries, keys = plan.q_blocks * plan.block_q, plan.k_blocks * plan.block_k
    positions = batch * queries * keys // (2 if plan.spec.causal and plan.q_blocks > 1 else 1)
    adapt, heads = plan.spec.adapt, plan.heads
    products = 2 * heads * plan.head_dim
    network = 0
    if adapt is not None:
        inputs = adapt.channels(heads, plan.spec.bias is not None) * (heads if adapt.per_head else 1)
        network = adapt.kernel_width * adapt.width * (inputs + heads)
    times = (2.5, 3.0) if backward else (1.0, 1.0)
    size = 4 if plan.exact else 2
    moved = batch * size * (queries * heads + keys * plan.kv_heads * plan.q_blocks) * plan.head_dim * 2
    return pl.CostEstimate(
        flops=int(2 * positions * (times[0] * products + times[1] * network)),
        transcendentals=positions * heads * (1 if plan.spec.bias is None else 2),
        bytes_accessed=moved * (2 if backward else 1),
    )


def _common(plan: Plan, arrays: Arrays, inner: str) -> tuple[list, list]:
    """Scalars, q, k, v, info, keys, operands, tables, and the specifications of all but the scalars."""
    blocks = _Blocks(plan, "qk" if inner == "k" else "kq")
    keys = _key_info(plan, arrays)
    info = _query_info(plan, arrays)
    q = _pad_queries(plan, _heads_last(arrays.q))
    k, v = (_cut_keys(plan, _heads_last(x)) for x in (arrays.k, arrays.v))
    scalars = _scalars(plan, arrays, keys, inner)
    operands, tables = tpu_rows.Operands({}, {}, {}), tpu_tables.EMPTY
    if plan.tabled:
        k, v, keys = tpu_tables.deal(plan, k), tpu_tables.deal(plan, v), tpu_tables.deal(plan, keys, axis=2)
        tables = tpu_tables.narrowed(plan, tpu_tables.make(plan, arrays.bias_params, arrays.adapt_params))
    else:
        operands = tpu_rows.pack(plan.rows, arrays.bias_params, arrays.adapt_params)
    strip = None if tables.strip is None else _IN_HBM
    inputs = [scalars, q, k, v, info, keys, operands, tables]
    specs = [
        blocks.queries(q.shape[2]),
        blocks.keys(k.shape[2]),
        blocks.keys(v.shape[2]),
        blocks.queries(2, by_row=info.shape[0] > 1),
        blocks.key_info(),
        jax.tree.map(blocks.whole, operands),
        jax.tree.map(blocks.whole, tables)._replace(strip=strip),
    ]
    return inputs, specs


def _forward(plan: Plan, target: Target, arrays: Arrays, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """out [B, padded Tq, H d] and log-sum-exp float32 [B, padded Tq, H] (+inf in rows that may attend to nothing)."""
    batch, blocks = arrays.q.shape[1], _Blocks(plan, "qk")
    inputs, specs = _common(plan, arrays, "k")
    q = inputs[1]
    outputs = (
        jax.ShapeDtypeStruct(q.shape, dtype),
        jax.ShapeDtypeStruct((*q.shape[:2], plan.heads), jnp.float32),
    )
    return _call(
        plan, tpu_forward.kernel, tpu_forward.Forward, "dape_attention_forward",
        (batch, plan.q_blocks, plan.k_blocks), inputs, specs, outputs,
        (blocks.queries(q.shape[2]), blocks.queries(plan.heads)), tpu_forward.scratch(plan),
        _cost(plan, batch, False), target, {},
    )  # fmt: skip


def _attend_bwd(plans: Plans, target: Target, saved: Any, d_out: jax.Array) -> tuple[Arrays]:
    plan, (arrays, out, lse) = plans.backward, saved
    batch, blocks = arrays.q.shape[1], _Blocks(plan, "kq")
    inputs, specs = _common(plan, arrays, "q")
    _, q, k, v, _, _, operands, tables = inputs
    delta = (d_out.astype(jnp.float32) * out.astype(jnp.float32)).sum(axis=-1)  # [H, B, Tq]
    delta = _pad_queries(plan, jnp.transpose(delta, (1, 2, 0)))
    d_out = _pad_queries(plan, _heads_last(d_out))
    lse = _pad_queries(plan, lse, constant_values=jnp.inf)  # queries that pad attend to nothing
    zeros = [jnp.zeros(q.shape, jnp.float32), None if tables.strip is None else jnp.zeros_like(tables.strip)]
    in_hbm = jax.tree.map(lambda _: _IN_HBM, zeros)
    transposed = []
    if tables.w1 is not None:
        transposed = [tables.w1[:, : plan.rows.count].T, tables.w2.T]
    inputs += [transposed, d_out, lse, delta, zeros]
    specs += [jax.tree.map(blocks.whole, transposed), blocks.queries(q.shape[2])]
    specs += [blocks.queries(plan.heads), blocks.queries(plan.heads), in_hbm]
    sums = [[operands.bias, operands.adapt], tables._replace(strip=None)]
    if tables.w1 is not None:  # no gradient from what meets the low part of W1
        sums[1] = sums[1]._replace(w1=tables.w1[:, : plan.high_and_low])
    sums = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), sums)

    def keys(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((1, plan.block_k, x.shape[2]), lambda b, j, *_: (b, j, 0))

    outputs = (
        *(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), x) for x in zeros),
        jax.ShapeDtypeStruct(k.shape, k.dtype),
        jax.ShapeDtypeStruct(v.shape, v.dtype),
        *sums,
    )
    out_specs = (*in_hbm, keys(k), keys(v), *(jax.tree.map(blocks.whole, x) for x in sums))
    first = len(jax.tree.leaves(inputs)) - len(jax.tree.leaves(zeros))
    aliases = {first + n: n for n in range(len(jax.tree.leaves(zeros)))}
    d_q, d_strip, d_k, d_v, d_operands, d_tables = _call(
        plan, tpu_backward.kernel, tpu_backward.Backward, "dape_attention_backward",
        (batch, plan.k_blocks, plan.q_blocks), inputs, specs, outputs, out_specs,
        tpu_backward.scratch(plan), _cost(plan, batch, True), target, aliases,
    )  # fmt: skip
    gradients: dict[str, Any] = dict.fromkeys(Arrays._fields)  # None for what is not differentiable
    gradients["q"] = _heads_first(d_q.astype(q.dtype), arrays.q)
    for name, d_x in (("k", d_k), ("v", d_v)):
        like = getattr(arrays, name)
        d_x = tpu_tables.gather(plan, d_x) if plan.tabled else d_x
        if plan.halo or d_x.shape[1] != like.shape[2]:
            # Overlapping tiles add up where they overlap: the transpose of cutting.
            shape = jax.ShapeDtypeStruct((batch, like.shape[2], d_x.shape[2]), d_x.dtype)
            (d_x,) = jax.linear_transpose(functools.partial(_cut_keys, plan), shape)(d_x)
        gradients[name] = _heads_first(d_x, like)
    params = (dict(arrays.bias_params), dict(arrays.adapt_params))
    if plan.tabled:
        _, to_params = jax.vjp(functools.partial(tpu_tables.make, plan), *params)
        d_w1 = d_tables.w1
        if d_w1 is not None:  # one for the high and one for the low part of S
            d_w1 = d_w1.reshape(d_w1.shape[0], -1, plan.rows.count).sum(axis=1)
        d_params = to_params(d_tables._replace(strip=d_strip, w1=d_w1))
    else:
        d_params = jax.vjp(lambda b, a: tpu_rows.pack(plan.rows, b, a)[:2], *params)[1](tuple(d_operands))
    gradients["bias_params"], gradients["adapt_params"] = d_params
    return (Arrays(**gradients),)


_attend.defvjp(_attend_fwd, _attend_bwd)


__all__ = ["attend", "refusal"]
