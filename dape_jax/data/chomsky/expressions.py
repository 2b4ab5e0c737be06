"""Arithmetic with brackets: a grammar, its random expressions and their values, a whole batch at a time.

An expression of n symbols is, for n = 1, 2, 3, 4, a digit d as ``d``, ``-d``, ``(d)``, ``(-d)``, and beyond that
``(left operator right)`` with the left part uniform in length from 1 to n - 4. A bracket thus holds at most one
operator and precedence never matters.
"""

import dataclasses
import itertools

import numpy as np

from dape_jax.data.chomsky.base import Task, draw
from dape_jax.data.chomsky.regular import MINUS, MODULUS, PLUS, TIMES
from dape_jax.errors import UserError

MARGIN = 3
"""How far beyond a place ``Parsed`` looks."""


@dataclasses.dataclass(frozen=True)
class Alphabet:
    """The tokens of expressions: digits 0 to 4, then ``operators`` of +, - and *, then these."""

    operators: int

    @property
    def opening(self) -> int:
        return MODULUS + self.operators

    @property
    def closing(self) -> int:
        return self.opening + 1

    @property
    def unknown(self) -> int:
        return self.opening + 2

    @property
    def equals(self) -> int:
        return self.opening + 3

    def is_operator(self, tokens: np.ndarray) -> np.ndarray:
        return (tokens >= MODULUS) & (tokens < self.opening)


def sample_expressions(rng: np.random.Generator, batch: int, length: int, alphabet: Alphabet) -> np.ndarray:
    """Random expressions of the grammar, int64 [batch, length].

    All parts of all rows that lie equally deep are drawn at once; there are some 25 such levels at length 500.
    """
    tokens = np.empty(batch * length, np.int64)
    start, size = np.arange(batch) * length, np.full(batch, length)
    while start.size:
        leaf = size < 5
        first, n = start[leaf], size[leaf]
        bracket, negative = (n >= 3).astype(np.int64), (n % 2 == 0).astype(np.int64)
        # Written from the outside in; without a bracket or sign the digit comes last and takes the place.
        tokens[first] = tokens[first + n - 1] = alphabet.opening
        tokens[(first + n - 1)[bracket > 0]] = alphabet.closing
        tokens[first + bracket] = MINUS
        tokens[first + bracket + negative] = draw(rng, MODULUS, first.size)

        first, n = start[~leaf], size[~leaf]
        left = rng.integers(1, n - 3)
        tokens[first] = alphabet.opening
        tokens[first + n - 1] = alphabet.closing
        tokens[first + 1 + left] = MODULUS + draw(rng, alphabet.operators, first.size)
        start = np.concatenate([first + 1, first + 2 + left])
        size = np.concatenate([left, n - 3 - left])
    return tokens.reshape(batch, length)


class Parsed:
    """A batch of expressions of the grammar, taken apart once to be evaluated for any values of its digits.

    Args:
      tokens: int64 [B, L].

    Raises:
      UserError: a row is no expression of the grammar.
    """

    def __init__(self, tokens: np.ndarray, alphabet: Alphabet):
        rows, length = tokens.shape
        # Places are those of all rows end to end; a margin behind them lets every place be looked beyond.
        flat = np.concatenate([tokens.ravel(), np.full(MARGIN, -1)])
        starts = np.arange(rows) * length
        opening, closing, operator = flat == alphabet.opening, flat == alphabet.closing, alphabet.is_operator(flat)
        digit = (flat >= 0) & (flat < MODULUS)
        signed = flat == MINUS
        signed[1:] &= (opening | operator)[:-1]
        signed[starts] = tokens[:, 0] == MINUS
        signs = np.flatnonzero(signed)

        brackets = np.flatnonzero(opening | closing)
        depth = np.cumsum(np.where(opening[brackets], 1, -1)) + closing[brackets]
        # Brackets of one depth, in order, are opened and closed in turn. Sorting is fastest for small integers.
        order = np.argsort(depth.astype(np.min_scalar_type(-length)), kind="stable")
        depths, opened, closed = depth[order[::2]], brackets[order[::2]], brackets[order[1::2]]
        if opened.size != closed.size or not (opening[opened].all() and closing[closed].all()):
            raise UserError("the brackets of an expression do not match")

        # An operand is a digit, a sign and a digit, or a bracket; it is known by its first symbol's place.
        operand = digit | opening | signed
        last = np.arange(flat.size)
        last[signs] += 1
        last[opened] = closed
        left = opened + 1
        middle = last[left] + 1
        right = middle + 1
        single = middle == closed
        pair = operator[middle] & operand[right] & (last[right] + 1 == closed)
        whole = operand[starts] & (last[starts] == starts + length - 1)
        if not (whole.all() and operand[left].all() and (single | pair).all() and digit[signs + 1].all()):
            raise UserError("an expression is a digit, a sign and a digit, or (operand) or (operand operator operand)")

        self._starts, self._signs = starts, signs
        self._opened, self._left, self._right, self._operators = opened, left, right, flat[middle]
        bounds = [0, *(np.flatnonzero(np.diff(depths)) + 1).tolist(), depths.size]
        self._levels = [slice(a, b) for a, b in itertools.pairwise(bounds)][::-1]

    def values(self, digits: np.ndarray) -> np.ndarray:
        """The value of each expression modulo 5, int64 [B].

        Args:
          digits: the value of each symbol that is a digit, [B, L]; others are not looked at.
        """
        value = np.concatenate([digits.ravel(), np.zeros(MARGIN, np.int64)])
        value[self._signs] = -value[self._signs + 1]
        for level in self._levels:  # the innermost brackets first
            left, right, operator = value[self._left[level]], value[self._right[level]], self._operators[level]
            result = np.select(
                [operator == PLUS, operator == MINUS, operator == TIMES],
                [left + right, left - right, left * right],
                left,
            )
            value[self._opened[level]] = result % MODULUS
        return value[self._starts] % MODULUS


class ModularArithmeticBrackets(Task):
    """The value modulo 5 of an expression with brackets, of +, -, * and signs; the grammar is in ``expressions.py``.

    Products make zero the most frequent value, 29 % at length 41 and 31 % at 500, so always naming it beats chance.
    The token ``x`` never occurs.

    Example: ``((-1)+(3-3)) -> 4``
    """

    name = "modular_arithmetic_brackets"
    level = "context-free"
    input_symbols = "01234+-*()x"
    output_symbols = "01234"
    chance = 0.2
    alphabet = Alphabet(3)

    def _sample(self, rng, batch, length):
        return sample_expressions(rng, batch, length, self.alphabet)

    def _solve(self, inputs):
        return Parsed(inputs, self.alphabet).values(inputs)[:, None]


class SolveEquation(Task):
    """The digit that x stands for, modulo 5, in an equation of an expression of + and - and its value.

    The expression has length - 2 symbols; the grammar is in ``expressions.py``. A symbol of it is drawn uniformly, and
    the first digit from there on, around the end if need be, becomes x. Lengths 1 and 2 have no equation: inputs
    and output are 0 by convention.

    Example: ``((0)+(-x))=1 -> 4``
    """

    name = "solve_equation"
    level = "context-free"
    input_symbols = "01234+-()x="
    output_symbols = "01234"
    chance = 0.2
    alphabet = Alphabet(2)

    def _sample(self, rng, batch, length):
        inputs = np.zeros((batch, length), np.int64)
        if length < 3:
            return inputs
        expression = sample_expressions(rng, batch, length - 2, self.alphabet)
        inputs[:, -2] = self.alphabet.equals
        inputs[:, -1] = Parsed(expression, self.alphabet).values(expression)
        place = np.arange(length - 2)
        after = (place - rng.integers(0, length - 2, (batch, 1))) % (length - 2)
        x = np.where(expression < MODULUS, after, length).argmin(1)
        expression[np.arange(batch), x] = self.alphabet.unknown
        inputs[:, :-2] = expression
        return inputs

    def _solve(self, inputs):
        rows, length = inputs.shape
        if length < 3:
            return np.zeros((rows, 1), np.int64)
        expression = inputs[:, :-2]
        unknown = expression == self.alphabet.unknown
        value = inputs[:, -1]
        if not ((unknown.sum(1) == 1) & (inputs[:, -2] == self.alphabet.equals) & (value < MODULUS)).all():
            raise UserError(f"an input of {self.name} is an expression with one x, then = and a digit")
        at_zero = np.where(unknown, 0, expression)
        parsed = Parsed(at_zero, self.alphabet)
        constant, sign = parsed.values(at_zero), parsed.values(unknown.astype(np.int64))
        # Alone among zeros x gives its sign, which is its own inverse.
        return (sign * (value - constant) % MODULUS)[:, None]
