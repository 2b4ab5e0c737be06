"""What is minimised: the negative log-likelihoods of a batch's targets, and how many these are."""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from dape_jax.absolute import random_positions
from dape_jax.data.packing import segments
from dape_jax.nn.transformer import TransformerConfig
from dape_jax.training.model import make_model

LOSS_CHUNK = 2**24
"""Logits that ``token_nll`` holds at once on a device, in numbers: 64 MiB of float32."""

Batch = Any
"""An array or a tree of arrays, rows first."""


class Objective(Protocol):
    """Hashable, since a compiled step holds it."""

    def targets(self, batch: Batch) -> jax.Array:
        """How many targets a batch has, float32 [], 1 where there are none."""
        ...

    def nll(self, config: TransformerConfig, params: Any, batch: Batch, key: jax.Array | None) -> jax.Array:
        """Their negative log-likelihood summed, float32 [], in nats. ``key`` is for randomised positions."""
        ...


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Language modelling on rows int32 [B, T + 1]: every token but a row's first is a target.

    With ``end_of_document``, the id that ends documents, attention and positions stay within each document and its
    first token is no target either.
    """

    end_of_document: int | None = None

    def targets(self, batch: jax.Array) -> jax.Array:
        if self.end_of_document is None:
            return jnp.asarray(batch.shape[0] * (batch.shape[1] - 1), jnp.float32)
        return jnp.maximum(segments(batch[:, :-1], self.end_of_document)[2].sum(), 1).astype(jnp.float32)

    def nll(self, config: TransformerConfig, params: Any, batch: jax.Array, key: jax.Array | None) -> jax.Array:
        model, inputs, labels, head = make_model(config, params), batch[:, :-1], batch[:, 1:], params["head"]["kernel"]
        if self.end_of_document is None:
            return token_nll(model(inputs, key=key), head, labels).sum()
        segment_ids, positions, weights = segments(inputs, self.end_of_document)
        return (token_nll(model(inputs, positions, segment_ids, key), head, labels) * weights).sum()


@dataclasses.dataclass(frozen=True)
class Transduction:
    """Outputs read at placeholders, on rows of one input length, padded to a common width T.

    A batch has ``tokens`` int32 [B, T], ``targets`` int32 [B, T] where ``weights`` [B, T] is 1, and ``valid`` bool
    [B, T], False on padding, which nobody attends to.
    """

    def targets(self, batch: dict[str, jax.Array]) -> jax.Array:
        return jnp.maximum(batch["weights"].sum(), 1).astype(jnp.float32)

    def nll(
        self, config: TransformerConfig, params: Any, batch: dict[str, jax.Array], key: jax.Array | None
    ) -> jax.Array:
        hidden = read(config, params, batch, key)
        return (token_nll(hidden, params["head"]["kernel"], batch["targets"]) * batch["weights"]).sum()


def read(config: TransformerConfig, params: Any, batch: dict[str, jax.Array], key: jax.Array | None) -> jax.Array:
    """Hidden states [B, T, M] of the rows of a ``Transduction`` batch."""
    valid, positions = batch["valid"], None
    if config.random_range is not None and key is not None:
        # As many as there are valid tokens, so that padding does not change what they are.
        count = valid.sum(axis=1).max()
        positions = random_positions(key, valid.shape[1], config.random_range, count)
    return make_model(config, params)(batch["tokens"], positions, valid=valid)


def position_key(config: TransformerConfig, seed: int, step: jax.Array | int) -> jax.Array | None:
    """The key that randomised positions are drawn with at ``step``; None for a model without them."""
    return None if config.random_range is None else jax.random.fold_in(jax.random.key(seed), step)


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
