"""The modules of ``dape_jax.nn`` as Flax Linen modules, through ``flax.nnx.bridge``.

Each takes the arguments of its NNX namesake but ``rngs``, and ``name``. The parameters are plain arrays in the
collection "params", with the names that they have there.

    y = linen.Attention(768, 12, bias=KerpleLog(), adapt=Adapt(), name="attention")(x)
"""

import functools
from typing import Any

from flax import nnx
from flax.core import FrozenDict
from flax.nnx import bridge

from dape_jax import nn


def _linen(cls: type[nnx.Module], *args: Any, name: str | None = None, **kwargs: Any) -> bridge.ToLinen:
    # Without metadata_fn=None a parameter with metadata would arrive in a box of NNX's.
    return bridge.ToLinen(cls, args=args, kwargs=FrozenDict(kwargs), metadata_fn=None, name=name)


Attention = functools.partial(_linen, nn.Attention)
PositionBias = functools.partial(_linen, nn.PositionBias)
DAPE = functools.partial(_linen, nn.DAPE)
PositionEmbedding = functools.partial(_linen, nn.PositionEmbedding)
Block = functools.partial(_linen, nn.Block)
TransformerLM = functools.partial(_linen, nn.TransformerLM)

__all__ = ["DAPE", "Attention", "Block", "PositionBias", "PositionEmbedding", "TransformerLM"]
