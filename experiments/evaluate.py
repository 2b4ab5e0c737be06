"""Scores the checkpoint of a run at a list of lengths and writes DIR/evaluation/PROTOCOL_SPLIT_stepN_*.{json,png}.

python -m experiments.evaluate --workdir=DIR [--lengths=128,512,2048] [--protocol=last_k] [--k=K] [--step=N]
    [--split=test]

Protocols:
  last_k           windows within documents; their last K tokens are scored, the same ones at every length
  official         the split as one stream, cut into windows anew at each length; the last K tokens of each are scored
  non_overlapping  the split as one stream in segments of each length; every token is scored once

A run on a task of the Chomsky hierarchy is scored at every length up to the longest, by the outputs that are right.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from absl import flags

from dape_jax import config as config_lib
from dape_jax.config import Config
from dape_jax.data.chomsky import get_task
from dape_jax.data.splits import SPLITS
from dape_jax.data.tokenizer import load_tokenizer
from dape_jax.errors import UserError, nearest
from dape_jax.evaluation import chomsky, chomsky_report, extrapolation, protocols, report, table
from dape_jax.training.checkpoint import Checkpoints, require_step
from dape_jax.training.model import abstract_params
from dape_jax.training.run import make_run
from dape_jax.training.stop import deferred_signals
from dape_jax.training.workdir import check_text, check_tokenizer, load_config, read_record
from experiments import command

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_LENGTHS = flags.DEFINE_string(
    "lengths",
    None,
    "Comma-separated; default evaluation.lengths. A task is scored at all up to the longest.",
)
_PROTOCOL = flags.DEFINE_string("protocol", "last_k", "What is scored: last_k, official or non_overlapping.")
_K = flags.DEFINE_integer(
    "k",
    None,
    "Scored tokens of a window; default evaluation.k, else min(256, shortest length) in last_k and 256 in official, "
    "where shorter windows are scored whole; not for non_overlapping.",
)
_STEP = flags.DEFINE_integer("step", None, "Checkpoint; default the latest.")
_MAX_WINDOWS = flags.DEFINE_integer(
    "max_windows",
    None,
    "Windows, or samples of a task, at each length; default evaluation.max_windows; not for non_overlapping.",
)
_MAX_TOKENS = flags.DEFINE_integer(
    "max_tokens", None, "Of non_overlapping: score the first so many tokens of the split only; default all."
)
_DRAWS = flags.DEFINE_integer("draws", 3, "Of randomised positions: draws that are scored, for the spread.")
_DRAW_SEED = flags.DEFINE_integer("draw_seed", 0, "Of randomised positions and of a task's samples.")
_SPLIT = flags.DEFINE_string("split", "test", "Documents to score: test, validation or train.")
_FSDP = flags.DEFINE_integer("fsdp", None, "Devices that the parameters are split over; default mesh.fsdp of the run.")
_DATA_PATH = flags.DEFINE_string("data_path", None, "Where the run's text lies now; default data.path of the run.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Where the run's tokenizer lies now; default data.tokenizer.")
_USAGE = (
    "python -m experiments.evaluate --workdir=DIR [--lengths=128,512,2048] "
    "[--protocol=last_k|official|non_overlapping] [--k=K] [--step=N] [--split=test]"
)


def main(_: list[str]) -> None:
    directory = command.workdir(_WORKDIR.value)
    if not 0 <= _DRAW_SEED.value < 2**32:
        raise UserError(f"--draw_seed={_DRAW_SEED.value}: 0 to 2^32 - 1 is needed")
    config = load_config(directory)
    (_score_task if config.data.source == config_lib.CHOMSKY else _score_text)(directory, config)


def _score_text(directory: Path, config: Config) -> None:
    lengths = list(config.evaluation.lengths) if _LENGTHS.value is None else command.integers("lengths", _LENGTHS.value)
    protocol = protocols.check_protocol(_PROTOCOL.value)
    k, max_windows, max_tokens = _K.value, _MAX_WINDOWS.value, _MAX_TOKENS.value
    if protocol != "non_overlapping":  # which takes neither
        k = config.evaluation.k if k is None else k
        max_windows = config.evaluation.max_windows if max_windows is None else max_windows
    protocols.check_arguments(protocol, lengths, k, max_windows, max_tokens)
    if _DRAWS.value < 1:
        raise UserError(f"--draws={_DRAWS.value}: 1 or more is needed")
    if _SPLIT.value not in SPLITS:
        raise UserError(f"--split={_SPLIT.value} is unknown{nearest(_SPLIT.value, SPLITS)}")
    checkpoints = Checkpoints(directory / "checkpoints")
    step = require_step(checkpoints, directory, _STEP.value)
    moved = {"path": _DATA_PATH.value, "tokenizer": _TOKENIZER.value}
    moved = {field: place for field, place in moved.items() if place is not None}
    config = dataclasses.replace(_on_these_devices(config), data=dataclasses.replace(config.data, **moved))
    check_tokenizer(directory, config.data.tokenizer, load_tokenizer(config.data.tokenizer).describe())
    run = make_run(config)
    for length in lengths:
        try:
            run.model.check_length(length)
        except UserError as e:
            raise UserError(f"--lengths: {e}") from e
    check_text(directory, run)
    plan = protocols.make_plan(protocol, run.tokens, _SPLIT.value, lengths, k, max_windows, max_tokens)
    params = checkpoints.restore_params(step, abstract_params(run.model, run.mesh), config_lib.to_dict(config))
    with deferred_signals() as stop:  # also while the report is written, which so is written whole
        scores = extrapolation.score(
            run, params, plan.windows, jax.process_index() == 0, stop, _DRAWS.value, _DRAW_SEED.value
        )
        train_dtype = read_record(directory)["dtype"]
        result = report.make_report(run, plan, scores, step, train_dtype, _DRAW_SEED.value)
        if jax.process_index() == 0:
            path = _write(report.write_report, result, directory)
            table.print_table([result])
            print(f"{path}\n{path.with_suffix('.png')}")


def _score_task(directory: Path, config: Config) -> None:
    given = [flag for flag in (_K, _MAX_TOKENS, _DATA_PATH, _TOKENIZER, _PROTOCOL, _SPLIT, _DRAWS) if flag.present]
    if given:
        raise UserError(f"--{given[0].name}={given[0].value}: is not for a task (data.source={config_lib.CHOMSKY!r})")
    lengths = config.evaluation.lengths if _LENGTHS.value is None else command.integers("lengths", _LENGTHS.value)
    samples = config.evaluation.max_windows if _MAX_WINDOWS.value is None else _MAX_WINDOWS.value
    if min(lengths) < 1:
        raise UserError(f"--lengths={_LENGTHS.value}: {min(lengths)} is no length; 1 or more is needed")
    if samples < 1:
        raise UserError(f"--max_windows={samples}: 1 or more is needed")
    checkpoints = Checkpoints(directory / "checkpoints")
    step = require_step(checkpoints, directory, _STEP.value)
    run = make_run(_on_these_devices(config))
    check_text(directory, run)
    task = get_task(str(config.data.task))
    params = checkpoints.restore_params(step, abstract_params(run.model, run.mesh), config_lib.to_dict(config))
    with deferred_signals() as stop:
        accuracies = chomsky.score(
            run.model, params, run.mesh, task, run.problem.row_length, max(lengths), samples, _DRAW_SEED.value,
            jax.process_index() == 0, stop,
        )  # fmt: skip
        train_dtype = read_record(directory)["dtype"]
        result = chomsky_report.make_report(run, task, accuracies, step, _DRAW_SEED.value, train_dtype)
        if jax.process_index() == 0:
            path = _write(chomsky_report.write_report, result, directory)
            print(f"{chomsky_report.summary(result)}\n{path}\n{path.with_suffix('.png')}")


def _on_these_devices(config: Config) -> Config:
    fsdp = config.mesh.fsdp if _FSDP.value is None else _FSDP.value
    if fsdp < 1 or jax.device_count() % fsdp:
        raise UserError(f"mesh.fsdp={fsdp} does not divide the {jax.device_count()} devices here; give --fsdp=1")
    return dataclasses.replace(config, mesh=config_lib.MeshSection(data=-1, fsdp=fsdp))


def _write(write: Callable[[dict[str, Any], Path], Path], result: dict[str, Any], directory: Path) -> Path:
    try:
        return write(result, directory / "evaluation")
    except OSError as e:
        command.stop(f"the report in {directory / 'evaluation'} cannot be written: {e.strerror or e}")


if __name__ == "__main__":
    command.run(main, _USAGE)
