"""Batches of a task for an encoder: the input, one placeholder for each output, and padding."""

from collections.abc import Iterator

import grain.python as grain
import numpy as np

from dape_jax.data.chomsky.base import Task, generator

TRAINING, VALIDATION, EVALUATION = range(3)
"""Streams of random numbers, kept apart."""


def total_length(task: Task, length: int) -> int:
    """Tokens of a row for inputs of ``length``: the input and its placeholders."""
    return task.input_length(length) + task.output_length(length)


def longest(task: Task, length: int) -> int:
    """Tokens of the longest row for any input up to ``length``."""
    return max(total_length(task, n) for n in range(task.min_length, length + 1))


def draw(task: Task, seed: int, step: int, stream: int, rows: int, length: int, width: int) -> dict[str, np.ndarray]:
    """A batch of inputs of one length, which is a function of the arguments alone.

    Returns:
      ``tokens`` int32 [rows, width]: the input, then the id ``task.input_vocab`` as placeholder and padding;
      ``targets`` int32: the outputs at their placeholders, 0 elsewhere; ``weights`` float32: 1 where they count;
      ``valid`` bool: False on padding.
    """
    return _pack(task, task.sample(generator(seed, step, stream), rows, length), width)


def training_batches(
    task: Task,
    longest_input: int,
    rows: int,
    seed: int,
    first_step: int,
    process_index: int = 0,
    process_count: int = 1,
) -> Iterator[dict[str, np.ndarray]]:
    """This process's rows of batch ``first_step`` and all later ones, without end.

    The length of a batch is drawn from U(1, ``longest_input``). Every process draws the whole batch, which is cheap,
    and takes its rows.
    """
    width, own = longest(task, longest_input), rows // process_count

    def batch(step: int) -> dict[str, np.ndarray]:
        whole = draw(task, seed, step, TRAINING, rows, training_length(task, longest_input, seed, step), width)
        return {name: x[process_index * own : (process_index + 1) * own] for name, x in whole.items()}

    steps = grain.MapDataset.range(first_step, 2**40).map(batch)
    return iter(steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=8)))


def training_length(task: Task, longest_input: int, seed: int, step: int) -> int:
    """The input length of the training batch after ``step`` completed ones, drawn from U(1, ``longest_input``)."""
    lengths = generator(seed, step, stream=2**63 + TRAINING)  # of its own, so that the rows do not depend on it
    return int(lengths.integers(task.min_length, longest_input + 1))


def _pack(task: Task, inputs: np.ndarray, width: int) -> dict[str, np.ndarray]:
    outputs = task.solve(inputs)
    rows, first = inputs.shape
    end = first + outputs.shape[1]
    tokens = np.full((rows, width), task.input_vocab, np.int32)
    tokens[:, :first] = inputs
    targets, weights = np.zeros((rows, width), np.int32), np.zeros((rows, width), np.float32)
    targets[:, first:end], weights[:, first:end] = outputs, task.mask(outputs)
    valid = np.broadcast_to(np.arange(width) < end, (rows, width))
    return {"tokens": tokens, "targets": targets, "weights": weights, "valid": np.ascontiguousarray(valid)}
