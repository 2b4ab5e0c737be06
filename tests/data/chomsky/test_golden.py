"""Solvers, masks, lengths and vocabularies against the reference program's batches."""

from pathlib import Path

import numpy as np
import pytest

from dape_jax.data.chomsky import TASKS, generator

GOLDEN = Path(__file__).parents[2] / "golden" / "che"
LENGTHS = [1, 2, 7, 12, 40, 101]


@pytest.fixture(scope="module", params=sorted(TASKS))
def case(request):
    with np.load(GOLDEN / f"{request.param}.npz") as golden:
        return TASKS[request.param], dict(golden)


def test_every_task_has_golden_values():
    assert {path.stem for path in GOLDEN.glob("*.npz")} == set(TASKS)
    assert len(TASKS) == 15


def test_vocabularies(case):
    task, golden = case
    assert (task.input_vocab, task.output_vocab) == (golden["input_size"], golden["output_size"])


@pytest.mark.parametrize("length", LENGTHS)
def test_outputs_and_masks(case, length):
    task, golden = case
    inputs = golden[f"input_{length}"]
    expected, mask = (golden[f"{name}_{length}"].reshape(len(inputs), -1) for name in ("output", "mask"))
    outputs = task.solve(inputs)
    assert outputs.dtype == np.int32
    assert np.array_equal(outputs, expected)
    assert task.mask(outputs).dtype == bool
    assert np.array_equal(task.mask(outputs), mask)
    assert task.output_length(length) == golden[f"output_length_{length}"] == expected.shape[1]
    assert task.input_length(length) == inputs.shape[1]


@pytest.mark.parametrize("length", LENGTHS)
def test_samples_look_like_the_golden_ones(case, length):
    task, golden = case
    theirs = golden[f"input_{length}"]
    ours = task.sample(generator(0, length), 4096, length)
    assert ours.shape[1:] == theirs.shape[1:]
    assert ours.dtype == np.int32
    # Whatever token the reference has at a place, so has one of many samples; and no other token at all.
    for place in range(theirs.shape[1]):
        assert set(theirs[:, place]) <= set(ours[:, place])
    every = np.concatenate([golden[f"input_{n}"].ravel() for n in LENGTHS])
    assert set(ours.ravel()) <= set(every)
