"""A stack, and instructions to push and pop."""

import numpy as np

from dape_jax.data.chomsky.base import END, Task, draw

POP, PUSH = 2, 3
"""The token that pops, and the one that pushes 0; the next one pushes 1."""


class StackManipulation(Task):
    """What is on a stack, from its top down, after instructions.

    The input is a stack of one or more symbols, from its bottom up, then instructions: pop (<), push 0 (a), push 1
    (b). Popping an empty stack does nothing. The output ends with # and has zeros behind it, which do not count. The
    height of the first stack is uniform from 1 to length - 1; length 1 is a stack and no instruction.

    Example: ``0110b<< -> 110#0000``
    Example: ``011<<<<a -> 0#0000000``
    """

    name = "stack_manipulation"
    level = "context-free"
    input_symbols = "01<ab"
    output_symbols = "01#"
    chance = 0.5
    terminator = END

    def _output_length(self, length):
        return length + 1

    def _sample(self, rng, batch, length):
        symbols = draw(rng, 2, batch, length)
        if length == 1:
            return symbols
        instructions = POP + draw(rng, 3, batch, length)
        height = rng.integers(1, length, (batch, 1))
        return np.where(np.arange(length) < height, symbols, instructions)

    def _solve(self, inputs):
        rows, length = inputs.shape
        pops = inputs == POP
        pushed = np.where(inputs >= PUSH, inputs - PUSH, inputs)  # the first stack is pushed, too
        # Without the floor the height is a running sum; pops of an empty stack raise it by the lowest that was seen.
        sums = np.cumsum(np.where(pops, -1, 1), axis=1)
        height = sums - np.minimum(np.minimum.accumulate(sums, axis=1), 0)
        # A symbol stays if the stack never again falls below the height that it made.
        lowest = np.minimum.accumulate(height[:, ::-1], axis=1)[:, ::-1]
        row, when = np.nonzero(~pops & (lowest == height))
        outputs = np.zeros((rows, length + 1), np.int64)
        outputs[row, height[row, -1] - height[row, when]] = pushed[row, when]
        outputs[np.arange(rows), height[:, -1]] = END
        return outputs
