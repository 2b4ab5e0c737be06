"""Regular languages: a finite memory solves them."""

import numpy as np

from dape_jax.data.chomsky.base import Task, draw
from dape_jax.errors import UserError

MODULUS = 5
PLUS, MINUS, TIMES = MODULUS, MODULUS + 1, MODULUS + 2

POWERS = np.array([1, 2, 4, 3])
"""2^k modulo 5: every non-zero residue is one of them."""
LOGARITHMS = np.array([0, 0, 1, 3, 2])
"""k of the residue 2^k; that of zero is not used."""


class EvenPairs(Task):
    """Whether the neighbours that differ, 01 and 10 together, are even (0) or odd (1) in number.

    That is whether the first symbol differs from the last.

    Example: ``0010110 -> 0`` (01, 10, 01, 10)
    """

    name = "even_pairs"
    level = "regular"
    input_symbols = output_symbols = "01"
    chance = 0.5

    def _sample(self, rng, batch, length):
        return draw(rng, 2, batch, length)

    def _solve(self, inputs):
        return inputs[:, :1] ^ inputs[:, -1:]


class ParityCheck(Task):
    """Whether the number of ones is even (0) or odd (1).

    Example: ``0110100 -> 1``
    """

    name = "parity_check"
    level = "regular"
    input_symbols = output_symbols = "01"
    chance = 0.5
    permutation_invariant = True

    def _sample(self, rng, batch, length):
        return draw(rng, 2, batch, length)

    def _solve(self, inputs):
        return inputs.sum(1, keepdims=True) % 2


class CycleNavigation(Task):
    """The final position on a circle of 5 places, from place 0, after steps back (-), none (0) and forth (+).

    Example: ``+0-- -> 4``
    """

    name = "cycle_navigation"
    level = "regular"
    input_symbols = "-0+"
    output_symbols = "01234"
    chance = 0.2
    permutation_invariant = True

    def _sample(self, rng, batch, length):
        return draw(rng, 3, batch, length)

    def _solve(self, inputs):
        return (inputs - 1).sum(1, keepdims=True) % 5


class ModularArithmetic(Task):
    """The value modulo 5 of a sum, difference and product of digits without brackets; products come first.

    An expression has odd length: an even ``length`` gives inputs one shorter (see ``input_length``). The token ``_``
    never occurs.

    Example: ``4+4*4+2-1+2 -> 3``
    """

    name = "modular_arithmetic"
    level = "regular"
    input_symbols = "01234+-*_"
    output_symbols = "01234"
    chance = 0.2

    def input_length(self, length):
        """``length``, or one less where that is even."""
        return self._checked(length) - (1 - length % 2)

    def _sample(self, rng, batch, length):
        inputs = np.empty((batch, length), np.int64)
        inputs[:, ::2] = draw(rng, MODULUS, batch, length // 2 + 1)
        inputs[:, 1::2] = PLUS + draw(rng, 3, batch, length // 2)
        return inputs

    def _solve(self, inputs):
        if (inputs[:, ::2] >= MODULUS).any() or (inputs[:, 1::2] < PLUS).any() or (inputs > TIMES).any():
            raise UserError(f"an input of {self.name} is a digit, then any number of +, - or * and a digit")
        rows, count = inputs[:, ::2].shape
        digits = inputs[:, ::2].ravel()
        operators = np.full((rows, count), PLUS)
        operators[:, 1:] = inputs[:, 1::2]
        operators = operators.ravel()
        # A term begins at each + and -, and at each row. Products of hundreds of digits fit no integer, so they are
        # sums of logarithms, and zeros are counted apart.
        first = np.flatnonzero(operators != TIMES)
        terms = POWERS[np.add.reduceat(LOGARITHMS[digits], first) % 4]
        terms[np.add.reduceat(digits == 0, first, dtype=np.int64) > 0] = 0
        terms[operators[first] == MINUS] *= -1
        row_starts = np.searchsorted(first, np.arange(rows) * count)
        return np.add.reduceat(terms, row_starts)[:, None] % MODULUS
