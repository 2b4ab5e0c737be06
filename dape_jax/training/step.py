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


def abstract_params(config: TransformerConfig, mesh: Mesh) -> Any:
    """Shapes and shardings of the parameters over ``mesh``, to restore a checkpoint into."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0)))
    shardings = sharding.tree_sharding(mesh, shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


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


def loss_fn(
    config: TransformerConfig,
    params: Any,
    rows: jax.Array,
    end_of_document: int | None = None,
    targets: jax.Array | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """Mean negative log-likelihood over rows [B, T + 1]: every token but a row's first is a target.

    With ``end_of_document``, attention and positions stay within each document and its first token is no target
    either. ``targets`` is what to divide the sum by, where the rows are a part of a batch; default their own number.
    ``key`` is for randomised positions.
    """
    model = make_model(config, params)
    inputs, labels, head = rows[:, :-1], rows[:, 1:], params["head"]["kernel"]
    targets = count_targets(rows, end_of_document) if targets is None else targets
    if end_of_document is None:
        return token_nll(model(inputs, key=key), head, labels).sum() / targets
    segment_ids, positions, weights = segments(inputs, end_of_document)
    return (token_nll(model(inputs, positions, segment_ids, key), head, labels) * weights).sum() / targets


def count_targets(rows: jax.Array, end_of_document: int | None) -> jax.Array:
    """How many tokens of rows [B, T + 1] the loss counts, as float32; 1 where there are none."""
    if end_of_document is None:
        return jnp.asarray(rows.shape[0] * (rows.shape[1] - 1), jnp.float32)
    return jnp.maximum(segments(rows[:, :-1], end_of_document)[2].sum(), 1).astype(jnp.float32)


def loss_and_grads(
    config: TransformerConfig,
    params: Any,
    rows: jax.Array,
    microbatches: int = 1,
    end_of_document: int | None = None,
    key: jax.Array | None = None,
) -> tuple[jax.Array, Any]:
    """The mean loss over rows [B, T + 1] and its gradient, computed ``microbatches`` parts of the rows at a time.

    Every part is divided by the targets of all rows, so the sum is the mean over all of them, however they are
    spread. B is a multiple of ``microbatches`` times the number of devices in the mesh. Randomised positions are drawn
    with ``key``, for each part anew.
    """
    targets = count_targets(rows, end_of_document)

    def loss(params: Any, part: jax.Array, key: jax.Array | None) -> jax.Array:
        return loss_fn(config, params, part, end_of_document, targets, key)

    loss_and_grad = jax.value_and_grad(loss)
    if microbatches == 1:
        return loss_and_grad(params, rows, key)

    def add(total: Any, part: tuple[jax.Array, jax.Array | None]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, loss_and_grad(params, *part)), None

    zeros = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
    keys = None if key is None else jax.random.split(key, microbatches)
    return jax.lax.scan(add, zeros, (_split_rows(config.batch_axes, rows, microbatches), keys))[0]


def position_key(config: TransformerConfig, seed: int, step: jax.Array | int) -> jax.Array | None:
    """The key that randomised positions are drawn with at ``step``; None for a model without them."""
    return None if config.random_range is None else jax.random.fold_in(jax.random.key(seed), step)


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
    end_of_document: int | None,
    state: TrainState,
    rows: jax.Array,
    step: jax.Array,
    seed: int = 0,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The update that follows ``step`` completed ones.

    It is applied if its loss, gradient and change of the parameters are finite and if ``state`` has completed
    ``step`` updates. Otherwise the state is returned as it was: so all that follow an update that was not applied
    are not applied either, and a caller may look at the metrics later than it starts the next step.

    Returns:
      The next state, and ``loss`` and ``grad_norm`` before the update and the norm of the update itself.
    """
    key = position_key(config, seed, step)
    loss, grads = loss_and_grads(config, state.params, rows, microbatches, end_of_document, key)
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
    end_of_document: int | None = None,
    seed: int = 0,
) -> Callable[[TrainState, jax.Array, np.int32], tuple[TrainState, dict[str, jax.Array]]]:
    """``train_step`` under ``jax.jit`` over a mesh, a function of (state, rows, step); the state is donated."""
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    return jax.jit(
        functools.partial(train_step, config, optimizer, microbatches, end_of_document, seed=seed),
        in_shardings=(shardings, sharding.batch_sharding(mesh), sharding.replicated(mesh)),
        out_shardings=(shardings, sharding.replicated(mesh)),
        donate_argnums=0,
    )
