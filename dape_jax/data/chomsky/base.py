"""What every task has, and where its random numbers come from."""

from typing import Literal

import numpy as np

from dape_jax.errors import UserError

END = 2
"""The output token # that ends an output whose length depends on the input."""


def generator(seed: int, step: int, stream: int = 0) -> np.random.Generator:
    """Random numbers that depend on the three arguments and nothing else, each from 0 to 2^64 - 1.

    Philox is counter-based: seed and step are its key and the stream is the upper part of its counter, so that any
    step can be drawn on its own and no two of them overlap. ``stream`` keeps uses of one seed apart, training and
    evaluation for instance.
    """
    for name, value in (("seed", seed), ("step", step), ("stream", stream)):
        if not 0 <= value < 2**64:
            raise UserError(f"{name}={value} is outside 0 to 2^64 - 1")
    words = np.uint64
    return np.random.Generator(
        np.random.Philox(
            key=np.array([seed, step], words),
            counter=np.array([0, 0, 0, stream], words),
        )
    )


class Task:
    """A task: which token strings go in, and which one comes out.

    A subclass states the attributes, draws inputs in ``_sample`` and finds their outputs in ``_solve``. Tasks hold no
    state. Lengths are those of the input, from ``min_length`` upward; ``input_length`` tells where a task makes
    another length of one that it cannot have.

    Attributes:
      name: as in configurations and tables.
      level: of the Chomsky hierarchy.
      input_symbols, output_symbols: one character for each token, in order; for reading and printing. Some stand for
        tokens that never occur and only keep the vocabulary of the reference program.
      chance: the accuracy that the paper calls chance. Always naming the most frequent class may do better.
      permutation_invariant: whether the order of the input is immaterial.
      terminator: the output token after which nothing counts, if there is one.
      min_length: the shortest input.
    """

    name: str
    level: Literal["regular", "context-free", "context-sensitive"]
    input_symbols: str
    output_symbols: str
    chance: float
    permutation_invariant: bool = False
    terminator: int | None = None
    min_length: int = 1

    @property
    def input_vocab(self) -> int:
        """Number of input tokens."""
        return len(self.input_symbols)

    @property
    def output_vocab(self) -> int:
        """Number of output tokens."""
        return len(self.output_symbols)

    def input_length(self, length: int) -> int:
        """The length of the inputs that ``sample`` gives for ``length``."""
        return self._checked(length)

    def output_length(self, length: int) -> int:
        """The number of outputs for an input of ``length``."""
        return self._output_length(self.input_length(length))

    def sample(self, rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
        """Draws inputs, int32 [batch, input_length(length)].

        A row depends on the generator and on the rows before it: a process that needs some rows of a batch draws the
        whole batch and takes its own.
        """
        if batch < 1:
            raise UserError(f"batch={batch} is not positive")
        return self._sample(rng, int(batch), self.input_length(length)).astype(np.int32)

    def solve(self, inputs: np.ndarray) -> np.ndarray:
        """The outputs, int32 [B, output_length(L)], of inputs [B, L] of this task."""
        inputs = np.asarray(inputs)
        if inputs.ndim != 2 or inputs.dtype.kind not in "iu":
            raise UserError(f"inputs of {self.name} are integers [batch, length], not {inputs.dtype} {inputs.shape}")
        if inputs.size and not (inputs.min() >= 0 and inputs.max() < self.input_vocab):
            raise UserError(f"inputs of {self.name} are tokens from 0 to {self.input_vocab - 1}")
        length = inputs.shape[1]
        if self.input_length(length) != length:
            raise UserError(f"length={length}: inputs of {self.name} are {self.input_length(length)} long instead")
        return self._solve(inputs.astype(np.int64)).astype(np.int32)

    def mask(self, outputs: np.ndarray) -> np.ndarray:
        """Which outputs count, bool of the shape of ``outputs`` [B, n]: all up to the first terminator and with it."""
        outputs = np.asarray(outputs)
        if self.terminator is None:
            return np.ones(outputs.shape, bool)
        ends = np.cumsum(outputs == self.terminator, axis=1)
        return (ends == 0) | ((ends == 1) & (outputs == self.terminator))

    def _checked(self, length: int) -> int:
        if length < self.min_length:
            raise UserError(f"length={length}: {self.name} starts at {self.min_length}")
        return int(length)

    def _output_length(self, length: int) -> int:
        return 1

    def _sample(self, rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
        raise NotImplementedError

    def _solve(self, inputs: np.ndarray) -> np.ndarray:
        raise NotImplementedError


def encode(symbols: str, text: str) -> np.ndarray:
    """Tokens, int32 [len(text)], of a string written in ``Task.input_symbols`` or ``output_symbols``."""
    unknown = set(text) - set(symbols)
    if unknown:
        raise UserError(f"{text!r} holds {min(unknown)!r}; the symbols are {symbols!r}")
    return np.array([symbols.index(c) for c in text], np.int32)


def decode(symbols: str, tokens: np.ndarray) -> str:
    """The inverse of ``encode``."""
    return "".join(symbols[t] for t in np.asarray(tokens).tolist())


def draw(rng: np.random.Generator, count: int, *shape: int) -> np.ndarray:
    """Uniform tokens 0 to ``count - 1``, int64 of the given shape."""
    # Drawn as bytes: an eighth of the random numbers.
    return rng.integers(0, count, shape, np.uint8).astype(np.int64)
