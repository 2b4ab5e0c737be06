"""Rows of a task as the encoder reads them."""

import numpy as np
import pytest

from dape_jax.data.chomsky import TASKS, get_task
from dape_jax.data.chomsky.batches import (
    EVALUATION,
    TRAINING,
    draw,
    longest,
    total_length,
    training_batches,
    training_length,
)  # fmt: skip


@pytest.mark.parametrize("task", TASKS.values(), ids=list(TASKS))
def test_a_row_is_the_input_a_placeholder_for_each_output_and_padding(task):
    batch = draw(task, 3, 5, TRAINING, 6, 9, 60)
    n, m = task.input_length(9), task.output_length(9)
    inputs, rest = batch["tokens"][:, :n], batch["tokens"][:, n:]
    outputs = task.solve(inputs)
    assert np.all(rest == task.input_vocab)
    assert np.array_equal(batch["targets"][:, n : n + m], outputs)
    assert np.array_equal(batch["weights"][:, n : n + m], task.mask(outputs))
    assert not batch["weights"][:, :n].any()
    assert not batch["weights"][:, n + m :].any()
    assert np.array_equal(batch["valid"], np.broadcast_to(np.arange(60) < n + m, (6, 60)))
    assert total_length(task, 9) == n + m
    assert longest(task, 9) == max(total_length(task, i) for i in range(1, 10))


def test_batches_depend_on_seed_step_and_stream_alone():
    task = get_task("reverse_string")
    first = draw(task, 3, 5, TRAINING, 6, 9, 60)["tokens"]
    assert np.array_equal(first, draw(task, 3, 5, TRAINING, 6, 9, 60)["tokens"])
    for other in ((4, 5, TRAINING), (3, 6, TRAINING), (3, 5, EVALUATION)):
        assert not np.array_equal(first, draw(task, *other, 6, 9, 60)["tokens"])


def test_training_batches_are_those_of_their_step_and_processes_share_them():
    task = get_task("missing_duplicate_string")
    stream = training_batches(task, 12, 8, 1, 0)
    whole = [next(stream) for _ in range(6)]
    resumed = training_batches(task, 12, 8, 1, 4)
    parts = [training_batches(task, 12, 8, 1, 0, i, 2) for i in range(2)]
    for step, batch in enumerate(whole):
        assert batch["tokens"].shape == (8, longest(task, 12))
        assert batch["valid"][0].sum() == total_length(task, training_length(task, 12, 1, step))
        halves = [next(part) for part in parts]
        again = next(resumed) if step >= 4 else batch
        for name, x in batch.items():
            assert np.array_equal(x, np.concatenate([half[name] for half in halves]))
            assert np.array_equal(x, again[name])


def test_training_lengths_are_uniform():
    lengths = [training_length(get_task("even_pairs"), 8, 0, step) for step in range(4000)]
    counts = np.bincount(lengths, minlength=9)
    assert counts[0] == 0
    assert ((counts[1:] - 500) ** 2 / 500).sum() < 24.3  # 7 degrees of freedom, 0.1 %
