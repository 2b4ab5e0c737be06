"""The 15 tasks of the Chomsky Hierarchy Evaluation (arXiv 2207.02098) in NumPy: samplers, exact solvers, masks.

``get_task(name)`` gives a task; ``task.sample(generator(seed, step), batch, length)`` its inputs, ``task.solve`` their
outputs and ``task.mask`` which of those count. Tokens, vocabularies and distributions are those of the reference
program, also at lengths where a rule makes no sense; each task's docstring says what holds there.
"""

from dape_jax.data.chomsky.base import Task, generator
from dape_jax.data.chomsky.registry import TASKS, get_task

__all__ = ["TASKS", "Task", "generator", "get_task"]
