"""Last-K perplexity at a list of lengths: the same target tokens under growing context.

A window ends at a position of a held-out document. At every length L the model reads the L tokens before the end and
its last K predictions are scored, so every length scores the same K targets, and a shorter length only sees less of
what precedes them. Documents too short for the longest length are left out at all lengths.
"""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from dape_jax import sharding
from dape_jax.data.cache import TokenCache
from dape_jax.errors import UserError
from dape_jax.nn.transformer import TransformerConfig
from dape_jax.training.run import Run
from dape_jax.training.step import make_model, token_nll
from dape_jax.training.stop import StopFlag, Stopped, agreed

TOKENS_PER_DEVICE = 2**14
"""Tokens in one forward pass on a device; a length above it is one row a device."""


class WindowPlan(NamedTuple):
    """Which tokens are scored.

    Attributes:
      names: documents in use.
      document: int [windows], index into ``names``.
      end: int64 [windows], position in the token array of each window's last target.
      too_short: number of documents too short for the longest length.
    """

    names: list[str]
    document: np.ndarray
    end: np.ndarray
    too_short: int


class LengthScores(NamedTuple):
    """Negative log-likelihoods at one length, float32 [windows, K], how many rows ran at once, and the seconds."""

    nll: np.ndarray
    rows: int
    seconds: float


def check_lengths(lengths: list[int], k: int | None) -> tuple[list[int], int]:
    """Sorted lengths and K; K None is the smaller of 256 and the shortest length."""
    if not lengths:
        raise UserError("lengths: at least one is needed")
    for length in lengths:
        if not 1 <= length < 2**31:
            raise UserError(f"lengths: {length} is no length; 1 to 2**31 - 1 is needed")
    if len(set(lengths)) != len(lengths):
        raise UserError(f"lengths: {sorted(lengths)} names one twice")
    k = min(256, *lengths) if k is None else k
    if not 1 <= k <= min(lengths):
        raise UserError(f"k={k}: the last k predictions are scored; k is from 1 to the shortest length {min(lengths)}")
    return sorted(lengths), k


def plan_windows(cache: TokenCache, split: str, longest: int, k: int, max_windows: int) -> WindowPlan:
    """Chooses at most ``max_windows`` windows with disjoint targets, over as many documents as possible."""
    names, bounds = cache.split_documents(split)
    # The longest window needs `longest` inputs and, one further, its last target.
    capacity = np.maximum(0, (bounds[:, 1] - bounds[:, 0] - 1 - longest) // k + 1)
    capacity[bounds[:, 1] - bounds[:, 0] - 1 < longest] = 0
    usable = np.flatnonzero(capacity)
    if not len(usable):
        most = int((bounds[:, 1] - bounds[:, 0]).max()) - 1
        raise UserError(f"lengths: {longest} is longer than every {split} document; the longest admits {most}")
    if len(usable) > max_windows:
        chosen = usable[np.linspace(0, len(usable) - 1, max_windows).round().astype(int)]
    else:
        chosen = usable
    counts = np.zeros(len(chosen), int)
    while counts.sum() < max_windows and (open_ := counts < capacity[chosen]).any():
        counts[np.flatnonzero(open_)[: max_windows - counts.sum()]] += 1
    document, end = [], []
    for index, (source, count) in enumerate(zip(chosen, counts, strict=True)):
        last = bounds[source, 1]
        slots = np.linspace(0, capacity[source] - 1, count).round().astype(np.int64)
        document += [index] * int(count)
        end += (last - 1 - slots * k).tolist()
    return WindowPlan(
        [names[i] for i in chosen], np.asarray(document), np.asarray(end, np.int64), len(names) - len(usable)
    )


def score(
    run: Run,
    params: Any,
    plan: WindowPlan,
    lengths: list[int],
    k: int,
    show_progress: bool = True,
    stop: StopFlag | None = None,
) -> dict[int, LengthScores]:
    """Scores the windows of ``plan`` at every length.

    Raises:
      Stopped: ``stop`` was set on any process, which is looked at before each batch.
    """
    windows = len(plan.end)
    scores = {}
    progress = tqdm(
        total=windows * sum(lengths), desc="evaluating", unit="token", unit_scale=True, disable=not show_progress
    )
    with jax.set_mesh(run.mesh), progress:
        for length in lengths:
            progress.set_postfix_str(f"length {length}")
            started = time.monotonic()
            rows = rows_at_once(length, windows, run.mesh.size)
            fn = _scorer(run.model, k, run.mesh)
            parts = []
            for first in range(0, windows, rows):
                if stop is not None and (signal_number := agreed(stop.signal_number)):
                    raise Stopped(signal_number, "before the report was written; start the same command again")
                ends = plan.end[first : first + rows]
                # The last batch is filled up with copies of its first row; their scores are dropped.
                filled = np.concatenate([ends, np.full(rows - len(ends), ends[0])])
                batch = np.stack([run.tokens.tokens[e - length : e + 1] for e in filled]).astype(np.int32)
                parts.append(np.asarray(fn(params, sharding.put_batch(run.mesh, batch)))[: len(ends)])
                progress.update(len(ends) * length)
            scores[length] = LengthScores(np.concatenate(parts), rows, time.monotonic() - started)
    return scores


def rows_at_once(length: int, windows: int, devices: int) -> int:
    """Rows of one forward pass over all devices: what fits TOKENS_PER_DEVICE, no more than needed."""
    per_device = max(1, min(TOKENS_PER_DEVICE // length, -(-windows // devices)))
    return per_device * devices


@functools.lru_cache(maxsize=4)
def _scorer(config: TransformerConfig, k: int, mesh: Mesh) -> Callable[[Any, jax.Array], jax.Array]:
    def nll(params: Any, rows: jax.Array) -> jax.Array:
        hidden = make_model(config, params)(rows[:, :-1])
        return token_nll(hidden[:, -k:], params["head"]["kernel"], rows[:, -k:])

    return jax.jit(nll, out_shardings=sharding.replicated(mesh))  # so that every process can read all of it
