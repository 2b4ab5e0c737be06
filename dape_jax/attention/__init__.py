"""``dape_attention``, its backends and their block sizes."""

from dape_jax.attention.api import BACKENDS, backend_of_shapes, choose_backend, dape_attention
from dape_jax.attention.blocks import BlockSizes
from dape_jax.attention.target import compile_for

__all__ = ["BACKENDS", "BlockSizes", "backend_of_shapes", "choose_backend", "compile_for", "dape_attention"]
