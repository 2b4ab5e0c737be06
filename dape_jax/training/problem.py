"""What a run is trained on: text, or a task of the Chomsky hierarchy. The loop asks no more than this of either."""

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from dape_jax.config import Config
from dape_jax.data import batches as text_batches
from dape_jax.data.cache import TokenCache
from dape_jax.data.chomsky import Task
from dape_jax.data.chomsky import batches as task_batches
from dape_jax.errors import UserError
from dape_jax.nn import TransformerConfig
from dape_jax.training.objective import Batch, NextToken, Objective, Transduction

VALIDATION_LENGTHS = 8
"""Input lengths of a task that its validation loss is a mean over, where there are so many batches."""


class Problem(Protocol):
    """Batches by step, and what identifies them.

    Attributes:
      name: in messages.
      tokenizer: description of the vocabulary, as ``Tokenizer.describe`` gives it.
      fingerprint: equal where the same step has the same batch.
      objective: what is minimised.
      targets_per_step: about how many targets a batch has.
      row_length: tokens that the model reads of a row.
    """

    @property
    def name(self) -> str: ...
    @property
    def tokenizer(self) -> dict[str, Any]: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def objective(self) -> Objective: ...
    @property
    def targets_per_step(self) -> int: ...
    @property
    def row_length(self) -> int: ...

    def summary(self) -> list[str]:
        """What a user should know of it before training, a line each."""
        ...

    def check(self, model: TransformerConfig) -> None:
        """Refuses what cannot be trained on."""
        ...

    def batches(self, first_step: int, process_index: int, process_count: int) -> Iterator[Batch]:
        """This process's rows of the batches from ``first_step`` on."""
        ...

    def origins(self, batch: int) -> list[dict[str, Any]]:
        """Where each row of batch number ``batch`` comes from; ``described`` says it in words."""
        ...

    def validation(self, rows: int, devices: int) -> list[Batch]:
        """Held-out batches of up to ``rows`` rows, multiples of ``devices``."""
        ...


@dataclasses.dataclass(frozen=True)
class LanguageModelling:
    """Next tokens of a text."""

    config: Config
    tokens: TokenCache

    @property
    def name(self) -> str:
        return self.tokens.manifest["source"]["name"]

    @property
    def tokenizer(self) -> dict[str, Any]:
        return self.tokens.manifest["tokenizer"]

    @property
    def fingerprint(self) -> str:
        return self.tokens.manifest["tokens_sha256"]

    @property
    def objective(self) -> NextToken:
        return NextToken(self.tokenizer["end_of_document"]["id"] if self.config.data.packing == "segments" else None)

    @property
    def targets_per_step(self) -> int:
        return self.config.training.batch_size * self.config.data.sequence_length

    @property
    def row_length(self) -> int:
        return self.config.data.sequence_length

    def summary(self) -> list[str]:
        split = self.tokens.manifest["splits"]["train"]
        documents = split["documents"][1] - split["documents"][0]
        cache = f"(cache {self.tokens.directory})"
        lines = [f"{self.name}: {documents} documents, {split['tokens']:,} tokens to train on {cache}"]
        return lines + ([self.tokens.left_out()] if self.tokens.left_out() else [])

    def check(self, model: TransformerConfig) -> None:
        text_batches.Windows(self.tokens, "train", self.config.data.sequence_length)  # refuses a text that is too short

    def batches(self, first_step: int, process_index: int, process_count: int) -> Iterator[Batch]:
        return text_batches.training_batches(*self._order(), first_step, process_index, process_count)

    def origins(self, batch: int) -> list[dict[str, Any]]:
        return text_batches.row_origins(*self._order(), batch)

    def validation(self, rows: int, devices: int) -> list[Batch]:
        windows = text_batches.Windows(self.tokens, "validation", self.config.data.sequence_length)
        count = min(self.config.training.validation_windows, len(windows)) // devices * devices
        if not count:
            raise UserError(
                f"the validation split has {len(windows)} windows of {self.config.data.sequence_length} tokens, fewer "
                f"than the {devices} devices; set training.validate_every=0 or a larger data.validation_fraction"
            )
        chosen = np.stack([windows[int(i)] for i in np.linspace(0, len(windows) - 1, count)])
        return [chosen[first : first + rows] for first in range(0, count, rows)]

    def _order(self) -> tuple[TokenCache, int, int, int]:
        training = self.config.training
        return self.tokens, self.config.data.sequence_length, training.batch_size, training.seed


@dataclasses.dataclass(frozen=True)
class Chomsky:
    """A task of the Chomsky Hierarchy Evaluation, with inputs of lengths U(1, ``data.sequence_length``)."""

    config: Config
    task: Task

    @property
    def name(self) -> str:
        return f"task {self.task.name}"

    @property
    def tokenizer(self) -> dict[str, Any]:
        return {"name": self.name, "vocab_size": self.task.input_vocab + 1, "end_of_document": {"id": None}}

    @property
    def fingerprint(self) -> str:
        """Of some batches of training, so that a change of the sampler shows."""
        digest = hashlib.sha256()
        for step in range(4):
            batch = self._training_batch(step)
            for name in sorted(batch):
                digest.update(np.ascontiguousarray(batch[name]).tobytes())
        return digest.hexdigest()

    @property
    def objective(self) -> Transduction:
        return Transduction()

    @property
    def targets_per_step(self) -> int:
        lengths = range(self.task.min_length, self.config.data.sequence_length + 1)
        mean = sum(self.task.output_length(n) for n in lengths) / len(lengths)
        return round(self.config.training.batch_size * mean)

    def summary(self) -> list[str]:
        longest = self.config.data.sequence_length
        return [f"{self.name}: inputs of lengths {self.task.min_length} to {longest}, rows of {self.row_length} tokens"]

    def check(self, model: TransformerConfig) -> None:
        """Refuses test lengths that there are not enough positions for."""
        longest = max(self.config.evaluation.lengths)
        try:
            model.check_length(task_batches.longest(self.task, longest))
        except UserError as e:
            raise UserError(f"evaluation.lengths={self.config.evaluation.lengths}: at length {longest}, {e}") from e

    def batches(self, first_step: int, process_index: int, process_count: int) -> Iterator[Batch]:
        training = self.config.training
        return task_batches.training_batches(
            self.task, self.config.data.sequence_length, training.batch_size, training.seed, first_step, process_index,
            process_count,
        )  # fmt: skip

    def origins(self, batch: int) -> list[dict[str, Any]]:
        rows = self._training_batch(batch)["tokens"]
        symbols = self.task.input_symbols
        return [{"row": i, "input": "".join(symbols[t] for t in row if t < len(symbols))} for i, row in enumerate(rows)]

    def validation(self, rows: int, devices: int) -> list[Batch]:
        """Batches of lengths that are spread evenly from the longest to the shortest, each of one length."""
        wanted, longest = self.config.training.validation_windows, self.config.data.sequence_length
        size = min(rows, devices * -(-wanted // (devices * VALIDATION_LENGTHS)))
        # From the longest, which is the one that counts where there is room for one only.
        lengths = np.linspace(longest, self.task.min_length, -(-wanted // size)).round().astype(int).tolist()
        return [self._draw(i, task_batches.VALIDATION, size, length) for i, length in enumerate(lengths)]

    def _training_batch(self, step: int) -> dict[str, np.ndarray]:
        training, longest = self.config.training, self.config.data.sequence_length
        length = task_batches.training_length(self.task, longest, training.seed, step)
        return self._draw(step, task_batches.TRAINING, training.batch_size, length)

    def _draw(self, step: int, stream: int, rows: int, length: int) -> dict[str, np.ndarray]:
        return task_batches.draw(self.task, self.config.training.seed, step, stream, rows, length, self.row_length)

    @property
    def row_length(self) -> int:
        return task_batches.longest(self.task, self.config.data.sequence_length)


def described(origin: dict[str, Any]) -> str:
    """A row of a batch in words, from one of its ``origins``."""
    if "input" in origin:
        return f"row {origin['row']}, input {origin['input']}"
    return f"row {origin['row']} from token {origin['offset']} of {origin['documents'][0]}"
