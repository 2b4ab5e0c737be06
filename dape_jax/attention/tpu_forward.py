"""The forward kernel of the TPU backend."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dape_jax.attention import tpu_rows, tpu_tables, tpu_tiles
from dape_jax.attention.tpu_plan import Plan, Scalars
from dape_jax.attention.tpu_rows import LANES, lanes

LOWEST = float(jnp.finfo(jnp.float32).min)


class Forward(NamedTuple):
    """What the kernel reads and writes, in this order; shapes of one step.

    Inputs: scalars; q [1, block_q, H d]; k, v [1, block_k, N d]; info int32 [1, block_q, 2], positions and segments;
    keys int32 [1, 8, block_k]; operands or tables, the other empty. Outputs: out [1, block_q, H d]; lse float32
    [1, block_q, H]. Scratch, float32: slabs [slabs, tile_rows, 128], logits and then probabilities; query; strip;
    active, twice the hidden layer of the groups of one step of the loop; top, total, decay [tile_rows, 128]; acc
    [H, block_q, d].
    """

    scalars: Scalars
    q: Any
    k: Any
    v: Any
    info: Any
    keys: Any
    operands: tpu_rows.Operands
    tables: tpu_tables.Tables
    out: Any
    lse: Any
    slabs: Any
    query: tpu_tiles.Query
    strip: tpu_tables.Strip
    active: Any
    top: Any
    total: Any
    decay: Any
    acc: Any


def scratch(plan: Plan) -> tuple:
    """From ``slabs`` on."""
    rows = (plan.tile_rows, LANES)
    column = pltpu.VMEM(rows, jnp.float32)
    active = ()
    if plan.tabled and tpu_tables.reads_logits(plan.spec):
        shape = (plan.together, plan.slabs, plan.hidden_rows, LANES)
        active = (pltpu.VMEM(shape, jnp.float32 if plan.exact else jnp.bfloat16),) * 2
    return (
        pltpu.VMEM((plan.slabs, *rows), jnp.float32),
        tpu_tiles.query_scratch(plan),
        tpu_tables.scratch(plan),
        active,
        column,
        column,
        column,
        pltpu.VMEM((plan.heads, plan.block_q, plan.head_dim), jnp.float32),
    )


def kernel(plan: Plan, r: Forward) -> None:
    """Grid (batch row, query block, key block); the online softmax runs along the last axis."""
    b, i, j = (pl.program_id(axis) for axis in range(3))

    @pl.when(j == 0)
    def _():
        tpu_tiles.fill_query(plan, r.query, r.info)
        r.top[...] = jnp.full(r.top.shape, LOWEST, jnp.float32)
        r.total[...] = jnp.zeros(r.total.shape, jnp.float32)
        r.acc[...] = jnp.zeros(r.acc.shape, jnp.float32)

    def tile(masked: bool) -> None:
        if r.strip.fetched is None:
            tpu_tiles.logit_tile(plan, r.slabs, r.q, r.k, plan.spec.scale)
        else:
            copy, begin = tpu_tables.fetch(plan, r.tables, r.strip, i, j)
            tpu_tiles.logit_tile(plan, r.slabs, r.q, r.k, plan.spec.scale)
            copy.wait()
            tpu_tables.expand(plan, r.strip, begin)
        stages = [*(_tabled(plan, r) if plan.tabled else [_general(plan, r)]), _softmax(plan, r, masked)]
        tpu_tiles.pipelined(plan.block_q // (plan.group * plan.together), stages)
        for h in range(plan.heads):
            p = tpu_tiles.gather(plan, r.slabs, h)
            parts = [tpu_tiles.rounded(plan, p)]
            if plan.precise_values:
                parts.append(tpu_tiles.rounded(plan, p - parts[0].astype(jnp.float32)))
            v = r.v[0, :, plan.kv_head(h)]
            values = functools.reduce(jnp.add, [tpu_tiles.product(plan, x, v, (1, 0)) for x in parts])
            decay = tpu_tiles.strided(plan, r.decay, h)[...]
            r.acc[h] = r.acc[h] * lanes(decay, plan.head_dim) + values

    tpu_tiles.when_needed(plan, r.scalars, b, i, j, tile)

    @pl.when(j == plan.k_blocks - 1)
    def _():
        lane = jax.lax.broadcasted_iota(jnp.int32, (plan.block_q, LANES), 1)
        lse = jnp.zeros((plan.block_q, LANES), jnp.float32)
        for h in range(plan.heads):
            total = tpu_tiles.strided(plan, r.total, h)[...]
            empty = total == 0.0
            total = jnp.where(empty, 1.0, total)
            r.out[0, :, plan.head(h)] = (r.acc[h] / lanes(total, plan.head_dim)).astype(r.out.dtype)
            of_head = jnp.where(empty, jnp.inf, tpu_tiles.strided(plan, r.top, h)[...] + jnp.log(total))
            lse = jnp.where(lane == h, of_head, lse)
        r.lse[0] = lse[:, : plan.heads]


# The stages of a tile: from raw logits in r.slabs to probabilities there ----------------------------------------------


def _general(plan: Plan, r: Forward) -> tpu_tiles.Stage:
    operands = jax.tree.map(lambda ref: ref[...], r.operands)

    def logits(step: Any, _: int) -> None:
        for g in tpu_tiles.groups(plan, step):
            s = tpu_tiles.join(tpu_tiles.load(plan, r.slabs, g))
            a = tpu_rows.logits(plan.rows, operands, s, tpu_tiles.geometry(plan, g, r.query, r.keys))
            tpu_tiles.store(plan, r.slabs, g, tpu_tiles.split(a))

    return logits


def _tabled(plan: Plan, r: Forward) -> list[tpu_tiles.Stage]:
    tables = jax.tree.map(lambda ref: ref[...], r.tables._replace(strip=None))

    def hidden(step: Any, parity: int) -> None:
        for n, g in enumerate(tpu_tiles.groups(plan, step)):
            s = tpu_tiles.load(plan, r.slabs, g)
            for slab in range(0, plan.slabs, plan.joined):
                _, hiddens = tpu_tables.hidden(plan, tables, r.strip, s[slab : slab + plan.joined], g, slab)
                for m, h in enumerate(hiddens):
                    x = tpu_tables.active(plan, r.strip, h, g, slab + m)
                    r.active[parity][n, slab + m] = x.astype(r.active[parity].dtype)

    def logits(step: Any, parity: int) -> None:
        for n, g in enumerate(tpu_tiles.groups(plan, step)):
            a = tpu_tiles.load(plan, r.slabs, g)
            if r.strip.logits is not None:
                a = [x + tpu_tables.logits_at_zero(plan, r.strip, g, slab) for slab, x in enumerate(a)]
            if r.active:
                added = tpu_tables.corrections(plan, tables, r.active[parity].at[n])
                a = [x + y for x, y in zip(a, added, strict=True)]
            tpu_tiles.store(plan, r.slabs, g, a)

    return [*([hidden] if r.active else []), *([logits] if r.active or r.strip.logits is not None else [])]


def _softmax(plan: Plan, r: Forward, masked: bool) -> tpu_tiles.Stage:
    def probabilities(step: Any, _: int) -> None:
        for g in tpu_tiles.groups(plan, step):
            at = tpu_tiles.rows_at(plan, g)
            a = tpu_tiles.load(plan, r.slabs, g)
            allowed = tpu_tiles.split(tpu_tiles.mask(plan, g, r.query, r.keys)) if masked else []
            a = [jnp.where(m, x, LOWEST) for m, x in zip(allowed, a, strict=True)] if masked else a
            top = r.top[at, :]
            new_top = jnp.maximum(top, _column(functools.reduce(jnp.maximum, a).max(axis=1, keepdims=True)))
            p = [jnp.exp(x - new_top) for x in a]
            # A row that may attend to nothing so far keeps the lowest top, and exp(0) of what is masked.
            p = [jnp.where(m, x, 0.0) for m, x in zip(allowed, p, strict=True)] if masked else p
            decay = jnp.exp(top - new_top)
            r.total[at, :] = r.total[at, :] * decay + _column(functools.reduce(jnp.add, p).sum(axis=1, keepdims=True))
            r.top[at, :] = new_top
            r.decay[at, :] = decay
            tpu_tiles.store(plan, r.slabs, g, p)

    return probabilities


def _column(x: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x, (x.shape[0], LANES))
