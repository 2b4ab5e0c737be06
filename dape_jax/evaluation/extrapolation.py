"""Scores the windows of a plan at a list of lengths: one loop for every protocol."""

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from dape_jax import sharding
from dape_jax.evaluation.windows import Windows
from dape_jax.nn.transformer import TransformerConfig
from dape_jax.training.model import make_model
from dape_jax.training.objective import token_nll
from dape_jax.training.run import Run
from dape_jax.training.stop import StopFlag, Stopped, agreed

TOKENS_PER_DEVICE = 2**14
"""Tokens in one forward pass on a device; a length above it is one row a device."""


class LengthScores(NamedTuple):
    """What one length's windows sum to.

    Attributes:
      nll_sums: float64 [windows], negative log-likelihoods of each window's scored tokens, summed, in nats; the mean
        over draws where positions are randomised.
      nll_draws: float64 [draws], the sum over all windows for each draw of positions.
      targets: int64 [windows], how many tokens those are.
      rows: rows that ran at once.
      seconds: how long it took.
    """

    nll_sums: np.ndarray
    nll_draws: np.ndarray
    targets: np.ndarray
    rows: int
    seconds: float


def score(
    run: Run,
    params: Any,
    windows_by_length: Sequence[Windows],
    show_progress: bool = True,
    stop: StopFlag | None = None,
    draws: int = 1,
    draw_seed: int = 0,
) -> dict[int, LengthScores]:
    """Scores the windows of every length.

    The last batch of a length is filled up with rows, and a window with inputs, of zero weight. Memory does not grow
    with the number of windows but for a few numbers of each.

    Args:
      run: the model, text and devices.
      params: the model's parameters.
      windows_by_length: what to score.
      show_progress: whether there is a progress bar.
      stop: ends the evaluation between two batches.
      draws: of randomised positions, each for all windows; other models are scored once.
      draw_seed: the positions of draw i at length L are those of this seed, L and i, whatever runs at once.

    Raises:
      Stopped: ``stop`` was set on any process, which is looked at before each batch.
    """
    before = run.tokens.manifest["tokenizer"]["end_of_document"]["id"]
    scores = {}
    draws = 1 if run.model.random_range is None else draws
    progress = tqdm(
        total=draws * sum(len(w) * w.length for w in windows_by_length),
        desc="evaluating",
        unit="token",
        unit_scale=True,
        disable=not show_progress,
    )
    with jax.set_mesh(run.mesh), progress:
        for windows in windows_by_length:
            progress.set_postfix_str(f"length {windows.length}")
            started = time.monotonic()
            rows = rows_at_once(windows.length, len(windows), run.mesh.size)
            fn = _scorer(run.model.for_length(windows.length), windows.scored, run.mesh)
            key = jax.random.fold_in(jax.random.key(draw_seed), windows.length)
            sums = np.zeros((draws, len(windows)), np.float64)
            for draw, first in itertools.product(range(draws), range(0, len(windows), rows)):
                if stop is not None and (signal_number := agreed(stop.signal_number)):
                    raise Stopped(signal_number, "before the report was written; start the same command again")
                last = min(first + rows, len(windows))
                batch = windows.rows(run.tokens.tokens, first, rows, before)
                rows_of_all = sharding.put_batch(run.mesh, batch)
                nll = np.asarray(fn(params, rows_of_all, jax.random.fold_in(key, draw)))[: last - first]
                sums[draw, first:last] = np.where(windows.weights(first, last), nll, 0).sum(axis=1, dtype=np.float64)
                progress.update((last - first) * windows.length)
            seconds = time.monotonic() - started
            scores[windows.length] = LengthScores(sums.mean(axis=0), sums.sum(axis=1), windows.targets(), rows, seconds)
    return scores


def rows_at_once(length: int, windows: int, devices: int) -> int:
    """Rows of one forward pass over all devices: what fits TOKENS_PER_DEVICE, no more than needed."""
    per_device = max(1, min(TOKENS_PER_DEVICE // length, -(-windows // devices)))
    return per_device * devices


@functools.lru_cache(maxsize=4)
def _scorer(config: TransformerConfig, k: int, mesh: Mesh) -> Callable[[Any, jax.Array, jax.Array], jax.Array]:
    def nll(params: Any, rows: jax.Array, key: jax.Array) -> jax.Array:
        hidden = make_model(config, params)(rows[:, :-1], key=key)
        return token_nll(hidden[:, -k:], params["head"]["kernel"], rows[:, -k:])

    return jax.jit(nll, out_shardings=sharding.replicated(mesh))  # so that every process can read all of it
