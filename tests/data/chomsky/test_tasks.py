"""The registry, the seeds, the examples of the docstrings, and bad input."""

import ast
import pickle
import re
import zlib
from pathlib import Path

import numpy as np
import pytest

from dape_jax.data import chomsky
from dape_jax.data.chomsky import TASKS, generator, get_task
from dape_jax.data.chomsky.base import decode, encode
from dape_jax.errors import UserError

NAMES = sorted(TASKS)


@pytest.mark.parametrize("name", NAMES)
def test_the_docstring_tells_the_truth(name):
    task = TASKS[name]
    assert task.name == name
    examples = re.findall(r"Example: ``(\S+) -> (\S+)``", type(task).__doc__ or "")
    assert examples
    for given, expected in examples:
        outputs = task.solve(encode(task.input_symbols, given)[None])
        assert decode(task.output_symbols, outputs[0]) == expected


@pytest.mark.parametrize(("name", "hint"), [
    ("even_pair", "did you mean 'even_pairs'?"),
    ("binary_adition", "did you mean 'binary_addition'?"),
    ("zzz", "known: binary_addition, binary_multiplication"),
])  # fmt: skip
def test_unknown_tasks_get_a_hint(name, hint):
    assert get_task("even_pairs") is TASKS["even_pairs"]
    with pytest.raises(UserError, match=re.escape(f"task='{name}' is unknown; {hint}")):
        get_task(name)


# One number for a batch of 16 at length 41 and one at length 2: a change of any of them changes every experiment.
DRAWN = {
    "binary_addition": 3549743222,
    "binary_multiplication": 3549743222,
    "bucket_sort": 413457836,
    "compute_sqrt": 1243578655,
    "cycle_navigation": 3814319574,
    "duplicate_string": 2717020561,
    "even_pairs": 2717020561,
    "missing_duplicate_string": 884736112,
    "modular_arithmetic": 2591236783,
    "modular_arithmetic_brackets": 4249106408,
    "odds_first": 2717020561,
    "parity_check": 2717020561,
    "reverse_string": 2717020561,
    "solve_equation": 2607011238,
    "stack_manipulation": 1307309291,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_the_same_batch_on_every_machine(name):
    batches = [TASKS[name].sample(generator(7, 5, 1), 16, length) for length in (41, 2)]
    assert zlib.crc32(b"".join(x.astype("<i4").tobytes() for x in batches)) == DRAWN[name]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_but_the_generator_matters(name):
    task = TASKS[name]
    first = task.sample(generator(3, 4), 8, 33)
    np.random.seed(1)
    state = np.random.get_state()[1].copy()
    TASKS["solve_equation"].sample(generator(3, 4), 3, 9)
    assert np.array_equal(pickle.loads(pickle.dumps(task)).sample(generator(3, 4), 8, 33), first)
    assert np.array_equal(np.random.get_state()[1], state)
    for other in (generator(4, 4), generator(3, 5), generator(3, 4, 1), generator(4, 3)):
        assert not np.array_equal(task.sample(other, 8, 33), first)


def test_generators_take_the_whole_range():
    top = 2**64 - 1
    drawn = {int(generator(*key).integers(2**62)) for key in [(0, 0), (top, 0), (0, top), (0, 0, top), (top, top, top)]}
    assert len(drawn) == 5
    for name, key in (("seed", (-1, 0)), ("step", (0, 2**64)), ("stream", (0, 0, -5))):
        with pytest.raises(UserError, match=rf"{name}=-?\d+ is outside 0 to 2\^64 - 1"):
            generator(*key)


@pytest.mark.parametrize("name", NAMES)
def test_bad_sizes(name):
    task = TASKS[name]
    for length in (0, -3):
        for use in (task.input_length, task.output_length, lambda n: task.sample(generator(0, 0), 2, n)):
            with pytest.raises(UserError, match=f"length={length}: {name} starts at 1"):
                use(length)
    with pytest.raises(UserError, match="batch=0 is not positive"):
        task.sample(generator(0, 0), 0, 5)
    assert task.sample(generator(0, 0), np.int64(2), np.int32(5)).shape == (2, 5)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_that_are_no_tokens(name):
    task = TASKS[name]
    with pytest.raises(UserError, match=r"integers \[batch, length\], not int64 \(5,\)"):
        task.solve(np.zeros(5, np.int64))
    with pytest.raises(UserError, match="not float64"):
        task.solve(np.zeros((1, 5)))
    for token in (-1, task.input_vocab):
        with pytest.raises(UserError, match=f"tokens from 0 to {task.input_vocab - 1}"):
            task.solve(np.full((1, 5), token))
    with pytest.raises(UserError, match=f"length=0: {name} starts at 1"):
        task.solve(np.zeros((1, 0), np.int64))


@pytest.mark.parametrize(("name", "text", "message"), [
    ("modular_arithmetic", "1+", "length=2: inputs of modular_arithmetic are 1 long instead"),
    ("modular_arithmetic", "1_2", "is a digit, then"),
    ("modular_arithmetic", "112", "is a digit, then"),
    ("modular_arithmetic", "+1+", "is a digit, then"),
    ("modular_arithmetic_brackets", "((1+2)", "brackets"),
    ("modular_arithmetic_brackets", ")1(", "brackets"),
    ("modular_arithmetic_brackets", "1+2", "an expression is"),
    ("modular_arithmetic_brackets", "(1+2+3)", "an expression is"),
    ("modular_arithmetic_brackets", "(1+(2)3)", "an expression is"),
    ("modular_arithmetic_brackets", "(+2)", "an expression is"),
    ("modular_arithmetic_brackets", "(2-)", "an expression is"),
    ("modular_arithmetic_brackets", "(--2)", "an expression is"),
    ("modular_arithmetic_brackets", "-(2)", "an expression is"),
    ("modular_arithmetic_brackets", "()", "an expression is"),
    ("modular_arithmetic_brackets", "(1)(2)", "an expression is"),
    ("modular_arithmetic_brackets", "(x)", "an expression is"),
    ("modular_arithmetic_brackets", "-", "an expression is"),
    ("modular_arithmetic_brackets", "-x", "an expression is"),
    ("modular_arithmetic_brackets", "(1*-x)", "an expression is"),
    ("solve_equation", "(x+x)=0", "one x"),
    ("solve_equation", "(1+1)=2", "one x"),
    ("solve_equation", "x=(1)", "one x"),
    ("solve_equation", "(1+x=)", "one x"),
    ("solve_equation", "(1=x)=0", "an expression is"),
    ("missing_duplicate_string", "1010", "has one [?]"),
    ("missing_duplicate_string", "1?1?", "has one [?]"),
    ("missing_duplicate_string", "101?", None),
    ("missing_duplicate_string", "1010?", "has one [?]"),
    ("binary_addition", "0101", "has one '[+]'"),
    ("binary_addition", "0+1+1", "has one '[+]'"),
    ("binary_addition", "0+", "0 and 1"),
    ("binary_multiplication", "0*1*1", "has one '[*]'"),
])  # fmt: skip
@pytest.mark.parametrize("rows", ["alone", "after a good one"])
def test_inputs_of_no_such_form(name, text, message, rows):
    task = TASKS[name]
    inputs = encode(task.input_symbols, text)[None]
    if rows != "alone" and task.input_length(len(text)) == len(text):
        inputs = np.concatenate([task.sample(generator(0, 0), 1, len(text)), inputs])
    if message is None:
        task.solve(inputs)
        return
    with pytest.raises(UserError, match=message):
        task.solve(inputs)


def test_text_that_is_no_token():
    with pytest.raises(UserError, match="'01a' holds 'a'; the symbols are '01'"):
        encode("01", "01a")


def test_masks_end_at_the_first_terminator():
    task = TASKS["binary_addition"]
    outputs = np.array([[0, 2, 2, 0], [1, 1, 1, 1], [2, 0, 0, 2]])
    assert task.mask(outputs).tolist() == [[True, True, False, False], [True] * 4, [True, False, False, False]]
    assert TASKS["reverse_string"].mask(outputs).all()


def test_no_accelerator_library_is_used():
    for path in Path(chomsky.__file__).parent.glob("*.py"):
        if path.name == "batches.py":  # which feeds the training loop, through Grain
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            for name in names:
                root = name.split(".")[0]
                assert root in (
                    "numpy",
                    "math",
                    "dataclasses",
                    "itertools",
                    "collections",
                    "typing",
                ) or name.startswith(("dape_jax.data.chomsky", "dape_jax.errors")), f"{path.name} imports {name}"
