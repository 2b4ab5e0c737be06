"""The tasks by name."""

from dape_jax.data.chomsky.base import Task
from dape_jax.data.chomsky.binary import BinaryAddition, BinaryMultiplication, ComputeSqrt
from dape_jax.data.chomsky.expressions import ModularArithmeticBrackets, SolveEquation
from dape_jax.data.chomsky.regular import CycleNavigation, EvenPairs, ModularArithmetic, ParityCheck
from dape_jax.data.chomsky.stack import StackManipulation
from dape_jax.data.chomsky.strings import (
    BucketSort,
    DuplicateString,
    MissingDuplicateString,
    OddsFirst,
    ReverseString,
)
from dape_jax.errors import UserError, nearest

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        EvenPairs(),
        ModularArithmetic(),
        ParityCheck(),
        CycleNavigation(),
        StackManipulation(),
        ReverseString(),
        ModularArithmeticBrackets(),
        SolveEquation(),
        DuplicateString(),
        MissingDuplicateString(),
        OddsFirst(),
        BinaryAddition(),
        BinaryMultiplication(),
        ComputeSqrt(),
        BucketSort(),
    )
}
"""In the order of the paper's table."""


def get_task(name: str) -> Task:
    """The task of that name."""
    if name not in TASKS:
        raise UserError(f"data.task={name!r} is unknown{nearest(name, TASKS)}")
    return TASKS[name]
