"""Metrics as JSON lines, one an update, and as TensorBoard scalars; cut back to the checkpoint when a run resumes."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from dape_jax.errors import UserError


class MetricsFile:
    """``metrics.jsonl``: a line for every update, ``step`` counting completed ones, and lines for validations."""

    def __init__(self, path: Path, resume_step: int):
        """Opens for appending, without the lines after ``resume_step`` that a killed run has left."""
        self.kept = [line for line in read_metrics(path) if line["step"] <= resume_step]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in self.kept))
        os.replace(partial, path)
        self._file = path.open("a")

    def write(self, lines: list[dict[str, Any]]) -> None:
        """Appends and flushes."""
        self._file.write("".join(json.dumps(line) + "\n" for line in lines))
        self._file.flush()

    def close(self) -> None:
        """Closes; ``write`` has reported what could not be written."""
        with contextlib.suppress(OSError):
            self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a last line that a kill has cut short is left out, any other broken one refused."""
    try:
        text = path.read_text() if path.exists() else ""
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path} cannot be read: {e}") from e
    whole, _, _ = text.rpartition("\n")
    lines = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            lines.append(json.loads(line))
            lines[-1]["step"] = int(lines[-1]["step"])
        except (ValueError, KeyError, TypeError) as e:
            raise UserError(f"{path} is damaged in line {number}; repair or delete it to go on") from e
    return lines


class TensorBoard:
    """The numbers of metrics lines as scalars, written at once and in order.

    tensorboardX's own SummaryWriter hands events to a thread; when that thread fails, on a full disk for instance, its
    caller waits for ever. Its writer of event files, used here, raises.
    """

    def __init__(self, directory: Path, resume_step: int):
        """Starts a new event file, which tells TensorBoard to drop what older ones hold of steps after that."""
        writers, self._events, self._summary = _tensorboardx()
        directory.mkdir(parents=True, exist_ok=True)
        self._writer = writers.EventsWriter(str(directory / "events"), filename_suffix=f".from{resume_step}")
        start = self._events.SessionLog(status=self._events.SessionLog.START)
        self._writer.write_event(self._events.Event(step=resume_step + 1, session_log=start))
        self._writer.flush()

    def write(self, lines: list[dict[str, Any]], wall_time: float) -> None:
        """Writes the numbers of each line at its step, as of ``wall_time`` in seconds since 1970, and flushes."""
        for line in lines:
            for name, value in line.items():
                if name != "step" and isinstance(value, float):
                    tag = "validation/loss" if name == "validation_loss" else f"train/{name}"
                    summary = self._summary.scalar(tag, value)
                    self._writer.write_event(
                        self._events.Event(step=line["step"], wall_time=wall_time, summary=summary)
                    )
        self._writer.flush()

    def close(self) -> None:
        """Closes; ``write`` has reported what could not be written."""
        with contextlib.suppress(OSError):
            self._writer.close()


def check_tensorboard() -> None:
    """Refuses ``training.tensorboard`` where tensorboardX is not installed."""
    _tensorboardx()


def _tensorboardx() -> Any:
    try:
        from tensorboardX import event_file_writer, summary
        from tensorboardX.proto import event_pb2
    except ImportError as e:
        raise UserError("training.tensorboard=True: install tensorboardX first (pip install tensorboardX)") from e
    return event_file_writer, event_pb2, summary
