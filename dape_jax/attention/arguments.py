"""What every backend receives: checked arguments in one structure, heads first, and the mask they imply."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dape_jax import adapt as adapt_lib
from dape_jax import biases


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static half of a call: formulas and hyper-parameters, hashable.

    ``consecutive``: positions are the default ones, 0 .. Tk-1 for the keys and the last of them for the queries.
    """

    bias: biases.Bias | None
    adapt: adapt_lib.Adapt | None
    causal: bool
    scale: float
    num_heads: int
    consecutive: bool = False

    @property
    def steep(self) -> bool:
        """Whether the bias is; see ``Bias.steep``."""
        return self.bias is not None and self.bias.steep


class Arrays(NamedTuple):
    """The dynamic half. N key-value heads, H query heads, H a multiple of N.

    Attributes:
      q: [H, B, Tq, d]; k, v: [N, B, Tk, d].
      bias_params, adapt_params: empty where there is none.
      q_positions: int32 [P, Tq]; k_positions: int32 [P, Tk]; P is 1 (all rows alike) or B.
      q_segments: int32 [B, Tq] or None; k_segments: int32 [B, Tk] or None.
      k_valid: bool [B, Tk] or None; False marks padding.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias_params: biases.Params
    adapt_params: adapt_lib.Params
    q_positions: jax.Array
    k_positions: jax.Array
    q_segments: jax.Array | None
    k_segments: jax.Array | None
    k_valid: jax.Array | None


def compute_dtype(x: jax.Array) -> jnp.dtype:
    """Of logits, bias, network and softmax: float32, or float64 where the inputs are."""
    return jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)


def saved_dtype(arrays: Arrays) -> jnp.dtype:
    """Of the output that a backward reads. Rounding it makes each row of logit gradients sum to a little more or less
    than zero, which the gradients of parameters, sums over all rows, would show: 2 to 4 % for FIRE's."""
    learned = arrays.bias_params or arrays.adapt_params
    return compute_dtype(arrays.q) if learned else arrays.q.dtype


def matmul_precision(x: jax.Array) -> jax.lax.Precision:
    """Of the products with q, k and v: what the inputs hold, no more. bfloat16 values are exact in one TPU pass."""
    return jax.lax.Precision.DEFAULT if x.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST


def allowed(
    causal: bool,
    q_positions: jax.Array,
    k_positions: jax.Array,
    q_segments: jax.Array | None,
    k_segments: jax.Array | None,
    k_valid: jax.Array | None,
) -> jax.Array | None:
    """bool [1 or B, Tq, Tk]: which keys a query may attend to; None if every query may attend to every key."""
    masks = []
    if causal:
        masks.append(k_positions[:, None, :] <= q_positions[:, :, None])
    if q_segments is not None and k_segments is not None:
        masks.append(q_segments[:, :, None] == k_segments[:, None, :])
    if k_valid is not None:
        masks.append(k_valid[:, None, :])
    if not masks:
        return None
    mask = masks[0]
    for other in masks[1:]:
        mask = mask & other
    return mask


def raw_logits(spec: Spec, q: jax.Array, k: jax.Array) -> jax.Array:
    """S = scale q k^T, [H, B, Tq, Tk] from q [H, B, Tq, d] and k [N, B, Tk, d], in the compute dtype."""
    dtype, precision = compute_dtype(q), matmul_precision(q)
    heads, batch, q_length, d = q.shape
    grouped = q.astype(dtype).reshape(k.shape[0], -1, batch, q_length, d)
    logits = jnp.einsum("ngbqd,nbkd->ngbqk", grouped, k.astype(dtype), precision=precision)
    return spec.scale * logits.reshape(heads, batch, q_length, k.shape[2])


def weighted_values(probabilities: jax.Array, v: jax.Array) -> jax.Array:
    """P v, [H, B, Tq, d] from P [H, B, Tq, Tk] and v [N, B, Tk, d], in the dtype of P."""
    heads, batch, q_length, k_length = probabilities.shape
    grouped = probabilities.reshape(v.shape[0], -1, batch, q_length, k_length)
    precision = matmul_precision(v)
    out = jnp.einsum("ngbqk,nbkd->ngbqd", grouped, v.astype(probabilities.dtype), precision=precision)
    return out.reshape(heads, batch, q_length, v.shape[3])
