"""``dape_attention``, its backends and their block sizes."""

from dape_jax.attention.api import BACKENDS, choose_backend, dape_attention
from dape_jax.attention.blocks import BlockSizes

__all__ = ["BACKENDS", "BlockSizes", "choose_backend", "dape_attention"]
