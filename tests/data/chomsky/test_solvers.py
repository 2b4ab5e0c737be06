"""Each solver against a definition of its own, in plain Python, up to length 500."""

import itertools
import math

import numpy as np
import pytest

from dape_jax.data.chomsky import TASKS, generator
from dape_jax.data.chomsky.base import decode, encode

LENGTHS = [*range(1, 15), 39, 40, 63, 64, 65, 256, 499, 500]
ROWS = 5


def even_pairs(text):
    return str(sum(a + b in ("01", "10") for a, b in itertools.pairwise(text)) % 2)


def cycle_navigation(text):
    place = 0
    for step in text:
        place = {"-": [4, 0, 1, 2, 3], "0": [0, 1, 2, 3, 4], "+": [1, 2, 3, 4, 0]}[step][place]
    return str(place)


def value(text):
    return str(eval(text) % 5)


def solve_equation(text):
    if len(text) < 3:
        return "0"
    left, right = text.split("=")
    (solution,) = [x for x in "01234" if value(left.replace("x", x)) == right]
    return solution


def missing_duplicate_string(text):
    if text == "1":
        return "1"
    half = len(text) // 2
    (solution,) = [x for x in "01" if (full := text.replace("?", x))[:half] == full[half : 2 * half]]
    return solution


def odds_first(text):
    return "".join(c for i, c in enumerate(text, 1) if i % 2 == 0) + "".join(
        c for i, c in enumerate(text, 1) if i % 2 == 1
    )


def stack_manipulation(text):
    stack = []
    for c in text:
        if c == "<":
            del stack[-1:]
        else:
            stack.append({"a": "0", "b": "1"}.get(c, c))
    return ended("".join(reversed(stack)), len(text) + 1)


def ended(text, length):
    return (text + "#").ljust(length, "0")


def number(little_endian):
    return int(little_endian[::-1], 2)


def written(n):
    return f"{n:b}"[::-1]


def binary_addition(text):
    return ended(written(sum(map(number, text.split("+")))), len(text) + 1)


def binary_multiplication(text):
    if len(text) <= 2:
        return "0#"[-len(text) :]
    first, second = map(number, text.split("*"))
    return ended(written(first * second), len(text))


def compute_sqrt(text):
    root = 0  # bit by bit from the top
    for bit in reversed(range((len(text) + 1) // 2)):
        if (root | 1 << bit) ** 2 <= int(text, 2):
            root |= 1 << bit
    assert root**2 <= int(text, 2) < (root + 1) ** 2
    return f"{root:b}".zfill((len(text) + 1) // 2)


DEFINITIONS = {
    "even_pairs": even_pairs,
    "modular_arithmetic": value,
    "parity_check": lambda text: str(text.count("1") % 2),
    "cycle_navigation": cycle_navigation,
    "stack_manipulation": stack_manipulation,
    "reverse_string": lambda text: "".join(reversed(text)),
    "modular_arithmetic_brackets": value,
    "solve_equation": solve_equation,
    "duplicate_string": lambda text: text * 2,
    "missing_duplicate_string": missing_duplicate_string,
    "odds_first": odds_first,
    "binary_addition": binary_addition,
    "binary_multiplication": binary_multiplication,
    "compute_sqrt": compute_sqrt,
    "bucket_sort": lambda text: "".join(sorted(text)),
}


@pytest.mark.parametrize("name", sorted(TASKS))
def test_solver_is_the_definition(name):
    task = TASKS[name]
    for length in LENGTHS:
        inputs = task.sample(generator(11, length), ROWS, length)
        expected = [DEFINITIONS[name](decode(task.input_symbols, row)) for row in inputs]
        assert [decode(task.output_symbols, row) for row in task.solve(inputs)] == expected, length


@pytest.mark.parametrize("name", sorted(TASKS))
def test_rows_do_not_touch_each_other(name):
    task = TASKS[name]
    for length in (1, 2, 3, 8, 41):
        inputs = task.sample(generator(12, length), 9, length)
        outputs = task.solve(inputs)
        assert outputs.shape == (9, task.output_length(length))
        for row in range(9):
            assert np.array_equal(task.solve(inputs[row : row + 1])[0], outputs[row])
        assert np.array_equal(task.solve(inputs[::-1]), outputs[::-1])


def test_permutation_invariance_is_what_the_paper_marks():
    marked = {name for name in TASKS if TASKS[name].permutation_invariant}
    assert marked == {"parity_check", "cycle_navigation", "bucket_sort"}
    for name in marked:
        inputs = TASKS[name].sample(generator(13, 0), 64, 12)
        assert np.array_equal(TASKS[name].solve(np.sort(inputs, axis=1)), TASKS[name].solve(inputs))


@pytest.mark.parametrize(("name", "text", "expected"), [
    ("binary_addition", "1" * 249 + "+" + "1" * 250, written(2**249 + 2**250 - 2)),
    ("binary_addition", "1+" + "1" * 498, "0" * 498 + "1"),
    ("binary_addition", "1" * 498 + "+1", "0" * 498 + "1"),
    ("binary_multiplication", "1" * 249 + "*" + "1" * 250, written((2**249 - 1) * (2**250 - 1))),
    ("binary_multiplication", "1" + "0" * 497 + "*1", "1"),
    ("binary_multiplication", "0" * 248 + "1*" + "0" * 249 + "1", "0" * 497 + "1"),
])  # fmt: skip
def test_carries_over_hundreds_of_bits(name, text, expected):
    task = TASKS[name]
    assert len(text) == 500
    outputs = task.solve(encode(task.input_symbols, text)[None])
    assert decode(task.output_symbols, outputs[0]) == ended(expected, task.output_length(500))
    assert task.mask(outputs).sum() == len(expected) + 1


@pytest.mark.parametrize("length", [1, 2, 3, 63, 64, 65, 499, 500])
def test_square_roots_beside_squares(length):
    task = TASKS["compute_sqrt"]
    root = math.isqrt(2**length - 1)  # the largest that there is
    for n, r in ((root**2, root), (root**2 - 1, root - 1), (2**length - 1, root)):
        outputs = task.solve(encode("01", f"{n:b}".zfill(length))[None])
        assert int(decode("01", outputs[0]), 2) == r


@pytest.mark.parametrize(("name", "text"), [
    ("modular_arithmetic", "4*" * 249 + "4"),
    ("modular_arithmetic", "4*" * 100 + "0*" + "3*" * 100 + "2-1*1-0*1"),
    ("modular_arithmetic", "1-2*3-4*2*2"),
    ("modular_arithmetic_brackets", "(" * 166 + "-1" + "-2)" * 166),
    ("modular_arithmetic_brackets", "((((-3))))"),
    ("modular_arithmetic_brackets", "(-3--(-4))".replace("--(", "-(")),
    ("modular_arithmetic_brackets", "(-3--4)"),
    ("modular_arithmetic_brackets", "((-3*-4)--2)"),
])  # fmt: skip
def test_expressions_of_unusual_shape(name, text):
    task = TASKS[name]
    assert decode(task.output_symbols, task.solve(encode(task.input_symbols, text)[None])[0]) == value(text)
