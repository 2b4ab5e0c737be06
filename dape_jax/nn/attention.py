"""Multi-head self-attention with any position bias, rotary positions, and the DAPE network."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from dape_jax import adapt as adapt_lib
from dape_jax import biases
from dape_jax.attention import dape_attention
from dape_jax.errors import UserError
from dape_jax.nn.position import DAPE, PositionBias
from dape_jax.rotary import RoPE, rope


class KeyValues(NamedTuple):
    """Keys and values of the tokens read so far, each [B, C, N, d] for a capacity of C tokens and N key heads."""

    k: jax.Array
    v: jax.Array


class Attention(nnx.Module):
    """Self-attention [B, T, M] -> [B, T, M] with separate q, k, v and o projections.

    Args:
      width: M, a multiple of ``num_heads``.
      num_heads: H.
      num_kv_heads: N, heads of keys and values, each read by H / N query heads; default H.
      bias: additive position bias, or None.
      adapt: DAPE network, or None.
      rotary: rotary positions, None for none.
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
        num_kv_heads: int | None = None,
        bias: biases.Bias | None = None,
        adapt: adapt_lib.Adapt | None = None,
        rotary: RoPE | None = None,
        causal: bool = True,
        dtype: jnp.dtype = jnp.float32,
        kernel_init: nnx.Initializer | None = None,
        out_init: nnx.Initializer | None = None,
        backend: str = "auto",
        batch_axes: tuple[str, ...] = (),
        rngs: nnx.Rngs,
    ):
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if width % num_heads:
            raise UserError(f"width={width} is not divisible by num_heads={num_heads}")
        if num_kv_heads < 1 or num_heads % num_kv_heads:
            raise UserError(f"num_heads={num_heads} is no multiple of num_kv_heads={num_kv_heads}")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = width // num_heads
        self.rotary = rotary
        self.causal = causal
        self.backend = backend
        self.batch_axes = batch_axes

        kernel_init = kernel_init or nnx.initializers.lecun_normal()

        def linear(out: int, init: nnx.Initializer) -> nnx.Linear:
            return nnx.Linear(width, out, dtype=dtype, kernel_init=init, rngs=rngs)

        self.q = linear(width, kernel_init)
        self.k, self.v = (linear(num_kv_heads * self.head_dim, kernel_init) for _ in range(2))
        self.o = linear(width, out_init or kernel_init)
        self.bias = None if bias is None else PositionBias(bias, num_heads, rngs=rngs)
        self.dape = None if adapt is None else DAPE(adapt, num_heads, has_bias=bias is not None, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        valid: jax.Array | None = None,
    ) -> jax.Array:
        """Attends over x [B, T, M].

        Args:
          x: activations.
          positions: int32 [T] or [B, T]; default 0 .. T-1.
          segment_ids: int32 [B, T]; only equal ones attend to each other.
          valid: bool [B, T]; False marks padding, which nobody attends to.
        """
        counted = jnp.arange(x.shape[1], dtype=jnp.int32) if positions is None else positions
        q, k, v = self._project(x, counted)
        # Not given rather than counted: kernels do less where they know that positions are consecutive.
        return self._attend(q, k, v, positions, positions, segment_ids, valid)

    def extend(
        self, x: jax.Array, cache: KeyValues, index: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, KeyValues]:
        """Attends from x [B, n, M], the tokens that follow those in the cache, to all of them: [B, n, M] and the cache.

        Args:
          x: the activations of the next n tokens.
          cache: keys and values of the tokens before.
          index: int32 [], how many those are; ``index + n`` must not exceed the capacity C.
          positions: int32 [C], ascending: of all tokens that the cache can hold, so that causality alone hides the
            entries that are still empty.
        """
        if not self.causal:
            raise UserError("causal=False: attention that sees later tokens cannot be extended token by token")
        own = jax.lax.dynamic_slice_in_dim(positions, index, x.shape[1])
        q, *new = self._project(x, own)
        old = (cache.k, cache.v)
        k, v = (
            jax.lax.dynamic_update_slice_in_dim(o, n.astype(o.dtype), index, 1) for o, n in zip(old, new, strict=True)
        )
        return self._attend(q, k, v, own, positions), KeyValues(k, v)

    def _project(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        q, k, v = (f(x).reshape(*x.shape[:2], -1, self.head_dim) for f in (self.q, self.k, self.v))
        if self.rotary is not None:
            q, k = (rope(x, positions, self.rotary) for x in (q, k))
        return q, k, v

    def _attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        q_positions: jax.Array | None,
        k_positions: jax.Array | None,
        segment_ids: jax.Array | None = None,
        valid: jax.Array | None = None,
    ) -> jax.Array:
        out = dape_attention(
            q,
            k,
            v,
            bias=None if self.bias is None else self.bias.bias,
            bias_params=None if self.bias is None else self.bias.params(),
            adapt=None if self.dape is None else self.dape.adapt,
            adapt_params=None if self.dape is None else self.dape.params(),
            causal=self.causal,
            q_positions=q_positions,
            k_positions=k_positions,
            q_segment_ids=segment_ids,
            k_segment_ids=segment_ids,
            k_valid=valid,
            backend=self.backend,
            batch_axes=self.batch_axes,
        )
        return self.o(out.reshape(*out.shape[:2], -1))
