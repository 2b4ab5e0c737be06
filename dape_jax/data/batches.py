"""Batches as a function of the step: row r of global batch n depends on (seed, n, r) alone.

Windows of ``length + 1`` tokens lie end to end over a split, sharing one token, so that every token but the first is
a target once an epoch; Grain shuffles them anew each epoch by index. A process reads its own rows of each batch, and
resuming at step n means starting at n: nothing else is stored.
"""

from collections.abc import Callable, Iterator
from typing import Any

import grain.python as grain
import numpy as np

from dape_jax.data.cache import TokenCache
from dape_jax.errors import UserError


class Windows:
    """Random access to the windows of ``length + 1`` tokens of a split: int32 [length + 1] each."""

    def __init__(self, cache: TokenCache, split: str, length: int):
        self._tokens = cache.tokens
        self._first, last = cache.split_bounds(split)
        self._length = length
        self._count = (last - self._first - 1) // length
        if self._count < 1:
            raise UserError(
                f"data.sequence_length={length}: the {split} split has {last - self._first} tokens, "
                "too few for one window"
            )

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index) -> np.ndarray:
        start = self.start(int(index))
        return np.asarray(self._tokens[start : start + self._length + 1], np.int32)

    def start(self, index: int) -> int:
        """Where the window begins in the cache's token array."""
        return self._first + index * self._length


def training_batches(
    cache: TokenCache,
    length: int,
    batch_size: int,
    seed: int,
    first_step: int,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[np.ndarray]:
    """Yields this process's rows of batch ``first_step`` and all later ones, int32 [rows, length + 1], without end."""
    if batch_size % process_count:
        raise UserError(f"training.batch_size={batch_size} cannot be split over {process_count} processes")
    rows_per_process = batch_size // process_count
    windows = Windows(cache, "train", length)
    order = _order(len(windows), seed)

    def batch(step: int) -> np.ndarray:
        first = step * batch_size + process_index * rows_per_process
        return np.stack([windows[order(first + row)] for row in range(rows_per_process)])

    # Grain counts an endless dataset by the largest integer; the sum with first_step must stay below it.
    steps = grain.MapDataset.range(first_step, 2**40).map(batch)
    return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)))


def row_origins(cache: TokenCache, length: int, batch_size: int, seed: int, batch: int) -> list[dict[str, Any]]:
    """Where each row of global batch number ``batch`` comes from.

    Returns:
      For each row its number, ``documents``: the names of those that its tokens belong to, and ``offset``: the
      position of its first token in the first of them.
    """
    windows = Windows(cache, "train", length)
    order = _order(len(windows), seed)
    names, bounds = cache.split_documents("train")
    origins = []
    for row in range(batch_size):
        start = windows.start(order(batch * batch_size + row))
        first = int(np.searchsorted(bounds[:, 1], start, side="right"))
        last = int(np.searchsorted(bounds[:, 1], start + length, side="right"))
        origins.append({"row": row, "documents": names[first : last + 1], "offset": start - int(bounds[first, 0])})
    return origins


def _order(windows: int, seed: int) -> Callable[[int], int]:
    """The n-th window of training: all in random order, shuffled anew each epoch, without end."""
    order = grain.MapDataset.range(windows).seed(seed).shuffle().repeat()
    return lambda n: int(np.asarray(order[n]))
