"""Flax NNX modules, thin over the pure functions. They need no mesh and their parameters carry no sharding."""

from dape_jax.nn.attention import Attention
from dape_jax.nn.position import DAPE, PositionBias
from dape_jax.nn.transformer import Block, TransformerConfig, TransformerLM

__all__ = ["DAPE", "Attention", "Block", "PositionBias", "TransformerConfig", "TransformerLM"]
