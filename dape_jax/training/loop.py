"""The training loop: batches by step, metrics, validation, checkpoints, resuming."""

import contextlib
import logging
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils
from tqdm import tqdm

from dape_jax import config as config_lib
from dape_jax import sharding
from dape_jax.errors import UserError
from dape_jax.training import optimizer as optimizer_lib
from dape_jax.training.checkpoint import Checkpoints
from dape_jax.training.metrics import check_tensorboard
from dape_jax.training.recorder import NonFiniteUpdate, Recorder
from dape_jax.training.run import Run
from dape_jax.training.step import TrainState, compile_step, init_state
from dape_jax.training.stop import StopFlag, Stopped, agreed
from dape_jax.training.validation import make_validation
from dape_jax.training.workdir import claim, sole_training

_log = logging.getLogger(__name__)


def train(run: Run, workdir: Path, show_progress: bool = True, stop: StopFlag | None = None) -> TrainState:
    """Trains ``run`` to its last step in ``workdir``, from its latest checkpoint if there is one.

    Writes config.json, metrics.jsonl and checkpoints/ into ``workdir``. A run that was killed and started again
    sees the same batches and computes the same losses as one that was not.

    Args:
      run: what to train.
      workdir: the run's folder.
      show_progress: whether the first process shows a progress bar.
      stop: a flag that ends the run early, with a checkpoint of the step that it has reached. One process looks at it
        after every step and between the batches of a validation. Several compare theirs after the first step, every
        ``log_every`` steps and at checkpoints and validations, so that all stop after the same step.

    Raises:
      UserError: ``workdir`` holds another run, another process trains in it, or the batch does not fit the mesh or
        the text.
      NonFiniteUpdate: an update was not finite; the state before it is the latest checkpoint.
      SaveFailed: a checkpoint or the metrics cannot be written.
      Stopped: ``stop`` was set.
    """
    config, training, stop = run.config, run.config.training, stop or StopFlag()
    _check(run)
    validate = make_validation(run, stop) if training.validate_every else None
    optimizer = optimizer_lib.make_optimizer(config.optimizer, training.steps)
    writes = jax.process_index() == 0
    with jax.set_mesh(run.mesh), sole_training(workdir) if writes else contextlib.nullcontext():
        init, abstract = init_state(run.model, optimizer, training.seed, run.mesh)
        if writes:
            claim(workdir, run)
        multihost_utils.sync_global_devices("workdir claimed")  # the others look into it only then
        checkpoints = Checkpoints(workdir / "checkpoints", keep=training.keep_checkpoints)
        first, state = checkpoints.restore_latest(abstract, config_lib.to_dict(config)) or (0, init())
        _log.info(
            "%s: %s parameters, %s, mesh %s, attention %s, checkpoint every %d steps",
            config_lib.method_label(config.model.position),
            f"{sum(x.size for x in jax.tree.leaves(abstract.params)):,}",
            run.model.dtype,
            dict(run.mesh.shape),
            run.model.attention_backend(run.problem.row_length),
            training.checkpoint_every,
        )
        if first:
            _log.info("resuming at step %d of %d", first, training.steps)
        step_fn = compile_step(
            run.model, run.problem.objective, optimizer, abstract, run.mesh, training.accumulate, training.seed
        )
        batches = run.problem.batches(first, jax.process_index(), jax.process_count())
        recorder = Recorder(
            workdir if writes else None,
            first,
            training.tensorboard,
            optimizer_lib.schedule(config.optimizer, training.steps),
            run.problem.targets_per_step,
            lambda step: run.problem.origins(step - 1),
        )
        progress = tqdm(
            total=training.steps,
            initial=first,
            desc=config_lib.method_label(config.model.position),
            unit="step",
            disable=not show_progress or not writes,
        )

        def save(step: int) -> None:
            checkpoints.save(state, step, config_lib.to_dict(config))

        def validated(step: int) -> bool:
            """Whether the validation after ``step``, if there is to be one, was done."""
            if validate is None or step % training.validate_every:
                return True
            loss = validate(state.params)
            if loss is not None:
                recorder.write([{"step": step, "validation_loss": loss}])
            return loss is not None

        def stopped(step: int) -> Stopped:
            save(step)
            checkpoints.wait()
            return Stopped(
                agreed(stop.signal_number),
                f"after step {step} of {training.steps}, which is saved; start the same command again to go on",
            )

        try:
            # A run that was stopped before or in the validation of its last step still owes it.
            if agreed(first > 0 and writes and first not in recorder.validated) and not validated(first):
                raise stopped(first)
            for step in range(first + 1, training.steps + 1):
                state, measured = step_fn(state, sharding.put_rows(run.mesh, next(batches)), np.int32(step - 1))
                recorder.add(step, measured)
                progress.update()
                saves = step % training.checkpoint_every == 0 or step == training.steps
                checks = bool(training.validate_every) and step % training.validate_every == 0
                reports = saves or checks or step % training.log_every == 0 or step == first + 1
                asked = (reports or jax.process_count() == 1) and agreed(stop.signal_number)
                if reports or asked:
                    progress.set_postfix_str(recorder.flush())
                    checkpoints.check()
                if (asked and step < training.steps) or not validated(step):
                    raise stopped(step)
                if saves:
                    save(step)
        except NonFiniteUpdate as e:
            before = e.step - 1
            if before:
                save(before)
                checkpoints.wait()
            kept = f"the state before it is the checkpoint of step {before}" if before else "there is no earlier step"
            raise NonFiniteUpdate(e.step, f"{e}; {kept}") from None
        finally:
            progress.close()
            recorder.close()
            checkpoints.close()
    return state


def _check(run: Run) -> None:
    """Refuses what cannot be trained, before anything is written."""
    training = run.config.training
    if training.batch_size % (run.mesh.size * training.accumulate):
        parts = f" in {training.accumulate} microbatches (training.accumulate)" if training.accumulate > 1 else ""
        raise UserError(
            f"training.batch_size={training.batch_size} cannot be split over {run.mesh.size} devices{parts}"
        )
    run.problem.check(run.model)
    if run.model.backend != "auto":
        run.model.attention_backend(run.problem.row_length)  # refuses one that cannot serve
    try:
        run.model.check_length(run.problem.row_length)
    except UserError as e:
        raise UserError(f"model.position={run.config.model.position!r}: {e} (model.learned.length, "
                        "model.randomised.range)") from e  # fmt: skip
    if training.tensorboard:
        check_tensorboard()
