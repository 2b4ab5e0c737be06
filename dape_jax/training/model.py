"""A model and its parameters as separate things: nested dictionaries of arrays, and the module that they fill."""

from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from dape_jax import sharding
from dape_jax.nn.transformer import TransformerConfig, TransformerLM


def graph(config: TransformerConfig) -> nnx.GraphDef:
    """The model without its parameters."""
    return nnx.split(nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0))))[0]


def init_params(config: TransformerConfig, key: jax.Array) -> dict[str, Any]:
    """Fresh parameters as nested dictionaries of arrays."""
    return nnx.to_pure_dict(nnx.state(TransformerLM(config, rngs=nnx.Rngs(params=key)), nnx.Param))


def abstract_params(config: TransformerConfig, mesh: Mesh) -> Any:
    """Shapes and shardings of the parameters over ``mesh``, to restore a checkpoint into."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    shardings = sharding.tree_sharding(mesh, shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def make_model(config: TransformerConfig, params: Any) -> TransformerLM:
    """The module with given parameters."""
    return nnx.merge(graph(config), nnx.State(jax.tree.map(nnx.Param, params)))
