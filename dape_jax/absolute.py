"""Absolute position embeddings, which are added to those of the tokens, and positions drawn at random.

Sources: arXiv 1706.03762 (sinusoidal); randomised positions arXiv 2305.16843.
"""

import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np

from dape_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Absolute:
    """Base of the absolute embeddings: hyper-parameters only.

    Attributes:
      max_length: positions that there are; None for any number.
    """

    @property
    def max_length(self) -> int | None:
        return None

    def init(self, key: jax.Array, width: int) -> dict[str, jax.Array]:
        """Fresh float32 parameters for embeddings of ``width`` numbers."""
        del key, width
        return {}

    def embed(self, params: Mapping[str, jax.Array], positions: jax.Array, width: int) -> jax.Array:
        """float32 [..., width] for int32 positions [...]."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Sinusoidal(Absolute):
    """sin(position base^(-2i/M)) in the even and its cosine in the odd components."""

    base: float = 10000.0

    def embed(self, params: Mapping[str, jax.Array], positions: jax.Array, width: int) -> jax.Array:
        del params
        frequency = jnp.asarray(self.base ** (-np.arange(0, width, 2) / width), jnp.float32)
        angle = jnp.expand_dims(positions, -1).astype(jnp.float32) * jnp.expand_dims(frequency, range(positions.ndim))
        pairs = jnp.stack([jnp.sin(angle), jnp.cos(angle)], axis=-1)
        return pairs.reshape(*positions.shape, -1)[..., :width]


@dataclasses.dataclass(frozen=True)
class Learned(Absolute):
    """A table of ``length`` embeddings, initialised normal with standard deviation sqrt(2 / (5 M)).

    There is nothing beyond the table: a position past its end gives NaN, and a longer sequence is refused.
    """

    length: int

    def __post_init__(self):
        if self.length < 1:
            raise UserError(f"learned positions length={self.length!r}: 1 or more is needed")

    @property
    def max_length(self) -> int:
        return self.length

    def init(self, key: jax.Array, width: int) -> dict[str, jax.Array]:
        return {"table": math.sqrt(2 / (5 * width)) * jax.random.normal(key, (self.length, width), jnp.float32)}

    def embed(self, params: Mapping[str, jax.Array], positions: jax.Array, width: int) -> jax.Array:
        del width
        return jnp.take(params["table"], positions, axis=0, mode="fill", fill_value=jnp.nan)


def random_positions(key: jax.Array, length: int, range_: int, count: jax.Array | None = None) -> jax.Array:
    """``length`` of the positions 0 .. range_ - 1, drawn without replacement and sorted: int32 [length].

    With ``count``, int32 [] up to ``length``, only the first ``count`` are so drawn; the others, for padding, are
    ``range_ - 1``.
    """
    if length > range_:
        raise UserError(f"{length} positions cannot be drawn from a range of {range_}: a larger range is needed")
    drawn = jax.random.permutation(key, range_)[:length].astype(jnp.int32)
    if count is not None:
        drawn = jnp.where(jnp.arange(length) < count, drawn, range_ - 1)
    return jnp.sort(drawn)
