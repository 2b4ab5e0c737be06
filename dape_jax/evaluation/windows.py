"""Which tokens are read and which are scored: pure functions of where the documents of a split lie.

A window is a run of inputs in the token array and, one further each, their targets; a length has windows of that many
inputs, of which the last ``scored`` predictions count. Three ways to lay them:

``choose_targets`` and ``windows_before`` (last_k): the same targets at every length, within documents.
``stream_windows`` (official): the split as one stream, cut anew at each length, the last targets of each piece.
``segments`` (non_overlapping): the split as one stream in pieces, every token a target once, the last piece shorter.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

from dape_jax.data.cache import TokenCache
from dape_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Windows:
    """The windows of one length.

    Fields:
      length: inputs that the model reads, padding included.
      scored: how many of its last predictions are scored, 1 to ``length``, less what falls on padding.
      start: int64 [windows], position of the first input in the token array; -1 is before its first token.
      inputs: int64 [windows], inputs that are tokens, 1 to ``length``; what follows them is padding of zero weight.
      available: windows that there were to choose from.
    """

    length: int
    scored: int
    start: np.ndarray
    inputs: np.ndarray
    available: int

    def __len__(self) -> int:
        return len(self.start)

    def weights(self, first: int, last: int) -> np.ndarray:
        """bool [windows, scored]: which of the last predictions of windows ``first`` to before ``last`` count."""
        return np.arange(self.length - self.scored, self.length) < self.inputs[first:last, None]

    def targets(self) -> np.ndarray:
        """int64 [windows], scored tokens of each."""
        return np.maximum(self.inputs - (self.length - self.scored), 0)

    def rows(self, tokens: np.ndarray, first: int, count: int, before: int) -> np.ndarray:
        """Inputs and last target of ``count`` windows from the ``first`` on: int32 [count, length + 1].

        Padding, and rows beyond the last window, are zero. ``before`` is the id that stands before ``tokens``.
        """
        rows = np.zeros((count, self.length + 1), np.int32)
        for row, start, inputs in zip(rows, self.start[first:], self.inputs[first:], strict=False):
            if start < 0:
                row[0] = before
            row[max(0, -start) : inputs + 1] = tokens[max(0, start) : start + inputs + 1]
        return rows


class Targets(NamedTuple):
    """Targets of last_k.

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


def choose_targets(cache: TokenCache, split: str, longest: int, k: int, max_windows: int) -> Targets:
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
    return Targets(
        [names[i] for i in chosen], np.asarray(document), np.asarray(end, np.int64), len(names) - len(usable)
    )


def windows_before(end: np.ndarray, length: int, k: int) -> Windows:
    """The windows of ``length`` inputs whose last targets are at ``end``, K of them scored."""
    return Windows(length, k, end - length, np.full(len(end), length, np.int64), len(end))


def stream_windows(first: int, last: int, length: int, k: int, max_windows: int) -> Windows:
    """At most ``max_windows`` pieces, evenly spread, of those that tokens ``first`` to before ``last`` are cut into.

    A piece has ``length`` inputs and shares its last target with the next one's first input; the last ``k`` are
    scored, or all where there are fewer. What is left of the stream is too short for a piece.
    """
    count = (last - first - 1) // length
    if count < 1:
        raise UserError(f"lengths: {length} is too long for one window of the {last - first} tokens there are")
    chosen = np.linspace(0, count - 1, min(count, max_windows)).round().astype(np.int64)
    return Windows(length, min(k, length), first + chosen * length, np.full(len(chosen), length, np.int64), count)


def segments(first: int, last: int, length: int) -> Windows:
    """All tokens ``first`` to before ``last``, each a target once, in pieces of ``length``; the last may be shorter.

    The input that predicts the very first is what precedes it: the end of the document before.
    """
    if length > last - first:
        raise UserError(
            f"lengths: {length} is longer than the {last - first} tokens to score; no segment would fill it"
        )
    start = np.arange(first - 1, last - 1, length, dtype=np.int64)
    return Windows(length, length, start, np.minimum(length, last - 1 - start), len(start))
