"""Rotary position embedding: what acts on q and k instead of on the logits.

Source: RoFormer, arXiv 2104.09864. Angles are computed in float32 from int32 positions at call time, for any length.
"""

import jax
import jax.numpy as jnp

from dape_jax.errors import UserError


def rope(x: jax.Array, positions: jax.Array, base: float = 10000.0) -> jax.Array:
    """Rotates the pairs (x[i], x[i + d/2]) of the last axis by the angle position * base^(-2i/d).

    Args:
      x: [B, T, H, d], d even.
      positions: int32 [T] or [B, T].
      base: of the geometric progression of wavelengths.

    Returns:
      An array like ``x``; the rotation is done in float32 (float64 for float64).
    """
    d = x.shape[-1]
    if d % 2:
        raise UserError(f"head dimension {d} is odd; RoPE needs an even one")
    dtype = jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    frequency = base ** (-jnp.arange(0, d, 2, dtype=dtype) / d)
    if positions.ndim == 1:
        positions = positions[None]
    angle = positions.astype(dtype)[:, :, None, None] * frequency[None, None, None, :]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
