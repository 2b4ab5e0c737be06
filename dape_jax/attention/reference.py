"""The formula, written out: the oracle that every other backend is tested against. Memory grows with Tq x Tk."""

import jax
import jax.numpy as jnp

from dape_jax import adapt as adapt_lib
from dape_jax import biases
from dape_jax.attention import arguments as args_lib
from dape_jax.attention.arguments import Arrays, Spec


def logits(spec: Spec, arrays: Arrays) -> jax.Array:
    """The logits just before the softmax, unmasked: [H, B, Tq, Tk] in float32 (float64 for float64 inputs)."""
    dtype = args_lib.compute_dtype(arrays.q)
    s = args_lib.raw_logits(spec, arrays.q, arrays.k)
    params = {name: x.astype(dtype) for name, x in arrays.adapt_params.items()}
    halo = 0 if spec.adapt is None else spec.adapt.halo
    mask = args_lib.allowed(spec.causal, *arrays[5:])
    mask = jnp.ones((1, *s.shape[2:]), bool) if mask is None else mask

    is_key = jnp.ones((1, s.shape[-1]), bool) if arrays.k_valid is None else arrays.k_valid

    def rows(
        s: jax.Array, q_positions: jax.Array, k_positions: jax.Array, mask: jax.Array, is_key: jax.Array
    ) -> jax.Array:
        """[H, b, Tq, Tk] for batch rows that share their positions [Tq] and [Tk]; mask [1 or b, Tq, Tk], is_key
        [1 or b, 1, Tk]."""
        bias = None
        if spec.bias is not None:
            bias = biases.bias_values(spec.bias, arrays.bias_params, spec.num_heads, q_positions, k_positions, dtype)
            bias = _pad_keys(bias, halo)
        terms = adapt_lib.bias_terms(spec.adapt, params, bias)
        neighbours = adapt_lib.Neighbours(_pad_keys(mask, halo), _pad_keys(is_key, halo // 2))
        return adapt_lib.adapt_logits(spec.adapt, params, _pad_keys(s, halo), terms, neighbours)

    if arrays.q_positions.shape[0] == 1:
        return rows(s, arrays.q_positions[0], arrays.k_positions[0], mask, is_key[:, None])
    mask = jnp.broadcast_to(mask, s.shape[1:])
    is_key = jnp.broadcast_to(is_key, (s.shape[1], s.shape[3]))
    per_row = jax.vmap(rows, in_axes=(1, 0, 0, 0, 0), out_axes=1)
    return per_row(s[:, :, None], arrays.q_positions, arrays.k_positions, mask[:, None], is_key[:, None, None])[:, :, 0]


def _pad_keys(x: jax.Array, width: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(width, width)])


def attend(spec: Spec, arrays: Arrays) -> jax.Array:
    """Attention output [H, B, Tq, d] in the dtype of q; rows that may attend to nothing are zero."""
    a = logits(spec, arrays)
    mask = args_lib.allowed(spec.causal, *arrays[5:])
    if mask is not None:
        mask = jnp.broadcast_to(mask[None], a.shape)
        # Finite, so that a row without any permitted key has a defined softmax; it is zeroed below.
        a = jnp.where(mask, a, jnp.finfo(a.dtype).min)
    probabilities = jax.nn.softmax(a, axis=-1)
    if mask is not None:
        probabilities = jnp.where(mask, probabilities, 0.0)
    return args_lib.weighted_values(probabilities, arrays.v).astype(arrays.q.dtype)
