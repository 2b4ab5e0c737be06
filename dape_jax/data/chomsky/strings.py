"""Tasks that copy, reorder or complete a string."""

import numpy as np

from dape_jax.data.chomsky.base import Task, draw
from dape_jax.errors import UserError


class ReverseString(Task):
    """The string from its end to its start.

    Example: ``00101 -> 10100``
    """

    name = "reverse_string"
    level = "context-free"
    input_symbols = output_symbols = "01"
    chance = 0.5

    def _output_length(self, length):
        return length

    def _sample(self, rng, batch, length):
        return draw(rng, 2, batch, length)

    def _solve(self, inputs):
        return inputs[:, ::-1]


class DuplicateString(Task):
    """The string twice.

    Example: ``101 -> 101101``
    """

    name = "duplicate_string"
    level = "context-sensitive"
    input_symbols = output_symbols = "01"
    chance = 0.5

    def _output_length(self, length):
        return 2 * length

    def _sample(self, rng, batch, length):
        return draw(rng, 2, batch, length)

    def _solve(self, inputs):
        return np.concatenate([inputs, inputs], 1)


class MissingDuplicateString(Task):
    """The symbol that is missing (?) from a string that is given twice.

    At odd lengths the input ends with a blank (_). Length 1 has no string: input and output are 1 by convention.

    Example: ``01100?10 -> 1`` (0110 twice)
    Example: ``101?01_ -> 1``
    """

    name = "missing_duplicate_string"
    level = "context-sensitive"
    input_symbols = "01?_"
    output_symbols = "01"
    chance = 0.5
    missing, blank = 2, 3

    def _sample(self, rng, batch, length):
        if length == 1:
            return np.ones((batch, 1), np.int64)
        half = length // 2
        inputs = np.full((batch, length), self.blank)
        inputs[:, :half] = inputs[:, half : 2 * half] = draw(rng, 2, batch, half)
        inputs[np.arange(batch), rng.integers(0, 2 * half, batch)] = self.missing
        return inputs

    def _solve(self, inputs):
        rows, length = inputs.shape
        if length == 1:
            return inputs
        half = length // 2
        missing = inputs == self.missing
        if not (missing[:, : 2 * half].sum(1) == 1).all() or missing[:, 2 * half :].any():
            raise UserError(f"an input of {self.name} has one ? in its two strings")
        where = np.argmax(missing, axis=1)
        return inputs[np.arange(rows), (where + half) % (2 * half)][:, None]


class OddsFirst(Task):
    """The symbols at odd places (the second, the fourth, ...), then those at even places (the first, the third, ...).

    Example: ``0001111 -> 0110011``
    """

    name = "odds_first"
    level = "context-sensitive"
    input_symbols = output_symbols = "01"
    chance = 0.5

    def _output_length(self, length):
        return length

    def _sample(self, rng, batch, length):
        return draw(rng, 2, batch, length)

    def _solve(self, inputs):
        return np.concatenate([inputs[:, 1::2], inputs[:, ::2]], 1)


class BucketSort(Task):
    """The symbols in rising order.

    Example: ``421302214 -> 011222344``
    """

    name = "bucket_sort"
    level = "context-sensitive"
    input_symbols = output_symbols = "01234"
    chance = 0.2
    permutation_invariant = True

    def _output_length(self, length):
        return length

    def _sample(self, rng, batch, length):
        return draw(rng, 5, batch, length)

    def _solve(self, inputs):
        return np.sort(inputs.astype(np.uint8), axis=1)  # NumPy sorts bytes by counting
