"""Blockwise attention in XLA on any device: online softmax over tiles, memory linear in T forward and backward.

A tile is (rows of the batch) x (queries) x (keys) for all heads, since the DAPE network mixes heads. The forward
keeps the output and the log-sum-exp; the backward recomputes each tile's logits and differentiates them with
``jax.vjp``, so every bias and every variant has its gradient from the one formula in ``biases`` and ``adapt``.

The bias and its share of the hidden layer are computed once a (query, key) tile, outside the loop over rows.
"""

import functools
import typing
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dape_jax import adapt as adapt_lib
from dape_jax import biases
from dape_jax.attention import arguments as args_lib
from dape_jax.attention.arguments import Arrays, Spec
from dape_jax.attention.blocks import BlockSizes


def attend(spec: Spec, arrays: Arrays, blocks: BlockSizes) -> jax.Array:
    """Attention output [H, B, Tq, d] in the dtype of q; rows that may attend to nothing are zero."""
    # Before anything else, so that the gradients of parameters add up over tiles and rows in this dtype.
    params = _cast((dict(arrays.bias_params), dict(arrays.adapt_params)), args_lib.compute_dtype(arrays.q))
    arrays = arrays._replace(bias_params=params[0], adapt_params=params[1])
    if arrays.q_positions.shape[0] == 1:
        return _attend(spec, blocks, arrays)
    # Positions differ between rows, so the bias does too: one row at a time.
    one_row = BlockSizes(q=blocks.q, k=blocks.k, rows=1)

    def row(x: Arrays) -> jax.Array:
        return typing.cast(jax.Array, _attend(spec, one_row, x))[:, 0]

    def rows_first(x: jax.Array | None, axis: int) -> jax.Array | None:
        return None if x is None else jnp.expand_dims(jnp.moveaxis(x, axis, 0), axis + 1)

    batched = {name: rows_first(getattr(arrays, name), 1) for name in ("q", "k", "v")}
    batched |= {name: rows_first(getattr(arrays, name), 0) for name in Arrays._fields[5:]}
    out = jax.lax.map(lambda x: row(arrays._replace(**x)), batched)
    return jnp.moveaxis(out, 0, 1)


class _Tiles(NamedTuple):
    """The arguments cut into tiles; n = query tiles, m = key tiles, r = row groups, b = rows of a group.

    The keys of a tile come with the halo of a convolving network (DAPE V2), h on each side: ek = bk + 2h, h = 0 else.

    q [n, r, H, b, bq, d]; q_positions [n, 1, bq]; q_segments [n, r, b, bq]; key_range: first and one past the last key
    tile that a query tile needs, int32 [n] each.
    k [m, r, N, b, ek, d]; v [m, r, N, b, bk, d]; k_positions [m, 1, ek]; k_segments, k_valid [m, r, b, ek].
    """

    q: jax.Array
    q_positions: jax.Array
    q_segments: jax.Array | None
    key_range: tuple[jax.Array, jax.Array]
    k: jax.Array
    v: jax.Array
    k_positions: jax.Array
    k_segments: jax.Array | None
    k_valid: jax.Array | None

    def query_side(self) -> Any:
        return self.q, self.q_positions, self.q_segments, *self.key_range

    def key_side(self) -> Any:
        return self.k, self.v, self.k_positions, self.k_segments, self.k_valid


def _cut(x: Any, time_axis: int, block: int, rows: int | None, halo: int = 0, fill: int = 0) -> Any:
    """Pads the time axis with ``fill`` to whole blocks and moves block and row-group axes to the front.

    The row axis is the one before the time axis; ``rows`` None keeps it whole, without a row-group axis. With ``halo``
    the tiles overlap: each has so many entries more on both sides, ``fill`` beyond the ends. None stays.
    """
    if x is None:
        return None
    count = -(-x.shape[time_axis] // block)
    padding = [(0, 0)] * x.ndim
    padding[time_axis] = (halo, count * block - x.shape[time_axis] + halo)
    x = jnp.pad(x, padding, constant_values=fill)
    if halo:
        index = jnp.arange(count)[:, None] * block + jnp.arange(block + 2 * halo)[None, :]
        x = jnp.take(x, index, axis=time_axis)
    else:
        x = x.reshape(*x.shape[:time_axis], count, block, *x.shape[time_axis + 1 :])
    if rows is None:
        return jnp.moveaxis(x, time_axis, 0)
    row_axis = time_axis - 1
    x = x.reshape(*x.shape[:row_axis], x.shape[row_axis] // rows, rows, *x.shape[time_axis:])
    return jnp.moveaxis(x, (row_axis + 2, row_axis), (0, 1))


def _join(tiles: jax.Array, length: int) -> jax.Array:
    """[n, r, H, b, block, d] -> [H, B, length, d], dropping the padding."""
    n, r, heads, b, block, d = tiles.shape
    x = jnp.transpose(tiles, (2, 1, 3, 0, 4, 5)).reshape(heads, r * b, n * block, d)
    return x[:, :, :length]


def _cut_keys(spec: Spec, blocks: BlockSizes, k: jax.Array) -> jax.Array:
    return _cut(k, 2, blocks.k, blocks.rows, _halo(spec))


def _halo(spec: Spec) -> int:
    return 0 if spec.adapt is None else spec.adapt.halo


def _tiles(spec: Spec, arrays: Arrays, blocks: BlockSizes) -> _Tiles:
    halo = _halo(spec)
    k_valid = arrays.k_valid
    k_length = arrays.k.shape[2]
    if k_valid is None and (k_length % blocks.k or halo):
        k_valid = jnp.ones((arrays.k.shape[1], k_length), bool)
    return _Tiles(
        q=_cut(arrays.q, 2, blocks.q, blocks.rows),
        q_positions=_cut(arrays.q_positions, 1, blocks.q, None),
        q_segments=_cut(arrays.q_segments, 1, blocks.q, blocks.rows),
        key_range=_key_range(spec, blocks, arrays),
        k=_cut_keys(spec, blocks, arrays.k),
        v=_cut(arrays.v, 2, blocks.k, blocks.rows),
        k_positions=_cut(arrays.k_positions, 1, blocks.k, None, halo),
        k_segments=_cut(arrays.k_segments, 1, blocks.k, blocks.rows, halo),
        k_valid=_cut(k_valid, 1, blocks.k, blocks.rows, halo),
    )


def _key_range(spec: Spec, blocks: BlockSizes, arrays: Arrays) -> tuple[jax.Array, jax.Array]:
    """First and one past the last key tile that each query tile needs, int32 [n] each, from the positions in them.

    Segments and padding restrict further, by the mask alone.
    """
    n, m = -(-arrays.q.shape[2] // blocks.q), -(-arrays.k.shape[2] // blocks.k)
    if not spec.causal:
        return jnp.zeros(n, jnp.int32), jnp.full(n, m, jnp.int32)
    # Padding takes no part: a query before all keys, a key after all queries.
    limits = jnp.iinfo(jnp.int32)
    latest_query = _cut(arrays.q_positions, 1, blocks.q, None, fill=limits.min).max(axis=(1, 2))
    earliest_key = _cut(arrays.k_positions, 1, blocks.k, None, fill=limits.max).min(axis=(1, 2))
    needed = earliest_key[None, :] <= latest_query[:, None]
    index = jnp.broadcast_to(jnp.arange(m, dtype=jnp.int32)[None], (n, m))
    return (
        jnp.where(needed, index, m).min(axis=1),
        jnp.where(needed, index + 1, 0).max(axis=1),
    )


def _bias_terms(
    spec: Spec,
    bias_params: biases.Params,
    adapt_params: adapt_lib.Params,
    q_positions: jax.Array,
    k_positions: jax.Array,
    dtype: jnp.dtype,
) -> adapt_lib.BiasTerms:
    bias = None
    if spec.bias is not None:
        bias = biases.bias_values(spec.bias, bias_params, spec.num_heads, q_positions[0], k_positions[0], dtype)
    return adapt_lib.bias_terms(spec.adapt, adapt_params, bias)


def _tile_logits(
    spec: Spec,
    neighbours: adapt_lib.Neighbours | None,
    q: jax.Array,
    k: jax.Array,
    adapt_params: adapt_lib.Params,
    terms: adapt_lib.BiasTerms,
) -> jax.Array:
    return adapt_lib.adapt_logits(spec.adapt, adapt_params, args_lib.raw_logits(spec, q, k), terms, neighbours)


def _masks(
    spec: Spec, mask: jax.Array | None, k_valid: jax.Array | None
) -> tuple[jax.Array | None, adapt_lib.Neighbours | None]:
    """The mask of a tile's own keys, and what a convolving network needs of the keys around them."""
    halo = _halo(spec)
    if not halo:
        return mask, None
    assert mask is not None
    assert k_valid is not None  # a halo has entries that are no keys
    p = halo // 2
    return mask[..., halo:-halo], adapt_lib.Neighbours(mask, k_valid[:, None, p:-p])


def _over_rows(body: Any, carry: Any, xs: Any) -> tuple[Any, Any]:
    """``jax.lax.scan`` over row groups; a plain call when there is one."""
    if jax.tree.leaves(xs)[0].shape[0] > 1:
        return jax.lax.scan(body, carry, xs)
    carry, ys = body(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda y: y[None], ys)


def _at(tree: Any, index: jax.Array) -> Any:
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def _add_at(total: jax.Array, index: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(total, _at(total, index) + x, index, 0)


def _cast(params: Any, dtype: jnp.dtype) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), params)


def _network(adapt_params: adapt_lib.Params) -> dict[str, jax.Array]:
    """Without b2: a constant along a row of logits, which the softmax cancels."""
    return {name: x for name, x in adapt_params.items() if name != "b2"}


def _forward(spec: Spec, blocks: BlockSizes, arrays: Arrays, out_dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Output [H, B, Tq, d] and log-sum-exp tiles [n, r, H, b, bq] (+inf in rows that may attend to nothing)."""
    tiles = _tiles(spec, arrays, blocks)
    dtype = args_lib.compute_dtype(arrays.q)
    adapt_params = _network(arrays.adapt_params)
    lowest = jnp.finfo(dtype).min

    def query_tile(x: Any) -> tuple[jax.Array, jax.Array]:
        q, q_positions, q_segments, first, last = x

        def key_tile(j: jax.Array, state: Any) -> Any:
            k, v, k_positions, k_segments, k_valid = _at(tiles.key_side(), j)
            terms = _bias_terms(spec, arrays.bias_params, adapt_params, q_positions, k_positions, dtype)

            def rows(_: None, x: Any) -> tuple[None, Any]:
                (q, k, v, q_segments, k_segments, k_valid), (out, top, total) = x
                mask = args_lib.allowed(spec.causal, q_positions, k_positions, q_segments, k_segments, k_valid)
                mask, neighbours = _masks(spec, mask, k_valid)
                a = _tile_logits(spec, neighbours, q, k, adapt_params, terms)
                if mask is not None:
                    mask = jnp.broadcast_to(mask[None], a.shape)
                    a = jnp.where(mask, a, lowest)
                new_top = jnp.maximum(top, a.max(axis=-1))
                p = jnp.exp(a - new_top[..., None])
                if mask is not None:
                    p = jnp.where(mask, p, 0.0)
                decay = jnp.exp(top - new_top)
                out = out * decay[..., None] + args_lib.weighted_values(p, v)
                return None, (out, new_top, total * decay + p.sum(axis=-1))

            xs = ((q, k, v, q_segments, k_segments, k_valid), state)
            return _over_rows(rows, None, xs)[1]

        shape = q.shape[:-1]
        state = (jnp.zeros(q.shape, dtype), jnp.full(shape, lowest, dtype), jnp.zeros(shape, dtype))
        out, top, total = jax.lax.fori_loop(first, last, key_tile, state)
        empty = total == 0.0
        total = jnp.where(empty, 1.0, total)
        return (out / total[..., None]).astype(out_dtype), jnp.where(empty, jnp.inf, top + jnp.log(total))

    out, lse = _map(query_tile, tiles.query_side())
    return _join(out, arrays.q.shape[2]), lse


def _map(body: Any, xs: Any) -> Any:
    return _over_rows(lambda _, x: (None, body(x)), None, xs)[1]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(spec: Spec, blocks: BlockSizes, arrays: Arrays) -> jax.Array:
    """Parameters in the compute dtype."""
    return _forward(spec, blocks, arrays, arrays.q.dtype)[0]


def _attend_fwd(spec: Spec, blocks: BlockSizes, arrays: Arrays) -> tuple[jax.Array, Any]:
    out, lse = _forward(spec, blocks, arrays, args_lib.saved_dtype(arrays))
    # Named for rematerialisation policies: with both saved, the backward needs no second forward.
    out = checkpoint_name(out, "dape_attention_out")
    return out.astype(arrays.q.dtype), (arrays, out, checkpoint_name(lse, "dape_attention_lse"))


def _attend_bwd(spec: Spec, blocks: BlockSizes, saved: Any, d_out: jax.Array) -> tuple[Arrays]:
    arrays, out, lse = saved
    tiles = _tiles(spec, arrays, blocks)
    dtype = args_lib.compute_dtype(arrays.q)
    adapt_params = _network(arrays.adapt_params)
    bias_params = dict(arrays.bias_params)
    d_out = d_out.astype(dtype)
    delta = (d_out * out.astype(dtype)).sum(axis=-1, keepdims=True)
    d_out, delta = (_cut(x, 2, blocks.q, blocks.rows) for x in (d_out, delta))

    def query_tile(carry: Any, x: Any) -> tuple[Any, jax.Array]:
        q, q_positions, q_segments, first, last, d_out, delta, lse = x

        def key_tile(j: jax.Array, carry: Any) -> Any:
            d_q, d_k, d_v, d_bias_params, d_adapt_params = carry
            k, v, k_positions, k_segments, k_valid = _at(tiles.key_side(), j)
            terms, terms_vjp = jax.vjp(
                lambda b, a: _bias_terms(spec, b, a, q_positions, k_positions, dtype), bias_params, adapt_params
            )

            def rows(carry: Any, x: Any) -> tuple[Any, Any]:
                q, k, v, q_segments, k_segments, k_valid, d_out, delta, lse = x
                mask = args_lib.allowed(spec.causal, q_positions, k_positions, q_segments, k_segments, k_valid)
                mask, neighbours = _masks(spec, mask, k_valid)
                a, logits_vjp = jax.vjp(functools.partial(_tile_logits, spec, neighbours), q, k, adapt_params, terms)
                p = jnp.exp(a - lse[..., None])
                if mask is not None:
                    # Entries that are not allowed may overflow the exponential; they are replaced, not scaled.
                    p = jnp.where(jnp.broadcast_to(mask[None], a.shape), p, 0.0)
                out, values_vjp = jax.vjp(args_lib.weighted_values, p, v)
                d_p, d_v = values_vjp(d_out)
                del out
                d_q, d_k, d_params, d_terms = logits_vjp(p * (d_p - delta))
                return jax.tree.map(jnp.add, carry, (d_params, d_terms)), _cast((d_q, d_k, d_v), dtype)

            zeros = jax.tree.map(jnp.zeros_like, (adapt_params, terms))
            xs = (q, k, v, q_segments, k_segments, k_valid, d_out, delta, lse)
            (d_params, d_terms), (d_q_tile, d_k_tile, d_v_tile) = _over_rows(rows, zeros, xs)
            d_bias, d_params_of_terms = terms_vjp(d_terms)
            return (
                d_q + d_q_tile,
                _add_at(d_k, j, d_k_tile),
                _add_at(d_v, j, d_v_tile),
                jax.tree.map(jnp.add, d_bias_params, d_bias),
                jax.tree.map(lambda x, y, z: x + y + z, d_adapt_params, d_params, d_params_of_terms),
            )

        d_q, *carry = jax.lax.fori_loop(first, last, key_tile, (jnp.zeros(q.shape, dtype), *carry))
        return tuple(carry), d_q

    xs = (*tiles.query_side(), d_out, delta, lse)
    carry = (
        jnp.zeros(tiles.k.shape, dtype),
        jnp.zeros(tiles.v.shape, dtype),
        jax.tree.map(jnp.zeros_like, bias_params),
        jax.tree.map(jnp.zeros_like, adapt_params),
    )
    (d_k, d_v, d_bias_params, d_adapt_params), d_q = _over_rows(query_tile, carry, xs)
    # Overlapping tiles add up where they overlap: the transpose of cutting.
    (d_k,) = jax.linear_transpose(functools.partial(_cut_keys, spec, blocks), arrays.k.astype(dtype))(d_k)
    q_length, k_length = arrays.q.shape[2], arrays.k.shape[2]
    gradients: dict[str, Any] = dict.fromkeys(Arrays._fields)  # None for what is not differentiable
    gradients |= {
        "q": _join(d_q, q_length).astype(arrays.q.dtype),
        "k": d_k.astype(arrays.k.dtype),
        "v": _join(d_v, k_length).astype(arrays.v.dtype),
        "bias_params": d_bias_params,
        "adapt_params": {name: d_adapt_params.get(name, jnp.zeros_like(x)) for name, x in arrays.adapt_params.items()},
    }
    return (Arrays(**gradients),)


_attend.defvjp(_attend_fwd, _attend_bwd)
