"""Rotary position embedding and YaRN: what acts on q and k instead of on the logits.

Sources: RoFormer, arXiv 2104.09864; YaRN, arXiv 2309.00071. Angles are computed in float32 from int32 positions at call
time, for any length.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from dape_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class RoPE:
    """The pair (x[i], x[i + d/2]) turns by position * base^(-2i/d).

    Fields:
      base: of the geometric progression of wavelengths.
    """

    base: float = 10000.0

    def __post_init__(self):
        if not 0 < self.base < math.inf:
            raise UserError(f"RoPE base={self.base!r}: a positive number is needed")

    @property
    def magnitude(self) -> float:
        """What q and k are multiplied by besides."""
        return 1.0

    def frequencies(self, d: int) -> np.ndarray:
        """Radians for each position, float64 [d / 2]. Refuses an odd d."""
        if d % 2:
            raise UserError(f"head dimension {d} is odd; RoPE needs an even one")
        return self.base ** (-np.arange(0, d, 2) / d)

    def for_length(self, length: int) -> "RoPE":
        """The encoding to read sequences of ``length`` tokens with."""
        del length
        return self


@dataclasses.dataclass(frozen=True)
class YaRN(RoPE):
    """RoPE whose slow frequencies are interpolated to read ``scale`` times ``train_length`` tokens; at 1 it is RoPE.

    A pair that turns ``beta_fast`` times or more within ``train_length`` keeps its frequency, one that turns
    ``beta_slow`` times or fewer has it divided by ``scale``, with a linear ramp over the index in between. q and k are
    each multiplied by 0.1 ln(scale) + 1.

    Fields:
      train_length: tokens of a training sequence.
      scale: length to be read over ``train_length``, 1 or more.
      beta_fast, beta_slow: turns at the two ends of the ramp.
    """

    train_length: int = 2048
    scale: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        if self.base <= 1:
            raise UserError(f"YaRN base={self.base!r}: a number above 1 is needed")
        if self.train_length < 1:
            raise UserError(f"YaRN train_length={self.train_length!r}: 1 or more is needed")
        if not 1 <= self.scale < math.inf:
            raise UserError(f"YaRN scale={self.scale!r}: a number of 1 or more is needed")
        if not 0 < self.beta_slow < self.beta_fast < math.inf:
            raise UserError(
                f"YaRN beta_slow={self.beta_slow!r} and beta_fast={self.beta_fast!r}: positive, slow below fast"
            )

    @property
    def magnitude(self) -> float:
        return 0.1 * math.log(self.scale) + 1.0

    def frequencies(self, d: int) -> np.ndarray:
        plain = super().frequencies(d)

        def index(turns: float) -> float:
            """The index i, not rounded, of the pair that turns so often within the training length."""
            return d * math.log(self.train_length / (2 * math.pi * turns)) / (2 * math.log(self.base))

        low, high = max(math.floor(index(self.beta_fast)), 0), min(math.ceil(index(self.beta_slow)), d - 1)
        slow = np.clip((np.arange(d // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
        return plain * (1 - slow) + plain / self.scale * slow

    def for_length(self, length: int) -> "YaRN":
        return dataclasses.replace(self, scale=max(1.0, length / self.train_length))


def rope(x: jax.Array, positions: jax.Array, encoding: RoPE = RoPE()) -> jax.Array:
    """Rotates the pairs (x[i], x[i + d/2]) of the last axis by their angles at ``positions``.

    Args:
      x: [B, T, H, d], d even.
      positions: int32 [T] or [B, T].
      encoding: the frequencies, ``RoPE(base)`` or ``YaRN``.

    Returns:
      An array like ``x``; the rotation is done in float32 (float64 for float64).
    """
    dtype = jnp.dtype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    frequency = jnp.asarray(encoding.frequencies(x.shape[-1]), dtype)
    if positions.ndim == 1:
        positions = positions[None]
    angle = positions.astype(dtype)[:, :, None, None] * frequency[None, None, None, :]
    cos, sin = encoding.magnitude * jnp.cos(angle), encoding.magnitude * jnp.sin(angle)
    first, second = jnp.split(x.astype(dtype), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
