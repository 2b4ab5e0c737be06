"""Checkpoints with Orbax: parameters, optimiser, step, configuration, version. Restored into any mesh.

Orbax writes a checkpoint under a temporary name and renames it when it is whole, so an interrupted save is never
the latest one. One that was damaged later is passed over for the one before.
"""

import contextlib
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

import dape_jax
from dape_jax.errors import UserError
from dape_jax.training.identity import difference
from dape_jax.training.step import TrainState
from dape_jax.training.stop import agreed

_log = logging.getLogger(__name__)


class SaveFailed(RuntimeError):
    """Something of a run could not be written, as on a full disk; what was there before still is."""


class Checkpoints:
    """The checkpoints of a run, below ``directory``.

    With ``keep`` it writes them, so many at most, and removes what interrupted saves have left; without, it only reads.
    """

    def __init__(self, directory: Path, keep: int | None = None):
        self._directory = directory.absolute()
        self._saving: int | None = None
        self._failed = False
        writes = keep is not None
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=writes, cleanup_tmp_directories=writes)
        try:
            self._manager = ocp.CheckpointManager(self._directory, options=options)
        except OSError as e:
            raise SaveFailed(f"{directory} cannot be made: {_reason(e)}") from e

    def latest(self) -> int | None:
        """The step of the newest checkpoint, None if there is none; a save under way counts."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """All steps with a checkpoint; a save under way counts."""
        return sorted(self._manager.all_steps())

    def save(self, state: TrainState, step: int, config: Mapping[str, Any]) -> None:
        """Starts saving in the background, unless there is a checkpoint of ``step`` or a later one.

        Raises:
          SaveFailed: this save cannot start or the one before has failed.
        """
        self.wait()
        self._saving = step
        try:
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    params=ocp.args.StandardSave(state.params),
                    optimizer=ocp.args.StandardSave({"opt_state": state.opt_state, "step": state.step}),
                    run=ocp.args.JsonSave({"config": dict(config), "version": dape_jax.__version__}),
                ),
            )
        except Exception as e:
            raise self._failure(e) from e

    def check(self) -> None:
        """Raises SaveFailed if the save in the background has failed; does not wait for it."""
        try:
            self._manager.check_for_errors()
        except Exception as e:
            raise self._failure(e) from e

    def wait(self) -> None:
        """Waits for a save under way, and raises SaveFailed if it fails."""
        try:
            self._manager.wait_until_finished()
        except Exception as e:
            raise self._failure(e) from e

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

    def restore_latest(self, abstract: TrainState, config: Mapping[str, Any]) -> tuple[int, TrainState] | None:
        """The newest checkpoint that can be restored, with its step; None if there are none at all.

        Newer ones that cannot be are named in the log and moved aside, to ``damaged_checkpoints`` beside
        ``directory``, since the run will write checkpoints of the same steps again. Processes decide together.

        Raises:
          UserError: there are checkpoints, but none can be restored, or one is of a run with another ``config``.
        """
        failures: dict[int, str] = {}
        for step in reversed(self.steps()):
            state, failure = None, None
            try:
                self._check_run(step, config)
                state = self.restore(step, abstract)
            except UserError:
                raise
            except Exception as e:  # what is raised depends on the file that is damaged
                failure = _reason(e)
            if agreed(failure is not None):
                failures[step] = failure or "another process failed"
                continue
            assert state is not None
            for damaged, reason in failures.items():
                moved = self._set_aside(damaged)
                _log.warning(
                    "the checkpoint of step %d cannot be restored (%s): it is now %s, and the run goes on from step %d",
                    damaged,
                    reason,
                    moved,
                    step,
                )
            return step, state
        if failures:
            found = "; ".join(f"step {step}: {reason}" for step, reason in failures.items())
            raise UserError(
                f"no checkpoint in {self._directory} can be restored ({found}); "
                "use another workdir to start from the beginning"
            )
        return None

    def restore_params(self, step: int, abstract: Any, config: Mapping[str, Any]) -> Any:
        """The parameters alone.

        Raises:
          UserError: they cannot be restored, or are of a run with another ``config``.
        """
        args = ocp.args.Composite(params=ocp.args.StandardRestore(abstract))
        try:
            self._check_run(step, config)
            restored: Any = self._manager.restore(step, args=args)
        except UserError:
            raise
        except Exception as e:  # what is raised depends on the file that is damaged
            others = [s for s in self.steps() if s != step]
            hint = f"; there are also steps {others}" if others else ""
            raise UserError(
                f"the checkpoint of step {step} in {self._directory} cannot be restored ({_reason(e)}){hint}"
            ) from e
        return restored.params

    def close(self) -> None:
        """Waits for a save under way, and raises SaveFailed if it fails and that was not said before."""
        if self._failed:
            with contextlib.suppress(Exception):
                self._manager.close()
            return
        self.wait()
        self._manager.close()

    def _check_run(self, step: int, config: Mapping[str, Any]) -> None:
        """Refuses the checkpoint of a run with another configuration, as after two folders were mixed up."""
        saved: Any = self._manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))
        found = difference(saved.run["config"], config)
        if found is not None:
            raise UserError(
                f"the checkpoint of step {step} in {self._directory} is another run's: {found.field} is "
                f"{found.before!r} in it and {found.now!r} in this run; put this run's own checkpoints there"
            )

    def _set_aside(self, step: int) -> Path:
        """Moves the checkpoint of ``step`` out of the way; returns where to."""
        target = self._directory.parent / "damaged_checkpoints" / str(step)
        if jax.process_index() == 0:
            target.parent.mkdir(exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)  # of an earlier time
            os.replace(self._directory / str(step), target)
        multihost_utils.sync_global_devices(f"checkpoint {step} set aside")
        self._manager.reload()
        return target

    def _failure(self, error: Exception) -> SaveFailed:
        """What a failed save means, once its remains are removed: on a full disk they take the place that is needed."""
        step, self._failed = self._saving, True
        with contextlib.suppress(Exception):
            self._manager.wait_until_finished()
        if jax.process_index() == 0:
            for partial in self._directory.glob(f"{step}.orbax-checkpoint-tmp*"):
                shutil.rmtree(partial, ignore_errors=True)
        self._manager.reload()
        latest = self.latest()
        kept = "there is none of an earlier step" if latest is None else f"the latest is that of step {latest}"
        return SaveFailed(f"the checkpoint of step {step} cannot be written: {_reason(error)}; {kept}")


def require_step(checkpoints: Checkpoints, directory: Path, step: int | None) -> int:
    """``step``, or the latest one for None; refuses what is not there."""
    steps = checkpoints.steps()
    if not steps:
        raise UserError(f"{directory} holds no whole checkpoint yet; train first, or for longer")
    if step is not None and step not in steps:
        raise UserError(f"step={step}: no such checkpoint in {directory}; there are {steps}")
    return steps[-1] if step is None else step


def _reason(error: BaseException) -> str:
    """The cause in a few words: TensorStore's messages go on with pages of context."""
    text = " ".join(str(getattr(error, "strerror", None) or error).split())
    if "No space left on device" in text:
        return "no space left on device"
    return text if len(text) <= 200 else f"{text[:200]} ..."
