"""Arithmetic on binary numbers of any size; Python's integers make it exact."""

import math
from collections.abc import Iterable

import numpy as np

from dape_jax.data.chomsky.base import END, Task, draw
from dape_jax.errors import UserError

OPERATOR = 2


class _Binary(Task):
    """What addition and multiplication share: the distribution of the two numbers, and the form of the result."""

    level = "context-sensitive"
    output_symbols = "01#"
    chance = 0.5
    terminator = END

    def _sample(self, rng, batch, length):
        if length <= 2:
            # No room for an operator: all bit strings but the one of ones only, as the reference program draws them.
            number = rng.integers(0, 2**length - 1, (batch, 1))
            return number >> np.arange(length) & 1
        first = rng.integers(1, length - 1, (batch, 1))
        bits = draw(rng, 2, batch, length)
        place = np.arange(length)
        for part in (place < first, place > first):
            _fill_zeros(rng, bits, part)
        bits[place == first] = OPERATOR
        return bits

    def _operands(self, inputs: np.ndarray) -> Iterable[tuple[int, int]]:
        operator = inputs == OPERATOR
        if not (operator.sum(1) == 1).all():
            raise UserError(f"an input of {self.name} has one {self.input_symbols[OPERATOR]!r}")
        where = np.argmax(operator, axis=1)
        before = np.arange(inputs.shape[1]) < where[:, None]
        first = _integers(inputs * before, "little")
        second = _integers(inputs * ~(before | operator), "little")
        return ((n, m >> at + 1) for n, m, at in zip(first, second, where.tolist(), strict=True))

    def _written(self, numbers: list[int], length: int) -> np.ndarray:
        outputs = _bits(numbers, length, "little")
        ends = [max(n.bit_length(), 1) for n in numbers]
        outputs[np.arange(len(numbers)), ends] = END
        return outputs


class BinaryAddition(_Binary):
    """The sum of two positive numbers in binary, the lowest bit first.

    The first number takes 1 to length - 2 bits, uniformly, the second the rest; each is uniform over the positive
    numbers of at most so many bits. The output ends with #, and the zeros behind it do not count. At lengths 1 and 2
    there is one number, 0 or 0 to 2, and the sum is that number.

    Example: ``001+01101 -> 01011#0000`` (4 + 22 = 26)
    """

    name = "binary_addition"
    input_symbols = "01+"

    def _output_length(self, length):
        return length + 1

    def _solve(self, inputs):
        length = inputs.shape[1]
        pairs = ((n, 0) for n in _integers(inputs, "little")) if length <= 2 else self._operands(inputs)
        return self._written([n + m for n, m in pairs], length + 1)


class BinaryMultiplication(_Binary):
    """The product of two positive numbers in binary, the lowest bit first.

    The first number takes 1 to length - 2 bits, uniformly, the second the rest; each is uniform over the positive
    numbers of at most so many bits. The output ends with #, and the zeros behind it do not count. At lengths 1 and 2
    there is one number, 0 or 0 to 2, and the output is # or 0# whatever it is.

    Example: ``001*01101 -> 0001101#0`` (4 * 22 = 88)
    """

    name = "binary_multiplication"
    input_symbols = "01*"

    def _output_length(self, length):
        return length

    def _solve(self, inputs):
        rows, length = inputs.shape
        if length <= 2:
            outputs = np.zeros((rows, length), np.int64)
            outputs[:, -1] = END
            return outputs
        return self._written([n * m for n, m in self._operands(inputs)], length)


class ComputeSqrt(Task):
    """The whole part of the square root of a positive number, both in binary, the highest bit first.

    The number is uniform over the positive ones of at most ``length`` bits; the root has ``ceil(length / 2)`` bits.

    Example: ``100101 -> 110`` (37 and 6)
    """

    name = "compute_sqrt"
    level = "context-sensitive"
    input_symbols = output_symbols = "01"
    chance = 0.5

    def _output_length(self, length):
        return (length + 1) // 2

    def _sample(self, rng, batch, length):
        bits = draw(rng, 2, batch, length)
        _fill_zeros(rng, bits, np.ones_like(bits, bool))
        return bits

    def _solve(self, inputs):
        length = inputs.shape[1]
        roots = [math.isqrt(n) for n in _integers(inputs, "big")]
        return _bits(roots, self._output_length(length), "big")


def _fill_zeros(rng: np.random.Generator, bits: np.ndarray, part: np.ndarray) -> None:
    """Draws each row's part [B, n] anew, in place, until it is not all zeros; the other numbers stay equally likely."""
    while (rows := np.flatnonzero(~(bits * part).any(1))).size:
        bits[rows] = np.where(part[rows], draw(rng, 2, rows.size, bits.shape[1]), bits[rows])


def _integers(bits: np.ndarray, order: str) -> list[int]:
    """The number that each row of bits [B, n] writes, its lowest ("little") or highest ("big") bit first."""
    if bits.size and bits.max() > 1:
        raise UserError("a binary number is written in 0 and 1")
    if order == "big":
        bits = bits[:, ::-1]
    packed = np.packbits(bits.astype(np.uint8), axis=1, bitorder="little")
    return [int.from_bytes(row.tobytes(), "little") for row in packed]


def _bits(numbers: list[int], length: int, order: str) -> np.ndarray:
    """The inverse of ``_integers``: int64 [B, length]."""
    size = (length + 7) // 8
    packed = np.frombuffer(b"".join(n.to_bytes(size, "little") for n in numbers), np.uint8).reshape(-1, size)
    bits = np.unpackbits(packed, axis=1, count=length, bitorder="little").astype(np.int64)
    return bits if order == "little" else bits[:, ::-1]
