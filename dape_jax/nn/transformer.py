"""A transformer, causal or not: pre-LayerNorm, GELU, untied output, the paper's initialisers, scanned blocks."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from dape_jax import adapt as adapt_lib
from dape_jax import biases
from dape_jax.absolute import Absolute, random_positions
from dape_jax.attention import backend_of_shapes
from dape_jax.errors import UserError, nearest
from dape_jax.nn.attention import Attention, KeyValues
from dape_jax.nn.position import PositionEmbedding
from dape_jax.rotary import RoPE

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
      num_kv_heads: heads of keys and values, a divisor of H; None for H.
      bias: additive position bias; None for none.
      rotary: rotary positions; None for none.
      absolute: position embeddings added to those of the tokens; None for none.
      random_range: positions are drawn from so many, sorted, anew for each key; None for 0, 1, 2 ...
      adapt: DAPE network; None for none.
      causal: whether a token attends only to itself and earlier ones.
      output_size: numbers that the head returns for a token; None for V.
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
    num_kv_heads: int | None = None
    bias: biases.Bias | None = None
    rotary: RoPE | None = None
    absolute: Absolute | None = None
    random_range: int | None = None
    adapt: adapt_lib.Adapt | None = None
    causal: bool = True
    output_size: int | None = None
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
        if self.num_kv_heads is not None and (self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads):
            raise UserError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}")
        if self.rotary is not None and (self.width // self.num_heads) % 2:
            raise UserError(f"width={self.width} / num_heads={self.num_heads} is odd; RoPE needs an even number")
        if self.remat not in REMAT:
            raise UserError(f"remat={self.remat!r} is unknown{nearest(self.remat, REMAT)}")
        table = None if self.absolute is None else self.absolute.max_length
        if self.random_range is not None and table is not None and table < self.random_range:
            raise UserError(
                f"random_range={self.random_range}: positions up to it are drawn, and the learned table has {table}"
            )

    def check_length(self, length: int) -> None:
        """Refuses a sequence of ``length`` tokens that there are not enough positions for."""
        if self.random_range is not None and length > self.random_range:
            raise UserError(f"{length} tokens are more than the {self.random_range} positions that are drawn from")
        table = None if self.absolute is None else self.absolute.max_length
        if table is not None and length > table:
            raise UserError(f"{length} tokens are more than the {table} positions of the learned table")

    def attention_backend(self, length: int) -> str:
        """The attention backend that sequences of ``length`` tokens get on this platform."""
        shape = (1, length, self.num_heads, self.width // self.num_heads)
        return backend_of_shapes(
            self.backend, shape, self.num_kv_heads or self.num_heads, self.dtype, bias=self.bias, adapt=self.adapt,
            causal=self.causal,
        )  # fmt: skip

    def for_length(self, length: int) -> "TransformerConfig":
        """The model to read sequences of ``length`` tokens with: YaRN's scale depends on it, nothing else does."""
        self.check_length(length)
        return self if self.rotary is None else dataclasses.replace(self, rotary=self.rotary.for_length(length))


class Cache(NamedTuple):
    """What a ``TransformerLM`` keeps of the tokens that it has read.

    Attributes:
      layers: keys and values, each [layers, B, C, N, d] for a capacity of C tokens.
      positions: int32 [C], of all tokens that it can hold.
      length: int32 [], tokens read so far.
    """

    layers: KeyValues
    positions: jax.Array
    length: jax.Array


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
            num_kv_heads=config.num_kv_heads,
            bias=config.bias,
            adapt=config.adapt,
            rotary=config.rotary,
            causal=config.causal,
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
        self,
        x: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        valid: jax.Array | None = None,
    ) -> jax.Array:
        return self._feed_forward(x + self.attention(self.attention_norm(x), positions, segment_ids, valid))

    def extend(
        self, x: jax.Array, cache: KeyValues, index: jax.Array, positions: jax.Array
    ) -> tuple[jax.Array, KeyValues]:
        """The same for the tokens that follow those in the cache; see ``Attention.extend``."""
        attended, cache = self.attention.extend(self.attention_norm(x), cache, index, positions)
        return self._feed_forward(x + attended), cache

    def _feed_forward(self, x: jax.Array) -> jax.Array:
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
        absolute = config.absolute
        self.positions = None if absolute is None else PositionEmbedding(absolute, width, rngs=rngs)

        @nnx.split_rngs(splits=config.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs: nnx.Rngs) -> Block:
            return Block(config, rngs=rngs)

        self.blocks = stacked(rngs)
        self.final_norm = nnx.LayerNorm(width, epsilon=1e-5, dtype=jnp.dtype(config.dtype), rngs=rngs)
        out = config.vocab_size if config.output_size is None else config.output_size
        self.head = nnx.Linear(width, out, use_bias=False, dtype=jnp.float32, kernel_init=init, rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array | None = None,
        segment_ids: jax.Array | None = None,
        key: jax.Array | None = None,
        valid: jax.Array | None = None,
    ) -> jax.Array:
        """Final hidden states, in the activations' dtype.

        Args:
          tokens: int32 [B, T].
          positions: int32 [T] or [B, T]; default 0 .. T-1.
          segment_ids: int32 [B, T]; only equal ones attend to each other.
          key: for randomised positions: T positions are drawn with it, and ``positions`` says which of them each token
            has. Without a key, ``positions`` are what was drawn. Other models do not read it.
          valid: bool [B, T]; False marks padding, which nobody attends to.
        """
        axes, length = self.config.batch_axes, tokens.shape[1]
        self.config.check_length(length)
        if self.config.random_range is not None and (positions is None or key is not None):
            drawn = self._drawn_positions(length, key)
            positions = drawn if positions is None else drawn[positions]

        def step(block: Block, x: jax.Array) -> jax.Array:
            return _placed(block(x, positions, segment_ids, valid), axes)

        policy = REMAT[self.config.remat]
        if policy is not None:
            step = nnx.remat(step, prevent_cse=False, policy=policy)  # a scan's body is not subject to that CSE
        run = nnx.scan(step, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        counted = jnp.arange(length, dtype=jnp.int32) if positions is None else positions
        return self.final_norm(run(self.blocks, self._embedded(tokens, counted)))

    def init_cache(self, batch: int, capacity: int, key: jax.Array | None = None) -> Cache:
        """An empty cache for ``batch`` sequences of up to ``capacity`` tokens; ``key`` as for a call."""
        config = self.config
        shape = (config.num_layers, batch, capacity, config.num_kv_heads or config.num_heads)
        # Two arrays, so that a cache can be donated.
        k, v = (jnp.zeros((*shape, config.width // config.num_heads), config.dtype) for _ in range(2))
        return Cache(KeyValues(k, v), self._drawn_positions(capacity, key), jnp.zeros((), jnp.int32))

    def extend(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Final hidden states [B, n, M] of the next n tokens [B, n] after those in the cache, and the cache with them.

        Equal to the last n of a call with all tokens so far; with DAPE V2, of one with as many tokens as the cache can
        hold, since its convolution reaches beyond the last key. Tokens beyond the capacity give NaN.
        """
        index, count = cache.length, tokens.shape[1]

        def step(block: Block, x: jax.Array, layer: KeyValues) -> tuple[jax.Array, KeyValues]:
            return block.extend(x, layer, index, cache.positions)

        run = nnx.scan(step, in_axes=(0, nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        own = jax.lax.dynamic_slice_in_dim(cache.positions, index, count)
        x, layers = run(self.blocks, self._embedded(tokens, own), cache.layers)
        fits = index + count <= cache.positions.shape[0]
        hidden = jnp.where(fits, self.final_norm(x), jnp.nan)
        return hidden, Cache(layers, cache.positions, index + count)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32 [..., V] from hidden states [..., M]."""
        return self.head(hidden)

    def _drawn_positions(self, length: int, key: jax.Array | None) -> jax.Array:
        """The positions int32 [length] of tokens 0 .. length - 1."""
        self.config.check_length(length)
        if self.config.random_range is None:
            return jnp.arange(length, dtype=jnp.int32)
        if key is None:
            raise UserError("key: randomised positions are drawn with one; pass key=jax.random.key(...)")
        return random_positions(key, length, self.config.random_range)

    def _embedded(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Embeddings [B, T, M] of tokens and, where they are absolute, positions."""
        axes, dtype = self.config.batch_axes, self.config.dtype
        # The table is gathered first: a lookup in one that is split along M would be resharded row by row.
        x = _placed(self.embed.embedding[...], axes, rows=False).astype(dtype)[tokens]
        if self.positions is not None:
            embedded = self.positions(positions).astype(dtype)
            x = x + (embedded if positions.ndim == 2 else embedded[None])
        return _placed(x, axes)
