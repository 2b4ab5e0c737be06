"""Loss and training step as pure functions of (state, batch)."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from dape_jax import sharding
from dape_jax.data.packing import segments
from dape_jax.nn.transformer import TransformerConfig, TransformerLM
from dape_jax.training.optimizer import project

LOSS_CHUNK = 2**24
"""Logits that ``token_nll`` holds at once on a device, in numbers: 64 MiB of float32."""


class TrainState(NamedTuple):
    """Everything that a step changes."""

    params: Any
    opt_state: Any
    step: jax.Array


def graph(config: TransformerConfig) -> nnx.GraphDef:
    """The model without its parameters."""
    return nnx.split(nnx.eval_shape(lambda: TransformerLM(config, rngs=nnx.Rngs(0))))[0]


def init_params(config: TransformerConfig, key: jax.Array) -> dict[str, Any]:
    """Fresh parameters as nested dictionaries of arrays."""
    return nnx.to_pure_dict(nnx.state(TransformerLM(config, rngs=nnx.Rngs(params=key)), nnx.Param))


def make_model(config: TransformerConfig, params: Any) -> TransformerLM:
    """The module with given parameters."""
    return nnx.merge(graph(config), nnx.State(jax.tree.map(nnx.Param, params)))


def init_state(
    config: TransformerConfig, optimizer: optax.GradientTransformation, seed: int, mesh: Mesh
) -> tuple[Callable[[], TrainState], TrainState]:
    """A function that makes the initial state, sharded over ``mesh`` from the start, and the state's shapes."""

    def init() -> TrainState:
        params = init_params(config, jax.random.key(seed))
        return TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))

    shapes = jax.eval_shape(init)
    shardings = sharding.tree_sharding(mesh, shapes)
    abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    return jax.jit(init, out_shardings=shardings), abstract


def token_nll(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log-likelihood of each target, in nats, without all logits at once.

    Args:
      hidden: final hidden states [B, T, M].
      head: output kernel [M, V].
      targets: int32 [B, T].

    Returns:
      float32 [B, T].
    """
    batch, length, width = hidden.shape
    devices = jax.sharding.get_abstract_mesh().size
    chunk = max(1, min(length, devices * LOSS_CHUNK // (batch * head.shape[1])))
    pieces = -(-length // chunk)

    @jax.checkpoint  # logits of a piece are computed again in the backward pass rather than kept
    def piece(x: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden, targets = x
        logits = jnp.einsum("btm,mv->btv", hidden.astype(jnp.float32), head)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets)

    if pieces == 1:
        return piece((hidden, targets))
    padding = (0, pieces * chunk - length)
    hidden = jnp.pad(hidden, ((0, 0), padding, (0, 0))).reshape(batch, pieces, chunk, width)
    targets = jnp.pad(targets, ((0, 0), padding)).reshape(batch, pieces, chunk)
    nll = jax.lax.map(piece, (jnp.moveaxis(hidden, 1, 0), jnp.moveaxis(targets, 1, 0)))
    return jnp.moveaxis(nll, 0, 1).reshape(batch, -1)[:, :length]


def loss_fn(config: TransformerConfig, params: Any, rows: jax.Array, end_of_document: int | None = None) -> jax.Array:
    """Mean negative log-likelihood over rows [B, T + 1]: every token but a row's first is a target.

    With ``end_of_document``, attention and positions stay within each document and its first token is no target
    either.
    """
    model = make_model(config, params)
    inputs, targets, head = rows[:, :-1], rows[:, 1:], params["head"]["kernel"]
    if end_of_document is None:
        return token_nll(model(inputs), head, targets).mean()
    segment_ids, positions, weights = segments(inputs, end_of_document)
    nll = token_nll(model(inputs, positions, segment_ids), head, targets)
    return (nll * weights).sum() / jnp.maximum(weights.sum(), 1)


def train_step(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    rows: jax.Array,
    end_of_document: int | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update; returns the next state and the loss and gradient norm before it."""
    loss = functools.partial(loss_fn, config, end_of_document=end_of_document)
    loss, grads = jax.value_and_grad(loss)(state.params, rows)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = project(config.bias, optax.apply_updates(state.params, updates))
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads)}
    return TrainState(params, opt_state, state.step + 1), metrics


def compile_step(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    abstract: TrainState,
    mesh: Mesh,
    end_of_document: int | None = None,
) -> Callable[[TrainState, jax.Array], tuple[TrainState, dict[str, jax.Array]]]:
    """``train_step`` for ``jax.jit`` over a mesh; the state passed in is donated."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(
        functools.partial(train_step, config, optimizer, end_of_document=end_of_document),
        in_shardings=(shardings, sharding.batch_sharding(mesh)),
        out_shardings=(shardings, sharding.replicated(mesh)),
        donate_argnums=0,
    )
