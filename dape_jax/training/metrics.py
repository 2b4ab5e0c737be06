"""Metrics as JSON lines, one an update, cut back to the checkpoint when a run resumes."""

import json
import os
from pathlib import Path
from typing import Any

from dape_jax.errors import UserError


class MetricsFile:
    """``metrics.jsonl``: a line for every update, ``step`` counting completed ones, and lines for validations."""

    def __init__(self, path: Path, resume_step: int):
        """Opens for appending, without the lines after ``resume_step`` that a killed run has left."""
        self._path = path
        kept = [line for line in read_metrics(path) if line["step"] <= resume_step]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(partial, path)
        self._file = path.open("a")

    def write(self, lines: list[dict[str, Any]]) -> None:
        """Appends and flushes."""
        self._file.write("".join(json.dumps(line) + "\n" for line in lines))
        self._file.flush()

    def close(self) -> None:
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
