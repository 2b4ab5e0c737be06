"""What the samplers draw: distributions over whole inputs at short lengths, over labels and parts at long ones."""

import itertools
from collections import Counter, defaultdict

import numpy as np
import pytest
from scipy.special import chdtrc

from dape_jax.data.chomsky import TASKS, generator
from dape_jax.data.chomsky.base import decode

SAMPLES = 20_000


def assert_distribution(seen, expected):
    """No outcome beyond the expected ones, and a chi-squared test of their frequencies at one in a thousand."""
    seen = Counter(seen)
    assert set(seen) <= set(expected)
    total = sum(seen.values())
    assert sum(expected.values()) == pytest.approx(1)
    counts = [(seen[key], total * p) for key, p in expected.items()]
    assert min(e for _, e in counts) > 5, "too few samples for so many outcomes"
    if len(counts) > 1:
        assert chdtrc(len(counts) - 1, sum((o - e) ** 2 / e for o, e in counts)) > 1e-3
    else:
        assert set(seen) == set(expected)


def texts(name, length, samples=SAMPLES):
    task = TASKS[name]
    return [decode(task.input_symbols, row) for row in task.sample(generator(21, length), samples, length)]


def uniform(outcomes):
    outcomes = list(outcomes)
    return dict.fromkeys(outcomes, 1 / len(outcomes))


def strings(symbols, length):
    return map("".join, itertools.product(symbols, repeat=length))


@pytest.mark.parametrize(("name", "symbols"), [
    ("even_pairs", "01"), ("parity_check", "01"), ("cycle_navigation", "-0+"), ("reverse_string", "01"),
    ("duplicate_string", "01"), ("odds_first", "01"), ("bucket_sort", "01234"),
])  # fmt: skip
@pytest.mark.parametrize("length", [1, 4])
def test_all_strings_are_equally_likely(name, symbols, length):
    assert_distribution(texts(name, length), uniform(strings(symbols, length)))


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_all_expressions_without_brackets_are_equally_likely(length):
    digits = uniform("01234")
    longer = uniform(map("".join, itertools.product("01234", "+-*", "01234")))
    assert_distribution(texts("modular_arithmetic", length), digits if length < 3 else longer)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_stacks_have_every_height(length):
    expected = uniform("01")
    if length > 1:
        heights = range(1, length)
        expected = {
            stack + instructions: 1 / len(heights) / 2**h / 3 ** (length - h)
            for h in heights
            for stack in strings("01", h)
            for instructions in strings("<ab", length - h)
        }
    assert_distribution(texts("stack_manipulation", length), expected)


def test_stack_heights_at_500():
    inputs = TASKS["stack_manipulation"].sample(generator(21, 0), 4000, 500)
    assert_distribution((inputs < 2).sum(1).tolist(), uniform(range(1, 500)))


@pytest.mark.parametrize("length", [2, 6, 7])
def test_every_symbol_of_a_doubled_string_goes_missing(length):
    half = length // 2
    expected = defaultdict(float)
    for string in strings("01", half):
        for i in range(2 * half):
            both = string * 2
            expected[both[:i] + "?" + both[i + 1 :] + "_" * (length % 2)] += 1 / 2**half / (2 * half)
    assert_distribution(texts("missing_duplicate_string", length), expected)
    assert set(texts("missing_duplicate_string", 1)) == {"1"}


@pytest.mark.parametrize(("name", "operator"), [("binary_addition", "+"), ("binary_multiplication", "*")])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 7])
def test_binary_numbers_are_positive_and_equally_likely(name, operator, length):
    expected = {1: {"0": 1.0}, 2: uniform(["00", "10", "01"])}.get(length)
    if not expected:
        expected = {
            first + operator + second: 1 / (length - 2) / (2**n - 1) / (2 ** (length - 1 - n) - 1)
            for n in range(1, length - 1)
            for first in strings("01", n)
            for second in strings("01", length - 1 - n)
            if "1" in first and "1" in second
        }
    assert_distribution(texts(name, length), expected)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_roots_are_taken_of_all_positive_numbers(length):
    assert_distribution(texts("compute_sqrt", length), uniform(f"{n:b}".zfill(length) for n in range(1, 2**length)))


def grammar(length, operators):
    """The probability of every expression of a length."""
    if length < 5:
        form = ["{}", "-{}", "({})", "(-{})"][length - 1]
        return {form.format(d): 0.2 for d in "01234"}
    expected = defaultdict(float)
    for left in range(1, length - 3):
        for (a, p), (b, q) in itertools.product(
            grammar(left, operators).items(), grammar(length - 3 - left, operators).items()
        ):
            for operator in operators:
                expected[f"({a}{operator}{b})"] += p * q / (length - 4) / len(operators)
    return expected


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 8])
def test_bracketed_expressions_follow_the_grammar(length):
    assert_distribution(texts("modular_arithmetic_brackets", length), grammar(length, "+-*"))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 9, 10])
def test_equations_hide_the_digit_at_or_after_a_uniform_place(length):
    expected = defaultdict(float)
    if length < 3:
        expected["0" * length] = 1.0
    else:
        for text, p in grammar(length - 2, "+-").items():
            for place in range(len(text)):
                while not text[place].isdigit():
                    place = (place + 1) % len(text)
                expected[f"{text[:place]}x{text[place + 1 :]}={eval(text) % 5}"] += p / len(text)
    assert_distribution(texts("solve_equation", length), expected)


def root_split(text):
    """The length of the left part of ``(left operator right)``."""
    depth = 0
    for place, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 1 and place > 1 and c in "+-*" and text[place - 1] not in "(+-*":
            return place - 1
    raise AssertionError(text)


@pytest.mark.parametrize("length", [40, 101])
def test_long_expressions_split_anywhere(length):
    splits = [root_split(text) for text in texts("modular_arithmetic_brackets", length, 4000)]
    assert_distribution(splits, uniform(range(1, length - 3)))


def combined(a, b, operators):
    """The distribution of (a operator b) modulo 5 for independent a and b."""
    result = np.zeros(5)
    for x, y, operator in itertools.product(range(5), range(5), operators):
        result[eval(f"{x}{operator}{y}") % 5] += a[x] * b[y] / len(operators)
    return result


def test_labels_of_bracketed_expressions():
    """Zero is the most frequent one, as the grammar has it."""
    values = [np.full(5, 0.2)] * 5
    for length in range(5, 41):
        values.append(
            sum(combined(values[a], values[length - 3 - a], "+-*") for a in range(1, length - 3)) / (length - 4)
        )
    task = TASKS["modular_arithmetic_brackets"]
    for length in (12, 40):
        labels = task.solve(task.sample(generator(22, length), SAMPLES, length))[:, 0]
        assert_distribution(labels.tolist(), dict(enumerate(values[length])))
    assert values[40][0] > 0.25


def test_labels_of_expressions_without_brackets():
    """Exact, by the sum so far and the term that may still grow."""
    state = np.full((1, 5), 0.2) * np.eye(5)[:1].T  # [sum, term]
    for _ in range(3):
        following = np.zeros((5, 5))
        for s, t, d in itertools.product(range(5), range(5), range(5)):
            p = state[s, t] / 15
            following[(s + t) % 5, d] += p
            following[(s + t) % 5, -d % 5] += p
            following[s, t * d % 5] += p
        state = following
    expected = Counter()
    for s, t in itertools.product(range(5), range(5)):
        expected[(s + t) % 5] += state[s, t]
    task = TASKS["modular_arithmetic"]
    for length in (7, 8):
        labels = task.solve(task.sample(generator(23, length), SAMPLES, length))[:, 0]
        assert_distribution(labels.tolist(), dict(expected))


@pytest.mark.parametrize(("name", "length", "classes"), [
    ("even_pairs", 2, 2), ("even_pairs", 500, 2), ("parity_check", 1, 2), ("parity_check", 500, 2),
    ("missing_duplicate_string", 41, 2), ("missing_duplicate_string", 500, 2), ("cycle_navigation", 500, 5),
    ("solve_equation", 3, 5), ("solve_equation", 40, 5), ("modular_arithmetic_brackets", 4, 5),
])  # fmt: skip
def test_labels_that_are_balanced(name, length, classes):
    task = TASKS[name]
    labels = task.solve(task.sample(generator(24, length), 3000, length))[:, 0]
    assert_distribution(labels.tolist(), uniform(range(classes)))
    assert task.chance == 1 / classes


@pytest.mark.parametrize("name", [
    "stack_manipulation", "reverse_string", "duplicate_string", "odds_first", "binary_addition",
    "binary_multiplication", "compute_sqrt", "bucket_sort",
])  # fmt: skip
def test_symbols_at_500(name):
    """Free symbols stay uniform at length 500, so chance is one over their number."""
    task = TASKS[name]
    inputs = task.sample(generator(25, 0), 128, 500)
    symbols = 5 if name == "bucket_sort" else 2
    assert_distribution(inputs[inputs < symbols].tolist(), uniform(range(symbols)))
    assert task.chance == 1 / symbols
