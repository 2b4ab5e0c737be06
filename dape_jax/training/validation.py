"""The loss on held-out text while a run trains."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from dape_jax import sharding
from dape_jax.data.batches import Windows
from dape_jax.errors import UserError
from dape_jax.training.run import Run
from dape_jax.training.step import loss_fn, position_key
from dape_jax.training.stop import StopFlag, agreed


def make_validation(run: Run, stop: StopFlag) -> Callable[[Any], float | None]:
    """Mean loss over evenly spaced windows of the validation split, as a function of the parameters.

    It takes as many windows at a time as a microbatch of training has rows, and returns None if ``stop`` is set on
    any process before it is through.
    """
    training = run.config.training
    windows = Windows(run.tokens, "validation", run.config.data.sequence_length)
    count = min(training.validation_windows, len(windows)) // run.mesh.size * run.mesh.size
    if not count:
        raise UserError(
            f"the validation split has {len(windows)} windows of {run.config.data.sequence_length} tokens, fewer than "
            f"the {run.mesh.size} devices; set training.validate_every=0 or a larger data.validation_fraction"
        )
    chosen = np.stack([windows[int(i)] for i in np.linspace(0, len(windows) - 1, count)])
    rows = training.batch_size // training.accumulate
    key = position_key(run.model, training.seed, 0)  # one draw of randomised positions for all validations
    loss = jax.jit(functools.partial(loss_fn, run.model, end_of_document=run.segment_end, key=key))

    def validate(params: Any) -> float | None:
        total = 0.0
        for first in range(0, count, rows):
            if agreed(stop.signal_number):
                return None
            batch = chosen[first : first + rows]
            own = batch[jax.process_index() :: jax.process_count()]
            total += float(loss(params, sharding.put_rows(run.mesh, own))) * len(batch)
        return total / count

    return validate
