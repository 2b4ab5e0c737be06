"""Accuracy on a task of the Chomsky hierarchy at every length up to a longest one."""

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from dape_jax import sharding
from dape_jax.data.chomsky import Task
from dape_jax.data.chomsky.batches import EVALUATION, draw, total_length
from dape_jax.errors import UserError
from dape_jax.evaluation.extrapolation import TOKENS_PER_DEVICE
from dape_jax.nn.transformer import TransformerConfig
from dape_jax.training.objective import read
from dape_jax.training.stop import StopFlag, Stopped, agreed

WIDTHS = 10
"""Numbers of tokens that rows are padded to: as many compilations, whatever the number of lengths."""


class Accuracies(NamedTuple):
    """What was right at each length.

    Attributes:
      lengths: int [n], of the input, as asked for: a task may round it (``Task.input_length``).
      correct, counted: int64 [n], outputs that were right, and that count.
      solved: int64 [n], rows all of whose counted outputs were right.
      rows: of each length.
      widths: int [n], the tokens that rows of each length were padded to.
      seconds: how long it took.
    """

    lengths: np.ndarray
    correct: np.ndarray
    counted: np.ndarray
    solved: np.ndarray
    rows: int
    widths: np.ndarray
    seconds: float

    @property
    def compilations(self) -> int:
        """Programs that were compiled."""
        return len(np.unique(self.widths))


def score(
    model: TransformerConfig,
    params: Any,
    mesh: Mesh,
    task: Task,
    trained_row: int,
    longest: int,
    samples: int,
    seed: int = 0,
    show_progress: bool = True,
    stop: StopFlag | None = None,
) -> Accuracies:
    """Scores ``samples`` rows of every length 1 to ``longest``, which ``seed`` and the length determine.

    Randomised positions are one draw for each length, of the same seed. YaRN's scale is that of ``Accuracies.widths``,
    the longest row of a group of lengths, so that one program serves the group.

    Args:
      model, params: what is scored.
      mesh: devices.
      task: on what.
      trained_row: tokens of the longest training row: rows up to it are a group of lengths of their own.
      longest: the longest input.
      samples: rows of each length.
      seed: of the samples and of randomised positions.
      show_progress: whether to draw a bar.
      stop: see below.

    Raises:
      Stopped: ``stop`` was set on any process, which is looked at before each batch.
      UserError: the model has no positions for the longest rows.
    """
    lengths = np.arange(task.min_length, longest + 1)
    totals = np.asarray([total_length(task, int(n)) for n in lengths])
    widths = padded_widths(totals, trained_row)
    try:
        model.check_length(int(widths.max()))
    except UserError as e:
        raise UserError(f"test lengths up to {longest}: {e} (model.randomised.range, model.learned.length)") from e
    counts = np.zeros((3, len(lengths)), np.int64)
    started = time.monotonic()
    progress = tqdm(total=int(samples * totals.sum()), desc=f"evaluating {task.name}", unit="token", unit_scale=True,
                    disable=not show_progress)  # fmt: skip
    with jax.set_mesh(mesh), progress:
        for i, (length, total, width) in enumerate(zip(lengths.tolist(), totals, widths.tolist(), strict=True)):
            progress.set_postfix_str(f"length {length}")
            fn = _counter(model.for_length(width), mesh)
            rows = rows_at_once(width, samples, mesh.size)
            whole = draw(task, seed, length, EVALUATION, samples, length, width)
            key = jax.random.fold_in(jax.random.key(seed), length)
            for first in range(0, samples, rows):
                if stop is not None and (signal_number := agreed(stop.signal_number)):
                    raise Stopped(signal_number, "before the report was written; start the same command again")
                part = {name: _filled(x[first : first + rows], rows) for name, x in whole.items()}
                count = min(rows, samples - first)
                part["weights"][count:] = 0
                counts[:, i] += np.asarray(fn(params, sharding.put_batch(mesh, part), key))[:, :count].sum(axis=1)
                progress.update(count * int(total))
    correct, counted, solved = counts
    return Accuracies(lengths, correct, counted, solved, samples, widths, time.monotonic() - started)


def padded_widths(totals: np.ndarray, trained_row: int) -> np.ndarray:
    """For each number of tokens the smallest of at most ``WIDTHS`` that is not below it; ``trained_row`` is one."""
    most = totals.max()
    grid = np.unique(np.linspace(min(trained_row, most), most, WIDTHS).round().astype(int))
    return grid[np.searchsorted(grid, totals)]


def rows_at_once(width: int, samples: int, devices: int) -> int:
    """Rows of one forward pass over all devices: what fits TOKENS_PER_DEVICE, no more than needed."""
    return devices * max(1, min(TOKENS_PER_DEVICE // width, -(-samples // devices)))


def _filled(x: np.ndarray, rows: int) -> np.ndarray:
    """x with copies of its first row up to ``rows``."""
    return np.concatenate([x, np.repeat(x[:1], rows - len(x), axis=0)])


@functools.lru_cache(maxsize=2 * WIDTHS)
def _counter(model: TransformerConfig, mesh: Mesh) -> Callable[..., jax.Array]:
    def count(params: Any, batch: dict[str, jax.Array], key: jax.Array) -> jax.Array:
        """int32 [3, B]: outputs that are right, that count, and whether all that count are right, for each row."""
        hidden = read(model, params, batch, key)
        logits = jnp.einsum("btm,mv->btv", hidden.astype(jnp.float32), params["head"]["kernel"])
        counted = batch["weights"] > 0
        right = counted & (jnp.argmax(logits, axis=-1) == batch["targets"])
        rights, counts = right.sum(axis=1), counted.sum(axis=1)
        return jnp.stack([rights, counts, rights == counts])

    return jax.jit(count, out_shardings=sharding.replicated(mesh))
