"""Sampling from a trained model, token by token with a cache."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dape_jax.data.tokenizer import Tokenizer
from dape_jax.errors import UserError
from dape_jax.nn.transformer import Cache, TransformerConfig
from dape_jax.training.model import make_model


@dataclasses.dataclass(frozen=True)
class Options:
    """How a token is chosen from its distribution.

    Fields:
      temperature: the logits are divided by it; 0 takes the most probable token.
      top_k: only so many of the most probable tokens are drawn from; None for all.
      top_p: only the fewest most probable tokens that together have this probability are drawn from.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise UserError(f"temperature={self.temperature}: a number of 0 or more is needed")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k={self.top_k}: 1 or more is needed")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p}: a number above 0, up to 1, is needed")


def choose(logits: jax.Array, key: jax.Array, options: Options = Options()) -> jax.Array:
    """Token ids int32 [B] from float32 logits [B, V]."""
    if options.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # The largest becomes 0, whatever it is divided by, as long as that is not a subnormal number, which may count as 0.
    temperature = max(options.temperature, float(jnp.finfo(jnp.float32).tiny))
    logits = (logits - logits.max(axis=-1, keepdims=True)) / temperature
    ordered = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
    least = jnp.full_like(ordered[:, :1], -jnp.inf)
    if options.top_k is not None:
        least = ordered[:, min(options.top_k, logits.shape[-1]) - 1, None]
        ordered = jnp.where(ordered >= least, ordered, -jnp.inf)
    if options.top_p < 1:
        probabilities = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        least = jnp.where(before < options.top_p, ordered, jnp.inf).min(axis=-1, keepdims=True)
    return jax.random.categorical(key, jnp.where(logits >= least, logits, -jnp.inf)).astype(jnp.int32)


def generate(
    config: TransformerConfig,
    params: Any,
    prompt: np.ndarray,
    count: int,
    key: jax.Array,
    options: Options = Options(),
) -> Iterator[np.ndarray]:
    """The ``count`` tokens that follow a prompt, one at a time.

    Args:
      config: the model. Its positions are those for reading all of the prompt and the new tokens (YaRN's scale).
      params: its parameters.
      prompt: int [B, P], P at least 1.
      count: tokens to sample after it.
      key: of the choices and, apart from them, of randomised positions.
      options: how a token is chosen.

    Returns:
      An iterator of int32 [B].

    Raises:
      UserError: the model has no positions for so many tokens.
    """
    batch, length = prompt.shape
    if length < 1 or count < 1:
        raise UserError(f"a prompt of {length} and {count} more tokens: 1 or more of each is needed")
    try:
        config = config.for_length(length + count)
    except UserError as e:
        raise UserError(f"a prompt of {length} and {count} more tokens: {e}") from e
    positions_key, key = jax.random.split(key)
    cache = make_model(config, params).init_cache(batch, length + count, positions_key)
    return _generate(_extend(config, options), params, prompt, cache, jax.random.split(key, count))


def _generate(extend: Callable, params: Any, prompt: np.ndarray, cache: Cache, keys: jax.Array) -> Iterator[np.ndarray]:
    tokens = jnp.asarray(prompt, jnp.int32)
    for key in keys:
        chosen, cache = extend(params, tokens, cache, key)
        yield np.asarray(chosen)
        tokens = chosen[:, None]


@functools.lru_cache(maxsize=4)
def _extend(config: TransformerConfig, options: Options) -> Callable[..., tuple[jax.Array, Cache]]:
    def extend(params: Any, tokens: jax.Array, cache: Cache, key: jax.Array) -> tuple[jax.Array, Cache]:
        model = make_model(config, params)
        hidden, cache = model.extend(tokens, cache)
        return choose(model.logits(hidden[:, -1]), key, options), cache

    return jax.jit(extend, donate_argnums=2)


class TextStream:
    """Text from ids that arrive one at a time. A character that takes several ids appears with its last one."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0

    def push(self, token: int) -> str:
        """The text that ``token`` completes."""
        self._ids.append(token)
        text = self._tokenizer.decode(np.asarray(self._ids))
        return "" if text.endswith("\ufffd") else self._take(text)

    def finish(self) -> str:
        """What is left: characters that were never completed."""
        return self._take(self._tokenizer.decode(np.asarray(self._ids))) if self._ids else ""

    def _take(self, text: str) -> str:
        new, self._shown = text[self._shown :], len(text)
        return new
