"""Multi-head self-attention with any position bias, rotary positions, and the DAPE network."""

import jax
import jax.numpy as jnp
from flax import nnx

from dape_jax import adapt as adapt_lib
from dape_jax import biases, rotary
from dape_jax.attention import dape_attention
from dape_jax.errors import UserError
from dape_jax.nn.position import DAPE, PositionBias


class Attention(nnx.Module):
    """Self-attention [B, T, M] -> [B, T, M] with separate q, k, v and o projections.

    Args:
      width: M, a multiple of ``num_heads``.
      num_heads: H.
      bias: additive position bias, or None.
      adapt: DAPE network, or None.
      rope_base: base of rotary positions, None for none.
      causal: whether a position attends only to itself and earlier ones.
      dtype: of the activations; parameters are float32.
      kernel_init, out_init: initialisers of q, k, v and of o; default LeCun normal, and that of q, k, v.
      backend: of ``dape_attention``.
      batch_axes: mesh axes over which the batch is split; see ``dape_attention``.
      rngs: source of the initial parameters.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        *,
        bias: biases.Bias | None = None,
        adapt: adapt_lib.Adapt | None = None,
        rope_base: float | None = None,
        causal: bool = True,
        dtype: jnp.dtype = jnp.float32,
        kernel_init: nnx.Initializer | None = None,
        out_init: nnx.Initializer | None = None,
        backend: str = "auto",
        batch_axes: tuple[str, ...] = (),
        rngs: nnx.Rngs,
    ):
        if width % num_heads:
            raise UserError(f"width={width} is not divisible by num_heads={num_heads}")
        self.num_heads = num_heads
        self.rope_base = rope_base
        self.causal = causal
        self.backend = backend
        self.batch_axes = batch_axes

        kernel_init = kernel_init or nnx.initializers.lecun_normal()

        def linear(init: nnx.Initializer) -> nnx.Linear:
            return nnx.Linear(width, width, dtype=dtype, kernel_init=init, rngs=rngs)

        self.q, self.k, self.v = linear(kernel_init), linear(kernel_init), linear(kernel_init)
        self.o = linear(out_init or kernel_init)
        self.bias = None if bias is None else PositionBias(bias, num_heads, rngs=rngs)
        self.dape = None if adapt is None else DAPE(adapt, num_heads, has_bias=bias is not None, rngs=rngs)

    def __call__(
        self, x: jax.Array, positions: jax.Array | None = None, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """Attends over x [B, T, M]; int32 positions [T] or [B, T], default 0 .. T-1; int32 segment_ids [B, T]."""
        batch, length, width = x.shape
        q, k, v = (f(x).reshape(batch, length, self.num_heads, -1) for f in (self.q, self.k, self.v))
        if positions is None:
            positions = jnp.arange(length, dtype=jnp.int32)
        if self.rope_base is not None:
            q, k = (rotary.rope(x, positions, self.rope_base) for x in (q, k))
        out = dape_attention(
            q,
            k,
            v,
            bias=None if self.bias is None else self.bias.bias,
            bias_params=None if self.bias is None else self.bias.params(),
            adapt=None if self.dape is None else self.dape.adapt,
            adapt_params=None if self.dape is None else self.dape.params(),
            causal=self.causal,
            q_positions=positions,
            k_positions=positions,
            q_segment_ids=segment_ids,
            k_segment_ids=segment_ids,
            backend=self.backend,
            batch_axes=self.batch_axes,
        )
        return self.o(out.reshape(batch, length, width))
