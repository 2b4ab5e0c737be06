"""What the forward and the backward kernel of the TPU backend share: a tile of one query block and one key block.

A grid step holds all heads, since the DAPE network mixes them. Each head's logits go with a strided store into a
scratch whose rows are ordered (query, head), in slabs of 128 keys; groups of queries then pass through bias, network
and softmax in that layout, and a strided load gives each head its probabilities back for the product with the values.

Columns of numbers a row (maxima, sums, positions) are [rows, 128] with the same number in every lane.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dape_jax.attention import tpu_rows
from dape_jax.attention.tpu_plan import Plan, Scalars, row_index
from dape_jax.attention.tpu_rows import LANES, Geometry, lanes

# Rows of `keys` (int32 [8, block_k] of a key block).
POSITION, SEGMENT, ALLOWED, OWN = range(4)

# Rows (query, head) ---------------------------------------------------------------------------------------------------


def strided(plan: Plan, ref: Any, h: int) -> Any:
    """Where head h of every query stands in a ref of rows (query, head)."""
    return ref.at[pl.ds(h, plan.block_q, stride=plan.heads), :]


def gather(plan: Plan, slabs: Any, h: int) -> jax.Array:
    """Head h of a tile, [block_q, block_k]."""
    return jnp.concatenate([strided(plan, slabs.at[n], h)[...] for n in range(plan.slabs)], axis=1)


def expand(plan: Plan, ref: Any, column: Callable[[int], jax.Array]) -> None:
    """Fills a ref of rows (query, head) from one [block_q, 1] column for each head."""
    for h in range(plan.heads):
        strided(plan, ref, h)[...] = jnp.broadcast_to(column(h), (plan.block_q, LANES))


def rows_at(plan: Plan, g: Any) -> Any:
    """The rows of group g."""
    return pl.ds(pl.multiple_of(g * plan.rows.count, 8), plan.rows.count)


def load(plan: Plan, slabs: Any, g: Any) -> list[jax.Array]:
    """Group g, [R, 128] for each slab."""
    return [slabs.at[n][rows_at(plan, g), :] for n in range(plan.slabs)]


def store(plan: Plan, slabs: Any, g: Any, each: list[jax.Array]) -> None:
    for n, x in enumerate(each):
        slabs.at[n][rows_at(plan, g), :] = x


def join(each: list[jax.Array]) -> jax.Array:
    return jnp.concatenate(each, axis=1)


def split(x: jax.Array) -> list[jax.Array]:
    return [x[:, n : n + LANES] for n in range(0, x.shape[1], LANES)]


# Products -------------------------------------------------------------------------------------------------------------


def product(plan: Plan, a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    return tpu_rows.product(a, b, contract, plan.exact)


def rounded(plan: Plan, x: jax.Array) -> jax.Array:
    """As an input of a product."""
    return x if plan.exact else x.astype(jnp.bfloat16)


def logit_tile(plan: Plan, slabs: Any, q: Any, k: Any, scale: float) -> None:
    """scale q k^T of every head into rows (query, head)."""
    for h in range(plan.heads):
        x = scale * product(plan, q[0, :, plan.head(h)], k[0, :, plan.kv_head(h)], (1, 1))
        for n, slab in enumerate(split(x)):
            strided(plan, slabs.at[n], h)[...] = slab


# Positions and masks --------------------------------------------------------------------------------------------------


class Query(NamedTuple):
    """Scratch with rows (query, head), int32 [tile_rows, 128]; None where it is not needed."""

    positions: Any
    segments: Any


def query_scratch(plan: Plan) -> Query:
    column = pltpu.VMEM((plan.tile_rows, LANES), jnp.int32)
    return Query(column if plan.needs_positions else None, column if plan.segments else None)


def fill_query(plan: Plan, scratch: Query, info: Any) -> None:
    for column, ref in enumerate(scratch):
        if ref is not None:
            expand(plan, ref, lambda _, c=column: info[0, :, c : c + 1])


def geometry(plan: Plan, g: Any, query: Query, keys: Any) -> Geometry:
    """Of group g, as ``tpu_rows.logits`` takes it."""
    q_positions, q_each = None, ()
    if query.positions is not None:
        q_positions = query.positions[rows_at(plan, g), :]
        if isinstance(plan.spec.bias, tpu_rows.FEATURES):
            each = [g * plan.rows.count + i * plan.heads for i in range(plan.group)]
            q_each = tuple(query.positions[pl.ds(row, 1), :] for row in each)
    k_positions = keys[0, POSITION : POSITION + 1, :]
    if not plan.halo:
        return Geometry(q_positions, q_each, k_positions, None, None)
    is_key = keys[0, ALLOWED : ALLOWED + 1, :] != 0
    return Geometry(q_positions, q_each, k_positions, mask(plan, g, query, keys, ALLOWED), is_key)


def mask(plan: Plan, g: Any, query: Query, keys: Any, padding: int = OWN) -> jax.Array:
    """Which keys the rows of group g may attend to, bool [R, block_k]; ``padding`` names the row of ``keys`` that says
    which keys count: with OWN not those of the halo."""
    shape = (plan.rows.count, plan.block_k)

    def key_row(name: int) -> jax.Array:
        return jnp.broadcast_to(keys[0, name : name + 1, :], shape)

    allowed = jnp.ones(shape, jnp.bool_)
    if plan.spec.causal:
        allowed = key_row(POSITION) <= lanes(query.positions[rows_at(plan, g), :], plan.block_k)
    if plan.segments:
        allowed = allowed & (key_row(SEGMENT) == lanes(query.segments[rows_at(plan, g), :], plan.block_k))
    return allowed & (key_row(padding) != 0) if plan.padding else allowed


# Which tiles ----------------------------------------------------------------------------------------------------------


def when_needed(plan: Plan, scalars: Scalars, b: Any, i: Any, j: Any, step: Callable[[bool], None]) -> None:
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


# The stages of a tile, each of a step's groups ------------------------------------------------------------------------

Stage = Callable[[Any, int], None]
"""Takes the number of a step and its parity, which is known where the number is traced."""


def pipelined(steps: int, stages: Sequence[Stage]) -> None:
    """Runs all stages of all steps; at any time stage k works on step ``time - k``.

    What runs at one time does not depend on each other, so that the compiler can fill the waits of one stage, for the
    matrix unit above all, with the work of another: it does not move work across the iterations of a loop.
    """

    def at(time: Any, parity: int, active: Callable[[int], bool] = lambda _: True) -> None:
        for k, stage in reversed(list(enumerate(stages))):
            if active(k):
                stage(time - k, (parity - k) % 2)

    def whole(time: int) -> None:
        at(time, time, lambda k: 0 <= time - k < steps)

    first = len(stages) - 1  # from here on, until the last step, all stages have work
    pairs = max(steps - first, 0) // 2
    for time in range(first):
        whole(time)

    def pair(m: Any, _: None) -> None:
        at(first + 2 * m, first)
        at(first + 2 * m + 1, first + 1)

    jax.lax.fori_loop(0, pairs, pair, None)
    for time in range(first + 2 * pairs, steps + first):
        whole(time)


def groups(plan: Plan, step: Any) -> list[Any]:
    return [step * plan.together + n for n in range(plan.together)]
