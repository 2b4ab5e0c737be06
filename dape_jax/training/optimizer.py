"""AdamW as the paper trains with it, and the bounds that some bias parameters keep."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from dape_jax import biases
from dape_jax.config import OptimizerSection
from dape_jax.sharding import path_string

DECAYED = frozenset({"kernel", "w1", "w2"})
"""Weight decay acts on the parameters of these names: the kernels of linear layers, those of the DAPE and FIRE
networks included. Not on embeddings, LayerNorm, additive terms, nor on Kerple's and T5's own parameters."""


def schedule(config: OptimizerSection, steps: int) -> optax.Schedule:
    """Learning rate at a step: linear from 0 over the warm-up, then a cosine to its final fraction at ``steps``."""
    warmup = round(config.warmup_fraction * steps)
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=config.final_fraction * config.learning_rate,
    )


def make_optimizer(config: OptimizerSection, steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW with decay on the kernels of linear layers, chosen by name."""
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            schedule(config, steps),
            b1=config.b1,
            b2=config.b2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        ),
    )


def decay_mask(params: Any) -> Any:
    """Which parameters weight decay acts on."""
    return jax.tree.map_with_path(lambda path, _: path_string(path).split("/")[-1] in DECAYED, params)


def project(bias: biases.Bias | None, params: Any) -> Any:
    """Moves the position bias's parameters into their bounds, after an update (Kerple: p, a >= 0.01)."""
    bounds: Mapping[str, tuple[float, float]] = {} if bias is None else bias.bounds

    def bounded(path: tuple[Any, ...], x: jax.Array) -> jax.Array:
        parent, _, name = path_string(path).rpartition("/")
        return jnp.clip(x, *bounds[name]) if parent.endswith("attention/bias") and name in bounds else x

    return jax.tree.map_with_path(bounded, params) if bounds else params
