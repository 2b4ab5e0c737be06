"""The training loop: batches by step, metrics, validation, checkpoints, resuming."""

import functools
import logging
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from tqdm import tqdm

from dape_jax import config as config_lib
from dape_jax import sharding
from dape_jax.attention import choose_backend
from dape_jax.data.batches import Windows, training_batches
from dape_jax.errors import UserError
from dape_jax.training import optimizer as optimizer_lib
from dape_jax.training.checkpoint import Checkpoints
from dape_jax.training.metrics import MetricsFile
from dape_jax.training.run import Run, claim
from dape_jax.training.step import TrainState, compile_step, init_state, loss_fn

_log = logging.getLogger(__name__)


class NonFiniteLoss(RuntimeError):
    """The loss or the gradient became infinite or NaN; the last checkpoint is from before."""


def train(run: Run, workdir: Path, show_progress: bool = True) -> TrainState:
    """Trains ``run`` to its last step in ``workdir``, from its latest checkpoint if there is one.

    Writes config.json, metrics.jsonl and checkpoints/ into ``workdir``. A run that was killed and started again
    sees the same batches and computes the same losses as one that was not.

    Raises:
      UserError: ``workdir`` holds another run, or the batch does not fit the mesh or the text.
      NonFiniteLoss: names the step.
    """
    config, training = run.config, run.config.training
    if training.batch_size % run.mesh.size:
        raise UserError(f"training.batch_size={training.batch_size} cannot be split over {run.mesh.size} devices")
    Windows(run.tokens, "train", config.data.sequence_length)  # refuses a text that is too short, before writing
    validate = _validation(run) if training.validate_every else None
    optimizer = optimizer_lib.make_optimizer(config.optimizer, training.steps)
    schedule = optimizer_lib.schedule(config.optimizer, training.steps)
    with jax.set_mesh(run.mesh):
        init, abstract = init_state(run.model, optimizer, training.seed, run.mesh)
        if jax.process_index() == 0:
            claim(workdir, run)
        multihost_utils.sync_global_devices("workdir claimed")  # the others look into it only then
        checkpoints = Checkpoints(workdir / "checkpoints", keep=training.keep_checkpoints)
        first = checkpoints.latest() or 0
        state = checkpoints.restore(first, abstract) if first else init()
        _log.info(
            "%s: %s parameters, %s, mesh %s, attention %s, checkpoint every %d steps",
            config_lib.method_label(config.model.position),
            f"{sum(x.size for x in jax.tree.leaves(abstract.params)):,}",
            run.model.dtype,
            dict(run.mesh.shape),
            choose_backend(run.model.backend),
            training.checkpoint_every,
        )
        if first:
            _log.info("resuming at step %d of %d", first, training.steps)
        step_fn = compile_step(run.model, optimizer, abstract, run.mesh, run.segment_end)
        batches = training_batches(
            run.tokens,
            config.data.sequence_length,
            training.batch_size,
            training.seed,
            first,
            jax.process_index(),
            jax.process_count(),
        )
        metrics = MetricsFile(workdir / "metrics.jsonl", first) if jax.process_index() == 0 else None
        recorder = _Recorder(metrics, schedule, training.batch_size * config.data.sequence_length, checkpoints)
        progress = tqdm(
            total=training.steps,
            initial=first,
            desc=config_lib.method_label(config.model.position),
            unit="step",
            disable=not show_progress or jax.process_index() != 0,
        )
        try:
            for step in range(first + 1, training.steps + 1):
                state, measured = step_fn(state, sharding.put_rows(run.mesh, next(batches)))
                recorder.add(step, measured)
                progress.update()
                save = step % training.checkpoint_every == 0 or step == training.steps
                check = bool(training.validate_every) and step % training.validate_every == 0
                if save or check or step % training.log_every == 0:
                    progress.set_postfix_str(recorder.flush())
                if check and validate is not None:
                    recorder.write([{"step": step, "validation_loss": validate(state.params)}])
                if save:
                    checkpoints.save(state, step, config_lib.to_dict(config))
        finally:
            progress.close()
            checkpoints.close()
            if metrics is not None:
                metrics.close()
    return state


class _Recorder:
    """Collects each step's metrics on the device and fetches them in groups, so that steps overlap."""

    def __init__(
        self, file: MetricsFile | None, schedule: Callable[[Any], Any], tokens_per_step: int, checkpoints: Checkpoints
    ):
        self._file = file
        self._schedule = schedule
        self._tokens_per_step = tokens_per_step
        self._checkpoints = checkpoints
        self._pending: list[tuple[int, dict[str, jax.Array]]] = []
        self._since = time.monotonic()
        self._first_group = True

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        self._pending.append((step, metrics))

    def flush(self) -> str:
        """Writes what is pending; returns the progress bar's text. The first group includes the compilation."""
        lines = []
        for step, metrics in self._pending:
            values = {name: float(x) for name, x in jax.device_get(metrics).items()}
            lines.append({"step": step, **values, "learning_rate": float(self._schedule(step - 1))})
        now = time.monotonic()
        rate = len(lines) * self._tokens_per_step / (now - self._since)
        lines[-1]["tokens_per_second"] = round(rate, 1)
        self._pending, self._since = [], now
        bad = [line for line in lines if not (math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]))]
        self.write([line for line in lines if not bad or line["step"] < bad[0]["step"]])
        if bad:
            raise NonFiniteLoss(
                f"loss {bad[0]['loss']} and gradient norm {bad[0]['grad_norm']} at step {bad[0]['step']}; "
                f"the latest checkpoint is of step {self._checkpoints.latest() or 0}"
            )
        warming, self._first_group = self._first_group, False
        return f"loss {lines[-1]['loss']:.4f}, {rate:,.0f} tokens/s{' with compilation' if warming else ''}"

    def write(self, lines: list[dict[str, Any]]) -> None:
        if self._file is not None:
            self._file.write(lines)


def _validation(run: Run) -> Callable[[Any], float]:
    """Mean loss over evenly spaced windows of the validation split, as a function of the parameters."""
    windows = Windows(run.tokens, "validation", run.config.data.sequence_length)
    rows = min(run.config.training.validation_windows, len(windows)) // run.mesh.size * run.mesh.size
    if not rows:
        raise UserError(
            f"the validation split has {len(windows)} windows of {run.config.data.sequence_length} tokens, fewer than "
            f"the {run.mesh.size} devices; set training.validate_every=0 or a larger data.validation_fraction"
        )
    chosen = np.stack([windows[int(i)] for i in np.linspace(0, len(windows) - 1, rows)])
    chosen = chosen[jax.process_index() :: jax.process_count()]
    loss = jax.jit(functools.partial(loss_fn, run.model, end_of_document=run.segment_end))
    return lambda params: float(loss(params, sharding.put_rows(run.mesh, chosen)))
