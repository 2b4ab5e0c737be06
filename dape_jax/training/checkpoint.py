"""Checkpoints with Orbax: parameters, optimiser, step, configuration, version. Restored into any mesh.

Orbax writes a checkpoint under a temporary name and renames it when it is whole, so an interrupted save is never
the latest one.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp

import dape_jax
from dape_jax.errors import UserError
from dape_jax.training.step import TrainState


class Checkpoints:
    """The checkpoints of a run, below ``directory``."""

    def __init__(self, directory: Path, keep: int | None = None):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=keep is not None)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def latest(self) -> int | None:
        """The step of the newest whole checkpoint, None if there is none."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """All steps with a whole checkpoint."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, step: int, config: Mapping[str, Any]) -> None:
        """Starts saving in the background; a later save or ``close`` waits for it."""
        self._manager.save(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardSave(state.params),
                optimizer=ocp.args.StandardSave({"opt_state": state.opt_state, "step": state.step}),
                run=ocp.args.JsonSave({"config": dict(config), "version": dape_jax.__version__}),
            ),
        )

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state at ``step``, into the shapes and shardings of ``abstract``."""
        optimizer = {"opt_state": abstract.opt_state, "step": abstract.step}
        restored: Any = self._manager.restore(
            step,
            args=ocp.args.Composite(
                params=ocp.args.StandardRestore(abstract.params), optimizer=ocp.args.StandardRestore(optimizer)
            ),
        )
        return TrainState(restored.params, restored.optimizer["opt_state"], restored.optimizer["step"])

    def restore_params(self, step: int, abstract: Any) -> Any:
        """The parameters alone."""
        args = ocp.args.Composite(params=ocp.args.StandardRestore(abstract))
        restored: Any = self._manager.restore(step, args=args)
        return restored.params

    def close(self) -> None:
        """Waits for a save under way."""
        self._manager.wait_until_finished()
        self._manager.close()


def require_step(checkpoints: Checkpoints, directory: Path, step: int | None) -> int:
    """``step``, or the latest one for None; refuses what is not there."""
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{directory} holds no whole checkpoint yet; train first, or for longer")
    if step is not None and step not in steps:
        raise UserError(f"step={step}: no such checkpoint in {directory}; there are {steps}")
    return steps[-1] if step is None else step
