"""Loss and training step as pure functions of (state, batch)."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from dape_jax import sharding
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


def loss_fn(config: TransformerConfig, params: Any, rows: jax.Array) -> jax.Array:
    """Mean negative log-likelihood over rows [B, T + 1]: every token but a row's first is a target."""
    model = make_model(config, params)
    return token_nll(model(rows[:, :-1]), params["head"]["kernel"], rows[:, 1:]).mean()


def loss_and_grads(
    config: TransformerConfig, params: Any, rows: jax.Array, microbatches: int = 1
) -> tuple[jax.Array, Any]:
    """The mean loss over rows [B, T + 1] and its gradient, computed ``microbatches`` parts of the rows at a time.

    Microbatches are equally large, so the mean of their means is the mean over all rows. B is a multiple of
    ``microbatches`` times the number of devices in the mesh.
    """
    loss_and_grad = jax.value_and_grad(functools.partial(loss_fn, config))
    if microbatches == 1:
        return loss_and_grad(params, rows)

    def add(total: Any, part: jax.Array) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, loss_and_grad(params, part)), None

    zeros = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(add, zeros, _split_rows(config.batch_axes, rows, microbatches))
    return jax.tree.map(lambda x: x / microbatches, total)


def _split_rows(axes: tuple[str, ...], rows: jax.Array, parts: int) -> jax.Array:
    """[B, T] to [parts, B / parts, T]. Every part has rows of every device, which so keeps the rows that it holds."""
    devices = jax.sharding.get_abstract_mesh().size if axes else 1
    batch, length = rows.shape
    cut = rows.reshape(devices, parts, batch // (devices * parts), length).swapaxes(0, 1)
    cut = cut.reshape(parts, batch // parts, length)
    return jax.lax.with_sharding_constraint(cut, PartitionSpec(None, axes)) if axes else cut


def train_step(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    microbatches: int,
    state: TrainState,
    rows: jax.Array,
    step: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The update that follows ``step`` completed ones.

    It is applied if its loss, gradient and change of the parameters are finite and if ``state`` has completed
    ``step`` updates. Otherwise the state is returned as it was: so all that follow an update that was not applied
    are not applied either, and a caller may look at the metrics later than it starts the next step.

    Returns:
      The next state, and ``loss`` and ``grad_norm`` before the update and the norm of the update itself.
    """
    loss, grads = loss_and_grads(config, state.params, rows, microbatches)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = project(config.bias, optax.apply_updates(state.params, updates))
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "update_norm": optax.tree.norm(updates)}
    apply = jnp.stack([jnp.isfinite(x) for x in metrics.values()]).all() & (state.step == step)
    after = TrainState(params, opt_state, state.step + 1)
    return jax.tree.map(lambda new, old: jnp.where(apply, new, old), after, state), metrics


def compile_step(
    config: TransformerConfig,
    optimizer: optax.GradientTransformation,
    abstract: TrainState,
    mesh: Mesh,
    microbatches: int = 1,
) -> Callable[[TrainState, jax.Array, np.int32], tuple[TrainState, dict[str, jax.Array]]]:
    """``train_step`` under ``jax.jit`` over a mesh, a function of (state, rows, step); the state is donated."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(
        functools.partial(train_step, config, optimizer, microbatches),
        in_shardings=(shardings, sharding.batch_sharding(mesh), sharding.replicated(mesh)),
        out_shardings=(shardings, sharding.replicated(mesh)),
        donate_argnums=0,
    )
