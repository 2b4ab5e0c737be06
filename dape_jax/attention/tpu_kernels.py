"""The two kernels of the TPU backend, forward and backward, on one (query block, key block) pair a grid step.

A step holds all heads, since the DAPE network mixes them. Each head's logits go with a strided store into a scratch
whose rows are ordered (query, head), in slabs of 128 keys; groups of queries then pass through ``tpu_rows.logits`` and
the softmax in that layout, and a strided load gives each head its probabilities back for the product with the values.

Columns of numbers a row (maxima, sums, positions) are [rows, 128] with the same number in every lane.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dape_jax.attention import tpu_rows
from dape_jax.attention.tpu_plan import Plan, Scalars, row_index
from dape_jax.attention.tpu_rows import LANES, Geometry, lanes

LOWEST = float(jnp.finfo(jnp.float32).min)


# Rows of `keys` (int32 [8, block_k] of a key block).
POSITION, SEGMENT, ALLOWED, OWN, IS_KEY = range(5)


def _strided(plan: Plan, ref: Any, h: int) -> Any:
    """Where head h of every query stands in a ref of rows (query, head)."""
    return ref.at[pl.ds(h, plan.block_q, stride=plan.heads), :]


def _scatter(plan: Plan, slabs: Any, h: int, x: jax.Array) -> None:
    for n in range(plan.slabs):
        _strided(plan, slabs.at[n], h)[...] = x[:, n * LANES : (n + 1) * LANES]


def _gather(plan: Plan, slabs: Any, h: int) -> jax.Array:
    return jnp.concatenate([_strided(plan, slabs.at[n], h)[...] for n in range(plan.slabs)], axis=1)


def _expand(plan: Plan, ref: Any, column: Callable[[int], jax.Array]) -> None:
    """Fills a ref of rows (query, head) from one [block_q, 1] column for each head."""
    for h in range(plan.heads):
        _strided(plan, ref, h)[...] = jnp.broadcast_to(column(h), (plan.block_q, LANES))


def _product(plan: Plan, a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    return tpu_rows.product(a, b, contract, plan.exact)


def _input(plan: Plan, x: jax.Array) -> jax.Array:
    return x if plan.exact else x.astype(jnp.bfloat16)


def _logit_tile(plan: Plan, slabs: Any, q: Any, k: Any, scale: float) -> None:
    for h in range(plan.heads):
        _scatter(plan, slabs, h, scale * _product(plan, q[0, :, plan.head(h)], k[0, :, plan.kv_head(h)], (1, 1)))


class _Query(NamedTuple):
    """Scratch with rows (query, head), int32 [tile_rows, 128]; None where it is not needed."""

    positions: Any
    segments: Any


def query_scratch(plan: Plan) -> _Query:
    column = pltpu.VMEM((plan.tile_rows, LANES), jnp.int32)
    return _Query(column if plan.needs_positions else None, column if plan.segments else None)


def _fill_query(plan: Plan, scratch: _Query, info: Any) -> None:
    for column, ref in enumerate(scratch):
        if ref is not None:
            _expand(plan, ref, lambda _, c=column: info[0, :, c : c + 1])


def _geometry(plan: Plan, g: jax.Array, query: _Query, keys: Any, masked: bool) -> tuple[Geometry, jax.Array | None]:
    """Of group g, and the mask of what its rows may attend to, [R, block_k]; None for everything."""
    rows, at = plan.rows, _rows_at(plan, g)
    shape = (rows.count, plan.block_k)
    k_positions = keys[0, POSITION : POSITION + 1, :]
    q_positions, q_each = None, ()
    if query.positions is not None:
        q_positions = query.positions[at, :]
        if isinstance(plan.spec.bias, tpu_rows.FEATURES):
            each = [g * rows.count + i * plan.heads for i in range(plan.group)]
            q_each = tuple(query.positions[pl.ds(row, 1), :] for row in each)
    geometry = Geometry(q_positions, q_each, k_positions, None, None)
    if not masked:
        return geometry, None

    def key_row(name: int) -> jax.Array:
        return jnp.broadcast_to(keys[0, name : name + 1, :], shape)

    mask = jnp.ones(shape, jnp.bool_)
    if plan.spec.causal:
        assert q_positions is not None
        mask = key_row(POSITION) <= lanes(q_positions, plan.block_k)
    if plan.segments:
        mask = mask & (key_row(SEGMENT) == lanes(query.segments[at, :], plan.block_k))
    own = mask & (key_row(OWN) != 0) if plan.padding else mask
    if not plan.halo:
        return geometry, own
    allowed, is_key = mask & (key_row(ALLOWED) != 0), keys[0, IS_KEY : IS_KEY + 1, :] != 0
    return geometry._replace(allowed=allowed, is_key=is_key), own


def _rows_at(plan: Plan, g: jax.Array) -> Any:
    return pl.ds(pl.multiple_of(g * plan.rows.count, 8), plan.rows.count)


def _load(plan: Plan, slabs: Any, g: jax.Array) -> jax.Array:
    at = _rows_at(plan, g)
    return jnp.concatenate([slabs.at[n][at, :] for n in range(plan.slabs)], axis=1)


def _store(plan: Plan, slabs: Any, g: jax.Array, x: jax.Array) -> None:
    at = _rows_at(plan, g)
    for n in range(plan.slabs):
        slabs.at[n][at, :] = x[:, n * LANES : (n + 1) * LANES]


def _groups(plan: Plan, body: Callable[[jax.Array], None]) -> None:
    jax.lax.fori_loop(0, plan.block_q // plan.group, lambda g, _: body(g), None)


def _when_needed(plan: Plan, scalars: Scalars, b: Any, i: Any, j: Any, step: Callable[[bool], None]) -> None:
    """Runs ``step(masked)`` unless the whole tile is out of reach; without a mask where the whole tile is in reach."""
    q_at = row_index(b, i, plan.q_blocks, plan.rows_of_positions)
    k_at = row_index(b, j, plan.k_blocks, plan.rows_of_positions)
    needed, whole = None, None
    if plan.spec.causal:
        needed = scalars.k_min[k_at] <= scalars.q_max[q_at]
        whole = scalars.k_max[k_at] <= scalars.q_min[q_at]
    if plan.padding:
        full = scalars.k_full[row_index(b, j, plan.k_blocks, plan.rows_of_keys)] != 0
        whole = full if whole is None else jnp.logical_and(whole, full)
    always = plan.segments or plan.halo > 0
    if whole is None or always:
        run = functools.partial(step, always)
        run() if needed is None else pl.when(needed)(run)
        return
    masked = jnp.logical_not(whole)
    masked = masked if needed is None else jnp.logical_and(needed, masked)
    pl.when(masked)(functools.partial(step, True))
    # A tile whose keys all lie in every query's reach is needed.
    pl.when(whole)(functools.partial(step, False))


# Forward --------------------------------------------------------------------------------------------------------------


class Forward(NamedTuple):
    """What the forward kernel reads and writes, in this order; shapes of one step.

    Inputs: scalars; q [1, block_q, H d]; k, v [1, block_k, N d]; info int32 [1, block_q, 2], positions and segments;
    keys int32 [1, 8, block_k]; operands. Outputs: out [1, block_q, H d]; lse float32 [1, block_q, H]. Scratch, float32:
    slabs [slabs, tile_rows, 128], logits and then probabilities; query; top, total, decay [tile_rows, 128]; acc
    [H, block_q, d].
    """

    scalars: Scalars
    q: Any
    k: Any
    v: Any
    info: Any
    keys: Any
    operands: tpu_rows.Operands
    out: Any
    lse: Any
    slabs: Any
    query: _Query
    top: Any
    total: Any
    decay: Any
    acc: Any


def forward(plan: Plan, r: Forward) -> None:
    """Grid (batch row, query block, key block); the online softmax runs along the last axis."""
    b, i, j = (pl.program_id(axis) for axis in range(3))

    @pl.when(j == 0)
    def _():
        _fill_query(plan, r.query, r.info)
        r.top[...] = jnp.full(r.top.shape, LOWEST, jnp.float32)
        r.total[...] = jnp.zeros(r.total.shape, jnp.float32)
        r.acc[...] = jnp.zeros(r.acc.shape, jnp.float32)

    def step(masked: bool) -> None:
        _logit_tile(plan, r.slabs, r.q, r.k, plan.spec.scale)
        operands = jax.tree.map(lambda ref: ref[...], r.operands)

        def group(g: jax.Array) -> None:
            at = _rows_at(plan, g)
            geometry, mask = _geometry(plan, g, r.query, r.keys, masked)
            a = tpu_rows.logits(plan.rows, operands, _load(plan, r.slabs, g), geometry)
            a = a if mask is None else jnp.where(mask, a, LOWEST)
            top = r.top[at, :]
            new_top = jnp.maximum(top, jnp.broadcast_to(a.max(axis=1, keepdims=True), top.shape))
            p = jnp.exp(a - lanes(new_top, plan.block_k))
            p = p if mask is None else jnp.where(mask, p, 0.0)
            decay = jnp.exp(top - new_top)
            total = r.total[at, :] * decay
            r.total[at, :] = total + jnp.broadcast_to(p.sum(axis=1, keepdims=True), total.shape)
            r.top[at, :] = new_top
            r.decay[at, :] = decay
            _store(plan, r.slabs, g, p)

        _groups(plan, group)
        for h in range(plan.heads):
            p = _input(plan, _gather(plan, r.slabs, h))
            values = _product(plan, p, r.v[0, :, plan.kv_head(h)], (1, 0))
            r.acc[h] = r.acc[h] * lanes(_strided(plan, r.decay, h)[...], plan.head_dim) + values

    _when_needed(plan, r.scalars, b, i, j, step)

    @pl.when(j == plan.k_blocks - 1)
    def _():
        lane = jax.lax.broadcasted_iota(jnp.int32, (plan.block_q, LANES), 1)
        lse = jnp.zeros((plan.block_q, LANES), jnp.float32)
        for h in range(plan.heads):
            total = _strided(plan, r.total, h)[...]
            empty = total == 0.0
            total = jnp.where(empty, 1.0, total)
            r.out[0, :, plan.head(h)] = (r.acc[h] / lanes(total, plan.head_dim)).astype(r.out.dtype)
            of_head = jnp.where(empty, jnp.inf, _strided(plan, r.top, h)[...] + jnp.log(total))
            lse = jnp.where(lane == h, of_head, lse)
        r.lse[0] = lse[:, : plan.heads]


# Backward -------------------------------------------------------------------------------------------------------------


class Backward(NamedTuple):
    """What the backward kernel reads and writes, in this order; shapes of one step where not as in ``Forward``.

    Inputs: d_out as q; lse, delta float32 [1, block_q, H], delta the sum of d_out x out over a head; d_q_zeros, whose
    memory d_q takes. Outputs: d_q float32 [B, Tq, H d], whole, in HBM; d_k, d_v as k; d_operands, summed over the
    grid. Scratch: slabs and d_slabs; lse_rows, delta_rows float32 [tile_rows, 128]; d_q_tile [block_q, H d]; d_k_acc,
    d_v_acc [N, block_k, d]; a DMA semaphore.
    """

    scalars: Scalars
    q: Any
    k: Any
    v: Any
    info: Any
    keys: Any
    operands: tpu_rows.Operands
    d_out: Any
    lse: Any
    delta: Any
    d_q_zeros: Any
    d_q: Any
    d_k: Any
    d_v: Any
    d_operands: Any
    slabs: Any
    d_slabs: Any
    query: _Query
    lse_rows: Any
    delta_rows: Any
    d_q_tile: Any
    d_k_acc: Any
    d_v_acc: Any
    semaphore: Any


def backward(plan: Plan, r: Backward) -> None:
    """Grid (batch row, key block, query block): the keys' gradients stay in VMEM along the last axis, the queries' are
    added up in HBM, a block at a time."""
    b, j, i = (pl.program_id(axis) for axis in range(3))

    @pl.when((b == 0) & (j == 0) & (i == 0))
    def _():
        for ref in jax.tree.leaves(r.d_operands):
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    @pl.when(i == 0)
    def _():
        r.d_k_acc[...] = jnp.zeros(r.d_k_acc.shape, jnp.float32)
        r.d_v_acc[...] = jnp.zeros(r.d_v_acc.shape, jnp.float32)

    def step(masked: bool) -> None:
        in_hbm = r.d_q.at[b, pl.ds(pl.multiple_of(i * plan.block_q, 8), plan.block_q), :]
        fetch = pltpu.make_async_copy(in_hbm, r.d_q_tile, r.semaphore)
        fetch.start()
        _fill_query(plan, r.query, r.info)
        _expand(plan, r.lse_rows, lambda h: r.lse[0, :, h : h + 1])
        _expand(plan, r.delta_rows, lambda h: r.delta[0, :, h : h + 1])
        _logit_tile(plan, r.slabs, r.q, r.k, plan.spec.scale)
        _logit_tile(plan, r.d_slabs, r.d_out, r.v, 1.0)
        operands = jax.tree.map(lambda ref: ref[...], r.operands)

        def group(g: jax.Array) -> None:
            at = _rows_at(plan, g)
            geometry, mask = _geometry(plan, g, r.query, r.keys, masked)

            def logits(s: jax.Array, bias: Any, adapt: Any) -> jax.Array:
                return tpu_rows.logits(plan.rows, operands._replace(bias=bias, adapt=adapt), s, geometry)

            a, vjp = jax.vjp(logits, _load(plan, r.slabs, g), operands.bias, operands.adapt)
            p = jnp.exp(a - lanes(r.lse_rows[at, :], plan.block_k))
            # Entries that are not allowed may overflow the exponential; they are replaced, not scaled.
            p = p if mask is None else jnp.where(mask, p, 0.0)
            d_a = p * (_load(plan, r.d_slabs, g) - lanes(r.delta_rows[at, :], plan.block_k))
            d_s, *d_operands = vjp(d_a)
            for ref, x in zip(jax.tree.leaves(r.d_operands), jax.tree.leaves(d_operands), strict=True):
                ref[...] += x
            _store(plan, r.slabs, g, p)
            _store(plan, r.d_slabs, g, d_s)

        _groups(plan, group)
        fetch.wait()
        for h in range(plan.heads):
            head, kv_head, n = plan.head(h), plan.kv_head(h), h // (plan.heads // plan.kv_heads)
            p, d_s = (_input(plan, _gather(plan, slabs, h)) for slabs in (r.slabs, r.d_slabs))
            r.d_v_acc[n] += _product(plan, p, r.d_out[0, :, head], (0, 0))
            r.d_k_acc[n] += _product(plan, d_s, r.q[0, :, head], (0, 0))
            r.d_q_tile[:, head] += plan.spec.scale * _product(plan, d_s, r.k[0, :, kv_head], (1, 0))
        pltpu.sync_copy(r.d_q_tile, in_hbm)

    _when_needed(plan, r.scalars, b, i, j, step)

    @pl.when(i == plan.q_blocks - 1)
    def _():
        for n in range(plan.kv_heads):
            r.d_k[0, :, plan.head(n)] = (plan.spec.scale * r.d_k_acc[n]).astype(r.d_k.dtype)
            r.d_v[0, :, plan.head(n)] = r.d_v_acc[n].astype(r.d_v.dtype)
