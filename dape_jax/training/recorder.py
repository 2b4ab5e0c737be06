"""What a run reports of its steps: metrics, spikes and updates that are not finite."""

import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from dape_jax.training.checkpoint import SaveFailed
from dape_jax.training.metrics import MetricsFile, TensorBoard
from dape_jax.training.problem import described
from dape_jax.training.spikes import SpikeDetector

_log = logging.getLogger(__name__)
NAMED_ROWS = 3
"""Rows of a batch that a message names; metrics.jsonl has them all."""


class NonFiniteUpdate(RuntimeError):
    """The update of ``step`` is not finite and was not applied."""

    def __init__(self, step: int, message: str):
        super().__init__(message)
        self.step = step


class Recorder:
    """Collects each step's metrics on the device and fetches them in groups, so that steps overlap.

    Every process has one, as all must notice an update that is not finite; the first process's writes.

    Args:
      workdir: where to write metrics.jsonl and tensorboard/; None to write nothing.
      resume_step: what is there of later steps is dropped.
      tensorboard: whether to write tensorboard/.
      schedule: learning rate by step.
      tokens_per_step: targets of a batch.
      origins: the rows of the batch of a step, as ``Problem.origins`` gives them.
    """

    def __init__(
        self,
        workdir: Path | None,
        resume_step: int,
        tensorboard: bool,
        schedule: Callable[[Any], Any],
        tokens_per_step: int,
        origins: Callable[[int], list[dict[str, Any]]],
    ):
        self._schedule = schedule
        self._tokens_per_step = tokens_per_step
        self._origins = origins
        self._spikes = SpikeDetector()
        self._pending: list[tuple[int, dict[str, jax.Array]]] = []
        self._since = time.monotonic()
        self._first_group = True
        self._file = self._board = None
        self.validated: set[int] = set()
        """Steps with a validation loss, on the process that writes."""
        if workdir is not None:
            try:
                self._file = MetricsFile(workdir / "metrics.jsonl", resume_step)
                self._board = TensorBoard(workdir / "tensorboard", resume_step) if tensorboard else None
            except OSError as e:
                raise SaveFailed(f"{workdir}: metrics cannot be written: {e.strerror or e}") from e
            for line in self._file.kept:
                if "loss" in line:
                    self._spikes.thresholds_exceeded(line)  # as in the run that is resumed
            self.validated = {line["step"] for line in self._file.kept if "validation_loss" in line}

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Takes the metrics of a step that may still be under way."""
        self._pending.append((step, metrics))

    def flush(self) -> str:
        """Writes what is pending; returns the progress bar's text. The first group includes the compilation.

        Raises:
          NonFiniteUpdate: for the first step that was not applied.
          SaveFailed: the metrics cannot be written.
        """
        lines, failed = [], None
        for step, metrics in self._pending:
            values = {name: float(x) for name, x in jax.device_get(metrics).items()}
            if not all(math.isfinite(x) for x in values.values()):
                failed = step, values
                break
            line = {"step": step, **values, "learning_rate": float(self._schedule(step - 1))}
            self._mark_spike(line)
            lines.append(line)
        now = time.monotonic()
        rate = len(self._pending) * self._tokens_per_step / (now - self._since)
        self._pending, self._since = [], now
        if lines:
            lines[-1]["tokens_per_second"] = round(rate, 1)
        if failed is not None:
            step, values = failed
            rows = self._origins(step)
            # NaN and infinity are no JSON numbers, so they are written as text.
            lines.append({"step": step, "not_applied": {k: str(x) for k, x in values.items()}, "batch": rows})
            self.write(lines)
            found = ", ".join(f"{name} {x}" for name, x in values.items())
            raise NonFiniteUpdate(step, f"step {step} was not applied: {found}; its batch: {name_rows(rows)}")
        self.write(lines)
        warming, self._first_group = self._first_group, False
        return f"loss {lines[-1]['loss']:.4f}, {rate:,.0f} tokens/s{' with compilation' if warming else ''}"

    def write(self, lines: list[dict[str, Any]]) -> None:
        """Writes lines for metrics.jsonl now."""
        try:
            if self._file is not None:
                self._file.write(lines)
            if self._board is not None:
                self._board.write(lines, time.time())
        except OSError as e:
            raise SaveFailed(f"metrics cannot be written: {e.strerror or e}") from e

    def close(self) -> None:
        """Closes the files."""
        for file in (self._file, self._board):
            if file is not None:
                file.close()

    def _mark_spike(self, line: dict[str, Any]) -> None:
        exceeded = self._spikes.thresholds_exceeded(line) if self._file is not None else {}
        if exceeded:
            rows = self._origins(line["step"])
            line["spike"] = {"above": exceeded, "batch": rows}
            found = ", ".join(f"{name} {line[name]:.4g} (usual: below {x:.4g})" for name, x in exceeded.items())
            _log.warning("spike at step %d: %s; its batch: %s", line["step"], found, name_rows(rows))


def name_rows(rows: list[dict[str, Any]]) -> str:
    """The first rows of a batch in words."""
    named = [described(row) for row in rows[:NAMED_ROWS]]
    more = len(rows) - len(named)
    return ", ".join(named) + (f" and {more} more rows that metrics.jsonl names" if more else "")
