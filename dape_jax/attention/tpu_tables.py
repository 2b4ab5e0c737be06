"""The logits where the bias is a function of distance and positions are consecutive, from tables.

With u(d) = W1_B B(d) + b1 the bias's share of the hidden layer at distance d, and A(0, d) the logit at S = 0,

    A(S, d) = S + A(0, d) + W2 [phi(W1_S S + u(d)) - phi(u(d))],      phi the LeakyReLU.

u and A(0, .) are tables over distance, made outside in float32, so only S passes the matrix unit. The bracket is no
larger than W1_S S: one bfloat16 pass over it is enough at any distance, where the hidden layer itself grows with the
distance and would lose what the softmax needs. S enters as a high and a low part, stacked, still one pass; where
gradients follow, by W1 in two parts too.

A row of a tile needs the table's entries of its own distances, and the next row those of the next distances. Along
lanes that would be a rotation for every row. So keys are dealt to a tile's slabs of 128 lanes in turn: key S l + n lies
at lane l of slab n. The entries of one query and slab are then those of the next query and the next slab, and a tile of
Q queries needs Q + S - 1 vectors, each rotated once a tile, instead of Q S. ``deal`` puts the keys in that order.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from dape_jax import adapt as adapt_lib
from dape_jax import biases
from dape_jax.attention import tpu_rows
from dape_jax.attention.arguments import Spec
from dape_jax.attention.tpu_plan import Plan
from dape_jax.attention.tpu_rows import LANES


class Tables(NamedTuple):
    """Operands of the kernel.

    Attributes:
      strip: float32 [S, D + H, entries / S], D and H padded to 8: u and A(0, .) at distance ``origin - (S m + n)`` in
        lane m of slab n; None without a bias.
      hidden: float32 [G D, 128], b1, where there is no bias; else None.
      w1: [G D, G H], for each of ``Plan.parts`` after ``narrowed``; w2: [G H, G D], block-diagonal; None without a
        network that reads S.
    """

    strip: Any
    hidden: Any
    w1: Any
    w2: Any


EMPTY = Tables(None, None, None, None)


def reads_logits(spec: Spec) -> bool:
    return spec.adapt is not None and spec.adapt.variant != "bias_only"


def make(plan: Plan, bias_params: biases.Params, adapt_params: adapt_lib.Params) -> Tables:
    """In float32. Differentiable in the parameters."""
    spec, rows = plan.spec, plan.rows
    params = {name: jnp.asarray(x, jnp.float32) for name, x in adapt_params.items() if name != "b2"}
    strip, hidden, w1, w2 = EMPTY
    if spec.bias is not None:
        distance = plan.origin - jnp.arange(plan.entries, dtype=jnp.int32)
        distance = jnp.maximum(distance, 0) if spec.causal else jnp.abs(distance)
        bias = biases.bias_table(spec.bias, bias_params, spec.num_heads, distance)[:, None]
        terms = adapt_lib.bias_terms(spec.adapt, params, bias)
        at_zero = adapt_lib.adapt_logits(spec.adapt, params, jnp.zeros_like(bias)[:, None], terms)
        parts = [at_zero] if terms.hidden is None or not reads_logits(spec) else [terms.hidden, at_zero]
        strip = jnp.concatenate([_whole_rows(x[:, 0, 0]) for x in parts])
        strip = jnp.moveaxis(strip.reshape(strip.shape[0], -1, plan.slabs), 2, 0)
    elif spec.adapt is not None:
        hidden = jnp.broadcast_to(jnp.tile(params["b1"], plan.group)[:, None], (plan.group * spec.adapt.width, LANES))
    if reads_logits(spec):
        w1 = params["w1"][0, : spec.num_heads]  # where it reads S + B, the same rows serve S
        w1 = tpu_rows.diagonal(rows, w1.T[:, None])
        w2 = tpu_rows.diagonal(rows, params["w2"][0].T[:, None])
    return Tables(strip, hidden, w1, w2)


def narrowed(plan: Plan, tables: Tables) -> Tables:
    """With weights as the matrix unit takes them."""
    if plan.exact or tables.w1 is None:
        return tables
    high = tables.w1.astype(jnp.bfloat16)
    low = (tables.w1 - high.astype(jnp.float32)).astype(jnp.bfloat16)
    w1 = jnp.concatenate([high, high, low][: plan.parts], axis=1)
    return tables._replace(w1=w1, w2=tables.w2.astype(jnp.bfloat16))


def _whole_rows(x: jax.Array) -> jax.Array:
    return jnp.pad(x, [(0, -x.shape[0] % 8), (0, 0)])


def deal(plan: Plan, x: jax.Array, axis: int = 1) -> jax.Array:
    """Deals the keys of each block to its slabs in turn."""
    return _swapped(plan, x, axis, (LANES, plan.slabs))


def gather(plan: Plan, x: jax.Array) -> jax.Array:
    """The inverse of ``deal``."""
    return _swapped(plan, x, 1, (plan.slabs, LANES))


def _swapped(plan: Plan, x: jax.Array, axis: int, each: tuple[int, int]) -> jax.Array:
    shape = x.shape
    x = x.reshape(*shape[:axis], plan.k_blocks, *each, *shape[axis + 1 :])
    return jnp.swapaxes(x, axis + 1, axis + 2).reshape(shape)


class Strip(NamedTuple):
    """Scratch, float32, None where not needed.

    ``fetched`` [S, rows, 384], part of ``Tables.strip``. Vector t belongs to the query and slab n with query + S - 1
    - n = t, so that those of a group follow one another: ``hidden`` [t, D, 128], u, and ``active``, phi(u). ``logits``
    [t + G - 1, G H, 128], A(0, .), holds a whole group, whose first query has vector t.
    """

    fetched: Any
    hidden: Any
    active: Any
    logits: Any
    semaphore: Any


def scratch(plan: Plan) -> Strip:
    if not plan.tabled or plan.spec.bias is None:
        return Strip(None, None, None, None, None)
    adapt = plan.spec.adapt
    width = adapt.width if adapt is not None and reads_logits(plan.spec) else 0
    hidden = pltpu.VMEM((plan.vectors, width, LANES), jnp.float32) if width else None
    return Strip(
        pltpu.VMEM((plan.slabs, width + tpu_rows.whole(plan.heads), 3 * LANES), jnp.float32),
        hidden,
        hidden,
        pltpu.VMEM((plan.vectors + plan.group - 1, plan.rows.count, LANES), jnp.float32),
        pltpu.SemaphoreType.DMA,
    )


def fetch(plan: Plan, tables: Any, strip: Strip, i: Any, j: Any) -> tuple[Any, Any]:
    """Starts to fetch the strip of a tile; returns the copy and the place in the strip where the tile begins."""
    start = plan.strip_start(i, j)
    copy = pltpu.make_async_copy(tables.strip.at[_window(plan, i, j)], strip.fetched, strip.semaphore)
    copy.start()
    return copy, jax.lax.rem(start, plan.block_k)


def _window(plan: Plan, i: Any, j: Any) -> Any:
    """Where the strip of a tile lies in the table."""
    first = jax.lax.div(plan.strip_start(i, j), plan.block_k)
    return slice(None), slice(None), pl.ds(pl.multiple_of(first * LANES, LANES), 3 * LANES)


def expand(plan: Plan, strip: Strip, begin: Any) -> None:
    """The vectors of a tile from what was fetched."""
    width = 0 if strip.hidden is None else strip.hidden.shape[1]

    def vector(t: Any, n: int, lane: Any, slab: Any) -> None:
        one, two = (strip.fetched[n, :, pl.ds(pl.multiple_of((slab + m) * LANES, LANES), LANES)] for m in range(2))
        here = jax.lax.broadcasted_iota(jnp.int32, one.shape, 1) >= lane
        x = pltpu.roll(jnp.where(here, one, two), jax.lax.rem(LANES - lane, LANES), axis=1)
        if width:
            strip.hidden[t] = x[:width]
            strip.active[t] = _leaky(x[:width])
        for query in range(plan.group):
            strip.logits[*_of_query(plan, t, query)] = x[width : width + plan.heads]

    _each_vector(plan, begin, vector)


def _each_vector(plan: Plan, begin: Any, vector: Callable[[Any, int, Any, Any], None]) -> None:
    """Calls ``vector`` for each of a tile: vector t, of phase n, begins at a lane of a slab of what was fetched."""
    lane = jax.lax.div(begin, plan.slabs)  # the tile begins at phase 0: block_q is a multiple of the slabs

    def vectors(m: Any, _: None) -> None:
        for n in range(plan.slabs):
            vector(plan.vectors - 1 - m * plan.slabs - n, n, lane + m, 0)

    whole = plan.block_q // plan.slabs
    jax.lax.fori_loop(0, whole, vectors, None, unroll=8)
    # The last few may begin at the next slab.
    next_slab = jax.lax.div(lane + whole, LANES)
    for n in range(plan.slabs - 1):
        vector(plan.slabs - 2 - n, n, lane + whole - next_slab * LANES, next_slab)


def _first(plan: Plan, g: Any, slab: int) -> Any:
    """The vector of a group's first query."""
    return g * plan.group + plan.slabs - 1 - slab


def _of_query(plan: Plan, t: Any, query: int) -> Any:
    """Where vector t stands in ``Strip.logits`` as that of a group's query of this number."""
    return t - query + plan.group - 1, slice(query * plan.heads, (query + 1) * plan.heads), slice(None)


def logits_at_zero(plan: Plan, strip: Strip, g: Any, slab: int) -> jax.Array:
    """A(0, .) of group g and a slab of keys, [R, 128]."""
    return strip.logits[_first(plan, g, slab) + plan.group - 1]


def hidden(
    plan: Plan, tables: Tables, strip: Strip, each: list[jax.Array], g: Any, slab: int
) -> tuple[jax.Array, list[jax.Array]]:
    """The hidden layer W1_S S + u of group g and a few slabs from ``slab`` on, [G D, 128] each, from S [R, 128].

    Before it, S as it enters the product, [R for each of ``Plan.parts``, 128 for each slab].
    """
    s = jnp.concatenate(each, axis=1)
    x = s
    if not plan.exact:
        high = s.astype(jnp.bfloat16).astype(jnp.float32)
        x = jnp.concatenate([high, s - high, high][: plan.parts]).astype(jnp.bfloat16)
    y = tpu_rows.product(tables.w1, x, (1, 0), plan.exact)
    if strip.hidden is None:
        u = [tables.hidden] * len(each)
    else:
        u = [of_group(plan, strip.hidden, g, slab + n) for n in range(len(each))]
    return x, [y[:, n * LANES : (n + 1) * LANES] + u_n for n, u_n in enumerate(u)]


def active(plan: Plan, strip: Strip, hidden: jax.Array, g: Any, slab: int) -> jax.Array:
    """What W2 is applied to, [G D, 128]: phi(hidden) - phi(u).

    Without a bias phi(hidden), since there is no A(0, .) that holds the rest.
    """
    x = _leaky(hidden)
    return x if strip.active is None else x - of_group(plan, strip.active, g, slab)


def corrections(plan: Plan, tables: Tables, active: Any) -> list[jax.Array]:
    """W2 times what it is applied to in a group, [slabs, G D, 128]: what the network adds to each slab, [R, 128]."""
    every = []
    for slab in range(0, plan.slabs, plan.joined):
        x = jnp.concatenate([active[slab + n] for n in range(plan.joined)], axis=1)
        y = tpu_rows.product(tables.w2, x, (1, 0), plan.exact)
        every += [y[:, n * LANES : (n + 1) * LANES] for n in range(plan.joined)]
    return every


def of_group(plan: Plan, vectors: Any, g: Any, slab: int) -> jax.Array:
    """The vectors of group g and a slab, one below the other."""
    return vectors[pl.ds(_first(plan, g, slab), plan.group)].reshape(-1, LANES)


def _leaky(x: jax.Array) -> jax.Array:
    return jnp.maximum(x, adapt_lib.SLOPE * x)


# The gradient of the strip --------------------------------------------------------------------------------------------


class StripGradient(NamedTuple):
    """Scratch of the backward, float32, as ``Strip``: what ``fetched`` holds is added to, and ``hidden`` and ``logits``
    gather the gradients of u and A(0, .) of a tile."""

    fetched: Any
    hidden: Any
    logits: Any
    semaphore: Any


def gradient_scratch(plan: Plan) -> StripGradient:
    of = scratch(plan)
    return StripGradient(of.fetched, of.hidden, of.logits, of.semaphore)


def clear(d_strip: StripGradient) -> None:
    for ref in (d_strip.hidden, d_strip.logits):
        if ref is not None:
            ref[...] = jnp.zeros(ref.shape, jnp.float32)


def add_hidden(plan: Plan, d_strip: StripGradient, d_u: jax.Array, g: Any, slab: int) -> None:
    """Adds the gradient of u, [G D, 128], of group g and a slab."""
    group = pl.ds(_first(plan, g, slab), plan.group)
    d_strip.hidden[group] += d_u.reshape(plan.group, -1, LANES)


def add_logits(plan: Plan, d_strip: StripGradient, d_a: jax.Array, g: Any, slab: int) -> None:
    """Adds the gradient of A(0, .), [R, 128], of group g and a slab."""
    d_strip.logits[_first(plan, g, slab) + plan.group - 1] += d_a


def fetch_gradient(plan: Plan, in_hbm: Any, d_strip: StripGradient, i: Any, j: Any) -> Any:
    """Starts to fetch what the strip of a tile has gathered so far; returns the copy."""
    copy = pltpu.make_async_copy(in_hbm.at[_window(plan, i, j)], d_strip.fetched, d_strip.semaphore)
    copy.start()
    return copy


def write_gradient(plan: Plan, in_hbm: Any, d_strip: StripGradient, i: Any, j: Any, begin: Any) -> None:
    """Adds a tile's gradients to what was fetched, the transpose of ``expand``, and writes it back."""
    width = 0 if d_strip.hidden is None else d_strip.hidden.shape[1]
    missing = d_strip.fetched.shape[1] - width - plan.heads

    def vector(t: Any, n: int, lane: Any, slab: Any) -> None:
        each = [] if not width else [d_strip.hidden[t]]
        rows = [d_strip.logits[*_of_query(plan, t, query)] for query in range(plan.group)]
        each.append(functools.reduce(jnp.add, rows))
        if missing:
            each.append(jnp.zeros((missing, LANES), jnp.float32))
        x = pltpu.roll(jnp.concatenate(each), lane, axis=1)
        here = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1) >= lane
        for m, part in enumerate((jnp.where(here, x, 0.0), jnp.where(here, 0.0, x))):
            d_strip.fetched[n, :, pl.ds(pl.multiple_of((slab + m) * LANES, LANES), LANES)] += part

    _each_vector(plan, begin, vector)
    copy = pltpu.make_async_copy(d_strip.fetched, in_hbm.at[_window(plan, i, j)], d_strip.semaphore)
    copy.start()
    copy.wait()
