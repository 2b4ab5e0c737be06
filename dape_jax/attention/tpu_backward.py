"""The backward kernel of the TPU backend."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dape_jax import adapt as adapt_lib
from dape_jax.attention import tpu_rows, tpu_tables, tpu_tiles
from dape_jax.attention.tpu_plan import Plan, Scalars
from dape_jax.attention.tpu_rows import LANES, lanes


class Backward(NamedTuple):
    """What the kernel reads and writes, in this order; shapes of one step where not as in ``Forward``.

    Inputs: d_out as q; lse, delta float32 [1, block_q, H], delta the sum of d_out x out over a head; transposed, W1 for
    S and W2 of the tables; zeros, whose memory d_q and d_strip take. Outputs: d_q float32 [B, Tq, H d], whole, in HBM;
    d_strip likewise, of the tables; d_k, d_v as k; d_operands and d_tables, summed over the grid. Scratch: slabs and
    d_slabs; lse_rows, delta_rows float32 [tile_rows, 128]; strip and strip_gradient; saved, twice what the stages of
    one step of the loop hand on; d_q_tile [block_q, H d]; d_k_acc, d_v_acc [N, block_k, d]; a DMA semaphore.
    """

    scalars: Scalars
    q: Any
    k: Any
    v: Any
    info: Any
    keys: Any
    operands: tpu_rows.Operands
    tables: tpu_tables.Tables
    transposed: Any
    d_out: Any
    lse: Any
    delta: Any
    zeros: Any
    d_q: Any
    d_strip: Any
    d_k: Any
    d_v: Any
    d_operands: Any
    d_tables: tpu_tables.Tables
    slabs: Any
    d_slabs: Any
    query: tpu_tiles.Query
    lse_rows: Any
    delta_rows: Any
    strip: tpu_tables.Strip
    strip_gradient: tpu_tables.StripGradient
    saved: Any
    d_q_tile: Any
    d_k_acc: Any
    d_v_acc: Any
    semaphore: Any


class Saved(NamedTuple):
    """What the first of a step's stages leaves for the others, [groups, slabs, ...].

    Attributes:
      inputs: S, its low part below the high one unless float32, [.., R or 2 R, 128].
      hidden: float32 [.., G D, 128].
      active: what W2 is applied to, [.., G D, 128].
    """

    inputs: Any
    hidden: Any
    active: Any


def _saved_scratch(plan: Plan) -> tuple[Saved, ...]:
    if not (plan.tabled and tpu_tables.reads_logits(plan.spec)):
        return ()
    dtype = jnp.float32 if plan.exact else jnp.bfloat16

    def of(rows: int, dtype: Any) -> Any:
        return pltpu.VMEM((plan.together, plan.slabs, rows, LANES), dtype)

    return (Saved(of(plan.high_and_low, dtype), of(plan.hidden_rows, jnp.float32), of(plan.hidden_rows, dtype)),) * 2


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
        tpu_tables.scratch(plan),
        tpu_tables.gradient_scratch(plan),
        _saved_scratch(plan),
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
        for ref in jax.tree.leaves((r.d_operands, r.d_tables)):
            ref[...] = jnp.zeros(ref.shape, ref.dtype)

    @pl.when(i == 0)
    def _():
        r.d_k_acc[...] = jnp.zeros(r.d_k_acc.shape, jnp.float32)
        r.d_v_acc[...] = jnp.zeros(r.d_v_acc.shape, jnp.float32)

    def step(masked: bool) -> None:
        in_hbm = r.d_q.at[b, pl.ds(pl.multiple_of(i * plan.block_q, 8), plan.block_q), :]
        fetch = pltpu.make_async_copy(in_hbm, r.d_q_tile, r.semaphore)
        fetch.start()
        if masked or not plan.tabled:
            tpu_tiles.fill_query(plan, r.query, r.info)
        tpu_tiles.expand(plan, r.lse_rows, lambda h: r.lse[0, :, h : h + 1])
        tpu_tiles.expand(plan, r.delta_rows, lambda h: r.delta[0, :, h : h + 1])
        strip = begin = so_far = None
        if r.strip.fetched is not None:
            strip, begin = tpu_tables.fetch(plan, r.tables, r.strip, i, j)
        tpu_tiles.logit_tile(plan, r.slabs, r.q, r.k, plan.spec.scale)
        tpu_tiles.logit_tile(plan, r.d_slabs, r.d_out, r.v, 1.0)
        if strip is not None:
            strip.wait()
            tpu_tables.expand(plan, r.strip, begin)
            so_far = tpu_tables.fetch_gradient(plan, r.d_strip, r.strip_gradient, i, j)
            tpu_tables.clear(r.strip_gradient)
        stages = _tabled(plan, r, masked) if plan.tabled else [_general(plan, r, masked)]
        tpu_tiles.pipelined(plan.block_q // (plan.group * plan.together), stages)
        if so_far is not None:
            so_far.wait()
            tpu_tables.write_gradient(plan, r.d_strip, r.strip_gradient, i, j, begin)
        fetch.wait()
        for h in range(plan.heads):
            head, kv_head, n = plan.head(h), plan.kv_head(h), h // (plan.heads // plan.kv_heads)
            p, d_s = (tpu_tiles.rounded(plan, tpu_tiles.gather(plan, slabs, h)) for slabs in (r.slabs, r.d_slabs))
            r.d_v_acc[n] += tpu_tiles.product(plan, p, r.d_out[0, :, head], (0, 0))
            r.d_k_acc[n] += tpu_tiles.product(plan, d_s, r.q[0, :, head], (0, 0))
            r.d_q_tile[:, head] += plan.spec.scale * tpu_tiles.product(plan, d_s, r.k[0, :, kv_head], (1, 0))
        # Not by sync_copy, which asks for the TPU's generation: there is none where one compiles ahead of time.
        write = pltpu.make_async_copy(r.d_q_tile, in_hbm, r.semaphore)
        write.start()
        write.wait()

    tpu_tiles.when_needed(plan, r.scalars, b, i, j, step)

    @pl.when(i == plan.q_blocks - 1)
    def _():
        for n in range(plan.kv_heads):
            r.d_k[0, :, plan.head(n)] = (plan.spec.scale * r.d_k_acc[n]).astype(r.d_k.dtype)
            r.d_v[0, :, plan.head(n)] = r.d_v_acc[n].astype(r.d_v.dtype)


# The stages of a tile: from S and dP in r.slabs and r.d_slabs to P and dS there ---------------------------------------


def _general(plan: Plan, r: Backward, masked: bool) -> tpu_tiles.Stage:
    operands = jax.tree.map(lambda ref: ref[...], r.operands)

    def gradients(step: Any, _: int) -> None:
        for g in tpu_tiles.groups(plan, step):
            at = tpu_tiles.rows_at(plan, g)
            geometry = tpu_tiles.geometry(plan, g, r.query, r.keys)
            mask = tpu_tiles.mask(plan, g, r.query, r.keys) if masked else None

            def logits(s: jax.Array, bias: Any, adapt: Any, geometry: Any = geometry) -> jax.Array:
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

    return gradients


def _tabled(plan: Plan, r: Backward, masked: bool) -> list[tpu_tiles.Stage]:
    """As the forward's, and then back through the network.

    With e = W2^T dA: dh = e phi'(h), du = e (phi'(h) - phi'(u)), dS = dA + W1_S^T dh, and A(0, .) receives dA.
    """
    tables = jax.tree.map(lambda ref: ref[...], r.tables._replace(strip=None))
    at_once = range(0, plan.slabs, plan.joined)

    def hidden(step: Any, parity: int) -> None:
        saved = r.saved[parity]
        for n, g in enumerate(tpu_tiles.groups(plan, step)):
            s = tpu_tiles.load(plan, r.slabs, g)
            for slab in at_once:
                x, hiddens = tpu_tables.hidden(plan, tables, r.strip, s[slab : slab + plan.joined], g, slab)
                for m, (x_m, h) in enumerate(zip(tpu_tiles.split(x), hiddens, strict=True)):
                    saved.inputs[n, slab + m] = x_m[: plan.high_and_low]
                    saved.hidden[n, slab + m] = h
                    active = tpu_tables.active(plan, r.strip, h, g, slab + m)
                    saved.active[n, slab + m] = active.astype(saved.active.dtype)

    def probabilities(step: Any, parity: int) -> None:
        for n, g in enumerate(tpu_tiles.groups(plan, step)):
            at = tpu_tiles.rows_at(plan, g)
            lse, delta = r.lse_rows[at, :], r.delta_rows[at, :]
            a = tpu_tiles.load(plan, r.slabs, g)
            if r.strip.logits is not None:
                a = [x + tpu_tables.logits_at_zero(plan, r.strip, g, slab) for slab, x in enumerate(a)]
            if r.saved:
                added = tpu_tables.corrections(plan, tables, r.saved[parity].active.at[n])
                a = [x + y for x, y in zip(a, added, strict=True)]
            p = [jnp.exp(x - lse) for x in a]
            if masked:  # entries that are not allowed may overflow the exponential; they are replaced, not scaled
                allowed = tpu_tiles.split(tpu_tiles.mask(plan, g, r.query, r.keys))
                p = [jnp.where(m, x, 0.0) for m, x in zip(allowed, p, strict=True)]
            d_p = tpu_tiles.load(plan, r.d_slabs, g)
            d_a = [x * (y - delta) for x, y in zip(p, d_p, strict=True)]
            tpu_tiles.store(plan, r.slabs, g, p)
            tpu_tiles.store(plan, r.d_slabs, g, d_a)
            if r.strip_gradient.logits is not None:
                for slab, x in enumerate(d_a):
                    tpu_tables.add_logits(plan, r.strip_gradient, x, g, slab)

    def together(ref: Any, n: int, slab: int) -> jax.Array:
        return tpu_tiles.join([ref[n, slab + m] for m in range(plan.joined)])

    def gradients(step: Any, parity: int) -> None:
        saved, (w1_t, w2_t) = r.saved[parity], (ref[...] for ref in r.transposed)
        d_w1, d_w2 = jnp.zeros(r.d_tables.w1.shape, jnp.float32), jnp.zeros(r.d_tables.w2.shape, jnp.float32)
        for n, g in enumerate(tpu_tiles.groups(plan, step)):
            d_a, d_s = tpu_tiles.load(plan, r.d_slabs, g), []
            for slab in at_once:
                d_y = tpu_tiles.rounded(plan, tpu_tiles.join(d_a[slab : slab + plan.joined]))
                e = tpu_tiles.product(plan, w2_t, d_y, (1, 0))
                d_hidden = []
                for m, e_m in enumerate(tpu_tiles.split(e)):
                    slope = _slope(saved.hidden[n, slab + m])
                    d_hidden.append(e_m * slope)
                    if r.strip.hidden is None:
                        r.d_tables.hidden[...] += d_hidden[-1]
                    else:
                        of_u = _slope(tpu_tables.of_group(plan, r.strip.hidden, g, slab + m))
                        tpu_tables.add_hidden(plan, r.strip_gradient, e_m * (slope - of_u), g, slab + m)
                d_h = tpu_tiles.rounded(plan, tpu_tiles.join(d_hidden))
                d_w1 = d_w1 + tpu_tiles.product(plan, d_h, together(saved.inputs, n, slab), (1, 1))
                d_w2 = d_w2 + tpu_tiles.product(plan, d_y, together(saved.active, n, slab), (1, 1))
                d_s += tpu_tiles.split(tpu_tiles.product(plan, w1_t, d_h, (1, 0)))
            tpu_tiles.store(plan, r.d_slabs, g, [x + y for x, y in zip(d_a, d_s, strict=True)])
        r.d_tables.w1[...] += d_w1
        r.d_tables.w2[...] += d_w2

    return [hidden, probabilities, gradients] if r.saved else [probabilities]


def _slope(hidden: jax.Array) -> jax.Array:
    return jnp.where(hidden >= 0.0, 1.0, adapt_lib.SLOPE)
