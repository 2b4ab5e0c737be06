"""Position biases, absolute positions and the DAPE network as Flax modules: parameters here, formulas elsewhere."""

import jax
import jax.numpy as jnp
from flax import nnx

from dape_jax import absolute as absolute_lib
from dape_jax import adapt as adapt_lib
from dape_jax import biases
from dape_jax.errors import UserError


class _Parameters(nnx.Module):
    """A module whose parameters are a flat dictionary of arrays, one attribute each."""

    def _set(self, arrays: dict[str, jax.Array]) -> None:
        self.names = tuple(arrays)
        for name, x in arrays.items():
            setattr(self, name, nnx.Param(x))

    def params(self) -> dict[str, jax.Array]:
        """The parameters as ``dape_attention`` takes them."""
        return {name: getattr(self, name)[...] for name in self.names}


class PositionBias(_Parameters):
    """A position bias for ``num_heads`` heads; see ``dape_jax.biases`` for the formulas and parameters."""

    def __init__(self, bias: biases.Bias, num_heads: int, *, rngs: nnx.Rngs):
        self.bias = bias
        self.num_heads = num_heads
        self._set(bias.init(rngs.params(), num_heads))

    def __call__(self, q_positions: jax.Array, k_positions: jax.Array) -> jax.Array:
        """float32 [H, ..., Tq, Tk] from int32 positions [..., Tq] and [..., Tk]."""
        return biases.bias_values(self.bias, self.params(), self.num_heads, q_positions, k_positions)


class DAPE(_Parameters):
    """The DAPE network for ``num_heads`` heads; see ``dape_jax.adapt``.

    For attention of your own that has its logits at hand. It holds all of them: within ``Attention`` or
    ``dape_attention`` the same network runs tile by tile.
    """

    def __init__(self, adapt: adapt_lib.Adapt, num_heads: int, *, has_bias: bool = True, rngs: nnx.Rngs):
        self.adapt = adapt
        self.num_heads = num_heads
        self.has_bias = has_bias
        self._set(adapt.init(rngs.params(), num_heads, has_bias))

    def __call__(self, logits: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        """Corrected logits [B, H, Tq, Tk], in float32, from scaled logits of that shape and a bias [H, Tq, Tk]."""
        if (bias is not None) != self.has_bias:
            raise UserError(f"DAPE(has_bias={self.has_bias}) called with{'out' * (bias is None)} a bias")
        s = jnp.swapaxes(logits, 0, 1).astype(jnp.float32)
        params = self.params()
        terms = adapt_lib.bias_terms(self.adapt, params, bias)
        return jnp.swapaxes(adapt_lib.adapt_logits(self.adapt, params, s, terms), 0, 1)


class PositionEmbedding(_Parameters):
    """An absolute position embedding of ``width`` numbers; see ``dape_jax.absolute``."""

    def __init__(self, absolute: absolute_lib.Absolute, width: int, *, rngs: nnx.Rngs):
        self.absolute = absolute
        self.width = width
        self._set(absolute.init(rngs.params(), width))

    def __call__(self, positions: jax.Array) -> jax.Array:
        """float32 [..., width] from int32 positions [...]."""
        return self.absolute.embed(self.params(), positions, self.width)
