"""The backward kernel of the TPU backend."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dape_jax.attention import tpu_rows, tpu_tiles
from dape_jax.attention.tpu_plan import Plan, Scalars
from dape_jax.attention.tpu_rows import LANES, lanes


class Backward(NamedTuple):
    """What the kernel reads and writes, in this order; shapes of one step where not as in ``Forward``.

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
    query: tpu_tiles.Query
    lse_rows: Any
    delta_rows: Any
    d_q_tile: Any
    d_k_acc: Any
    d_v_acc: Any
    semaphore: Any


def scratch(plan: Plan) -> tuple:
    """From ``slabs`` on."""
    rows = (plan.tile_rows, LANES)
    slabs, column = pltpu.VMEM((plan.slabs, *rows), jnp.float32), pltpu.VMEM(rows, jnp.float32)
    of_keys = pltpu.VMEM((plan.kv_heads, plan.block_k, plan.head_dim), jnp.float32)
    return (
        slabs,
        slabs,
        tpu_tiles.query_scratch(plan),
        column,
        column,
        pltpu.VMEM((plan.block_q, plan.heads * plan.head_dim), jnp.float32),
        of_keys,
        of_keys,
        pltpu.SemaphoreType.DMA,
    )


def kernel(plan: Plan, r: Backward) -> None:
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
        tpu_tiles.fill_query(plan, r.query, r.info)
        tpu_tiles.expand(plan, r.lse_rows, lambda h: r.lse[0, :, h : h + 1])
        tpu_tiles.expand(plan, r.delta_rows, lambda h: r.delta[0, :, h : h + 1])
        tpu_tiles.logit_tile(plan, r.slabs, r.q, r.k, plan.spec.scale)
        tpu_tiles.logit_tile(plan, r.d_slabs, r.d_out, r.v, 1.0)
        operands = jax.tree.map(lambda ref: ref[...], r.operands)

        def group(g: jax.Array) -> None:
            at = tpu_tiles.rows_at(plan, g)
            geometry = tpu_tiles.geometry(plan, g, r.query, r.keys)
            mask = tpu_tiles.mask(plan, g, r.query, r.keys) if masked else None

            def logits(s: jax.Array, bias: Any, adapt: Any) -> jax.Array:
                return tpu_rows.logits(plan.rows, operands._replace(bias=bias, adapt=adapt), s, geometry)

            a, vjp = jax.vjp(logits, tpu_tiles.join(tpu_tiles.load(plan, r.slabs, g)), operands.bias, operands.adapt)
            p = jnp.exp(a - lanes(r.lse_rows[at, :], plan.block_k))
            # Entries that are not allowed may overflow the exponential; they are replaced, not scaled.
            p = p if mask is None else jnp.where(mask, p, 0.0)
            d_a = p * (tpu_tiles.join(tpu_tiles.load(plan, r.d_slabs, g)) - lanes(r.delta_rows[at, :], plan.block_k))
            d_s, *d_operands = vjp(d_a)
            for ref, x in zip(jax.tree.leaves(r.d_operands), jax.tree.leaves(d_operands), strict=True):
                ref[...] += x
            tpu_tiles.store(plan, r.slabs, g, tpu_tiles.split(p))
            tpu_tiles.store(plan, r.d_slabs, g, tpu_tiles.split(d_s))

        jax.lax.fori_loop(0, plan.block_q // plan.group, lambda g, _: group(g), None)
        fetch.wait()
        for h in range(plan.heads):
            head, kv_head, n = plan.head(h), plan.kv_head(h), h // (plan.heads // plan.kv_heads)
            p, d_s = (tpu_tiles.rounded(plan, tpu_tiles.gather(plan, slabs, h)) for slabs in (r.slabs, r.d_slabs))
            r.d_v_acc[n] += tpu_tiles.product(plan, p, r.d_out[0, :, head], (0, 0))
            r.d_k_acc[n] += tpu_tiles.product(plan, d_s, r.q[0, :, head], (0, 0))
            r.d_q_tile[:, head] += plan.spec.scale * tpu_tiles.product(plan, d_s, r.k[0, :, kv_head], (1, 0))
        pltpu.sync_copy(r.d_q_tile, in_hbm)

    tpu_tiles.when_needed(plan, r.scalars, b, i, j, step)

    @pl.when(i == plan.q_blocks - 1)
    def _():
        for n in range(plan.kv_heads):
            r.d_k[0, :, plan.head(n)] = (plan.spec.scale * r.d_k_acc[n]).astype(r.d_k.dtype)
            r.d_v[0, :, plan.head(n)] = r.d_v_acc[n].astype(r.d_v.dtype)
