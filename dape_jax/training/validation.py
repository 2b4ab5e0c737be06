"""The loss on held-out batches while a run trains."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from dape_jax import sharding
from dape_jax.training.objective import position_key
from dape_jax.training.run import Run
from dape_jax.training.step import loss_fn
from dape_jax.training.stop import StopFlag, agreed


def make_validation(run: Run, stop: StopFlag) -> Callable[[Any], float | None]:
    """Mean loss over the held-out batches of a run, weighed by their rows, as a function of the parameters.

    It takes as many rows at a time as a microbatch of training has, and returns None if ``stop`` is set on any process
    before it is through.
    """
    training = run.config.training
    batches = run.problem.validation(training.batch_size // training.accumulate, run.mesh.size)
    key = position_key(run.model, training.seed, 0)  # one draw of randomised positions for all validations
    loss = jax.jit(functools.partial(loss_fn, run.model, run.problem.objective, key=key))

    def validate(params: Any) -> float | None:
        total, count = 0.0, 0
        for batch in batches:
            if agreed(stop.signal_number):
                return None
            own = jax.tree.map(lambda x: x[jax.process_index() :: jax.process_count()], batch)
            rows = len(jax.tree.leaves(batch)[0])
            total += float(loss(params, sharding.put_rows(run.mesh, own))) * rows
            count += rows
        return total / count

    return validate
