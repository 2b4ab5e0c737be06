"""Flax NNX modules, thin over the pure functions. They need no mesh and their parameters carry no sharding."""

from dape_jax.nn.attention import Attention, KeyValues
from dape_jax.nn.position import DAPE, PositionBias, PositionEmbedding
from dape_jax.nn.transformer import Block, Cache, TransformerConfig, TransformerLM

__all__ = [
    "DAPE", "Attention", "Block", "Cache", "KeyValues", "PositionBias", "PositionEmbedding", "TransformerConfig",
    "TransformerLM",
]  # fmt: skip
