"""Loss and training step as pure functions of (state, batch)."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, PartitionSpec

from dape_jax import sharding
from dape_jax.nn.transformer import TransformerConfig
from dape_jax.training.model import init_params
from dape_jax.training.objective import Batch, Objective, position_key
from dape_jax.training.optimizer import project


class TrainState(NamedTuple):
    """Everything that a step changes."""

    params: Any
    opt_state: Any
    step: jax.Array


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


def loss_fn(
    config: TransformerConfig,
    objective: Objective,
    params: Any,
    batch: Batch,
    key: jax.Array | None = None,
    targets: jax.Array | None = None,
) -> jax.Array:
    """Mean negative log-likelihood of a batch's targets.

    ``targets`` is what to divide the sum by, where the batch is a part of another; default their own number. ``key`` is
    for randomised positions.
    """
    targets = objective.targets(batch) if targets is None else targets
    return objective.nll(config, params, batch, key) / targets


def loss_and_grads(
    config: TransformerConfig,
    objective: Objective,
    params: Any,
    batch: Batch,
    microbatches: int = 1,
    key: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """The mean loss over a batch of B rows and its gradient, computed ``microbatches`` parts of the rows at a time.

    Every part is divided by the targets of all rows, so the sum is the mean over all of them, however they are
    spread. B is a multiple of ``microbatches`` times the number of devices in the mesh. Randomised positions are drawn
    with ``key``, for each part anew.
    """
    targets = objective.targets(batch)

    def loss(params: Any, part: Batch, key: jax.Array | None) -> jax.Array:
        return loss_fn(config, objective, params, part, key, targets)

    loss_and_grad = jax.value_and_grad(loss)
    if microbatches == 1:
        return loss_and_grad(params, batch, key)

    def add(total: Any, part: tuple[Batch, jax.Array | None]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, loss_and_grad(params, *part)), None

    zeros = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
    keys = None if key is None else jax.random.split(key, microbatches)
    parts = jax.tree.map(functools.partial(_split_rows, config.batch_axes, microbatches), batch)
    return jax.lax.scan(add, zeros, (parts, keys))[0]


def _split_rows(axes: tuple[str, ...], parts: int, rows: jax.Array) -> jax.Array:
    """[B, ...] to [parts, B / parts, ...]. Every part has rows of every device, which so keeps the rows it holds."""
    devices = jax.sharding.get_abstract_mesh().size if axes else 1
    batch, *rest = rows.shape
    cut = rows.reshape(devices, parts, batch // (devices * parts), *rest).swapaxes(0, 1)
    cut = cut.reshape(parts, batch // parts, *rest)
    return jax.lax.with_sharding_constraint(cut, PartitionSpec(None, axes)) if axes else cut


def train_step(
    config: TransformerConfig,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    microbatches: int,
    seed: int,
    state: TrainState,
    batch: Batch,
    step: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The update that follows ``step`` completed ones.

    It is applied if its loss, gradient and change of the parameters are finite and if ``state`` has completed
    ``step`` updates. Otherwise the state is returned as it was: so all that follow an update that was not applied
    are not applied either, and a caller may look at the metrics later than it starts the next step.

    Returns:
      The next state, and ``loss`` and ``grad_norm`` before the update and the norm of the update itself.
    """
    key = position_key(config, seed, step)
    loss, grads = loss_and_grads(config, objective, state.params, batch, microbatches, key)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = project(config.bias, optax.apply_updates(state.params, updates))
    metrics = {"loss": loss, "grad_norm": optax.tree.norm(grads), "update_norm": optax.tree.norm(updates)}
    apply = jnp.stack([jnp.isfinite(x) for x in metrics.values()]).all() & (state.step == step)
    after = TrainState(params, opt_state, state.step + 1)
    return jax.tree.map(lambda new, old: jnp.where(apply, new, old), after, state), metrics


def compile_step(
    config: TransformerConfig,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    abstract: TrainState,
    mesh: Mesh,
    microbatches: int = 1,
    seed: int = 0,
) -> Callable[[TrainState, Batch, np.int32], tuple[TrainState, dict[str, jax.Array]]]:
    """``train_step`` under ``jax.jit`` over a mesh, a function of (state, batch, step); the state is donated."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(
        functools.partial(train_step, config, objective, optimizer, microbatches, seed),
        in_shardings=(shardings, sharding.batch_sharding(mesh), sharding.replicated(mesh)),
        out_shardings=(shardings, sharding.replicated(mesh)),
        donate_argnums=0,
    )
