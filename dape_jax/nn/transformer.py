"""A decoder-only language model: pre-LayerNorm, GELU, untied output, the paper's initialisers, scanned blocks."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from dape_jax import adapt as adapt_lib
from dape_jax import biases
from dape_jax.errors import UserError, nearest
from dape_jax.nn.attention import Attention

REMAT = {
    "none": None,
    "full": jax.checkpoint_policies.nothing_saveable,
    "attention_saved": jax.checkpoint_policies.save_only_these_names("dape_attention_out", "dape_attention_lse"),
}
"""Rematerialisation of a block. "none" keeps all that its backward pass reads; "full" keeps the block's input and runs
the block again; "attention_saved" keeps the attention's output and log-sum-exp as well, which is all that the
attention's own backward pass needs, so that everything but the attention is computed again."""


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Shape and position encoding of a ``TransformerLM``.

    Fields:
      vocab_size: V.
      num_layers, num_heads, width: L, H and M; M is a multiple of H.
      mlp_width: hidden units of the feed-forward layer.
      bias: additive position bias; None for NoPE or rotary positions.
      rope_base: base of rotary positions; None for none.
      adapt: DAPE network; None for none.
      dtype: of the activations, "float32" or "bfloat16".
      backend: of ``dape_attention``.
      batch_axes: mesh axes over which the batch is split inside attention; () without a mesh.
      remat: what the backward pass computes again instead of keeping, a key of ``REMAT``.
    """

    vocab_size: int
    num_layers: int
    num_heads: int
    width: int
    mlp_width: int
    bias: biases.Bias | None = None
    rope_base: float | None = None
    adapt: adapt_lib.Adapt | None = None
    dtype: str = "float32"
    backend: str = "auto"
    batch_axes: tuple[str, ...] = ()
    remat: str = "none"

    def __post_init__(self):
        for name in ("vocab_size", "num_layers", "num_heads", "width", "mlp_width"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}: 1 or more is needed")
        if self.width % self.num_heads:
            raise UserError(f"width={self.width} is not divisible by num_heads={self.num_heads}")
        if self.rope_base is not None and (self.width // self.num_heads) % 2:
            raise UserError(f"width={self.width} / num_heads={self.num_heads} is odd; RoPE needs an even number")
        if self.remat not in REMAT:
            raise UserError(f"remat={self.remat!r} is unknown{nearest(self.remat, REMAT)}")


def small_init(width: int) -> nnx.Initializer:
    """Normal with standard deviation sqrt(2 / (5 width))."""
    return nnx.initializers.normal((2 / (5 * width)) ** 0.5)


def wang_init(width: int, num_layers: int) -> nnx.Initializer:
    """Normal with standard deviation 2 / (num_layers sqrt(width)): for what a block adds to the residual stream."""
    return nnx.initializers.normal(2 / (num_layers * width**0.5))


def _placed(x: jax.Array, axes: tuple[str, ...], rows: bool = True) -> jax.Array:
    """Keeps x split over the mesh by its first axis, or whole on every device; as it is without ``batch_axes``."""
    return jax.lax.with_sharding_constraint(x, PartitionSpec(axes) if rows else PartitionSpec()) if axes else x


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): [B, T, M] -> [B, T, M]."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        dtype, width = jnp.dtype(config.dtype), config.width
        inner, outer = small_init(width), wang_init(width, config.num_layers)
        self.attention_norm = nnx.LayerNorm(width, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.attention = Attention(
            width,
            config.num_heads,
            bias=config.bias,
            adapt=config.adapt,
            rope_base=config.rope_base,
            dtype=dtype,
            kernel_init=inner,
            out_init=outer,
            backend=config.backend,
            batch_axes=config.batch_axes,
            rngs=rngs,
        )
        self.mlp_norm = nnx.LayerNorm(width, epsilon=1e-5, dtype=dtype, rngs=rngs)
        self.mlp_in = nnx.Linear(width, config.mlp_width, dtype=dtype, kernel_init=inner, rngs=rngs)
        self.mlp_out = nnx.Linear(config.mlp_width, width, dtype=dtype, kernel_init=outer, rngs=rngs)

    def __call__(
        self, x: jax.Array, positions: jax.Array | None = None, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), positions, segment_ids)
        return x + self.mlp_out(nnx.gelu(self.mlp_in(self.mlp_norm(x))))


class TransformerLM(nnx.Module):
    """Token ids [B, T] to hidden states [B, T, M]. Parameters of the blocks are stacked [layers, ...].

    ``head`` [M, V] belongs to the model, but its product with the hidden states is the loss's business, which takes
    it in chunks; ``logits`` is for when all of them are wanted.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, init = config.width, small_init(config.width)
        self.embed = nnx.Embed(config.vocab_size, width, dtype=jnp.dtype(config.dtype), embedding_init=init, rngs=rngs)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.blocks = stacked(rngs)
        self.final_norm = nnx.LayerNorm(width, epsilon=1e-5, dtype=jnp.dtype(config.dtype), rngs=rngs)
        self.head = nnx.Linear(width, config.vocab_size, use_bias=False, dtype=jnp.float32, kernel_init=init, rngs=rngs)

    def __call__(
        self, tokens: jax.Array, positions: jax.Array | None = None, segment_ids: jax.Array | None = None
    ) -> jax.Array:
        """Final hidden states, in the activations' dtype."""

        axes = self.config.batch_axes

        def step(block: Block, x: jax.Array) -> jax.Array:
            return _placed(block(x, positions, segment_ids), axes)

        policy = REMAT[self.config.remat]
        if policy is not None:
            step = nnx.remat(step, prevent_cse=False, policy=policy)  # a scan's body is not subject to that CSE
        run = nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)

        # The table is gathered first: a lookup in one that is split along M would be resharded row by row.
        table = _placed(self.embed.embedding[...], axes, rows=False).astype(self.config.dtype)
        return self.final_norm(run(self.blocks, _placed(table[tokens], axes)))

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 [..., V] from hidden states [..., M]."""
        return self.head(hidden)
