"""The report of a task's accuracies: JSON, and the plot made from it."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dape_jax
from dape_jax import config as config_lib
from dape_jax.data.chomsky import Task
from dape_jax.data.chomsky.batches import total_length
from dape_jax.evaluation import plots
from dape_jax.evaluation.chomsky import Accuracies
from dape_jax.evaluation.report import FORMAT, write_json
from dape_jax.rotary import YaRN
from dape_jax.training.run import Run

PROTOCOL = "chomsky"


def make_report(
    run: Run, task: Task, accuracies: Accuracies, step: int, seed: int, train_dtype: str | None = None
) -> dict[str, Any]:
    """The report of one run. ``score`` is the mean accuracy over lengths beyond the training lengths, in percent.

    ``seed`` is that of the evaluation, ``train_dtype`` that of the activations in training.
    """
    config, lengths = run.config, accuracies.lengths
    accuracy = 100 * accuracies.correct / accuracies.counted
    solved = 100 * accuracies.solved / accuracies.rows
    trained = lengths <= config.data.sequence_length
    return {
        "format": FORMAT,
        "protocol": PROTOCOL,
        "task": task.name,
        "method": config_lib.method_label(config.model.position),
        "position": config.model.position,
        "network": None if run.model.adapt is None else dataclasses.asdict(run.model.adapt),
        "random_range": run.model.random_range,
        "train_length": config.data.sequence_length,
        "step": step,
        "seed": config.training.seed,
        "evaluation_seed": seed,
        "chance": 100 * task.chance,
        "score": _mean(accuracy[~trained]),
        "score_of_sequences": _mean(solved[~trained]),
        "score_in_training_range": _mean(accuracy[trained]),
        "score_of_sequences_in_training_range": _mean(solved[trained]),
        "lengths": lengths.tolist(),
        "accuracy": accuracy.round(4).tolist(),
        "accuracy_of_sequences": solved.round(4).tolist(),
        "scored_outputs": accuracies.counted.tolist(),
        "samples_of_each_length": accuracies.rows,
        "compilations": accuracies.compilations,
        **_yarn_scales(run, accuracies),
        "seconds": round(accuracies.seconds, 1),
        "model": {"layers": run.model.num_layers, "heads": run.model.num_heads, "width": run.model.width},
        "dtype": run.model.dtype,
        "train_dtype": train_dtype or run.model.dtype,
        "backend": run.model.attention_backend(total_length(task, int(lengths.max()))),
        "device": f"{run.mesh.size} x {jax.devices()[0].device_kind}",
        "versions": {"dape_jax": dape_jax.__version__, "jax": jax.__version__},
    }


def _yarn_scales(run: Run, accuracies: Accuracies) -> dict[str, list[float]]:
    """YaRN's scale at each length."""
    if not isinstance(run.model.rotary, YaRN):
        return {}
    rotary = [run.model.for_length(width).rotary for width in accuracies.widths.tolist()]
    return {"yarn_scales": [x.scale for x in rotary if isinstance(x, YaRN)]}


def report_name(task: str, step: int, longest: int, seed: int = 0) -> str:
    """``seed`` is that of the evaluation."""
    return f"{PROTOCOL}_{task}_step{step}_1to{longest}{f'_seed{seed}' if seed else ''}.json"


def write_report(report: dict[str, Any], directory: Path) -> Path:
    """Writes the report and its plot below ``directory``; returns the JSON's path."""
    path = directory / report_name(report["task"], report["step"], report["lengths"][-1], report["evaluation_seed"])
    write_json(report, path)
    plots.accuracy_by_length([report], path.with_suffix(".png"))
    return path


def summary(report: dict[str, Any]) -> str:
    """The result in a line."""
    longest, trained = report["lengths"][-1], report["train_length"]
    beyond = (
        f"{report['score']:.2f} % of outputs right at lengths {trained + 1} to {longest}"
        if report["score"] is not None
        else f"no length beyond {trained} was scored"
    )
    return (
        f"{report['task']}, {report['method']}: {beyond}, {report['score_in_training_range']:.2f} % up to {trained} "
        f"(chance {report['chance']:.0f} %; {report['samples_of_each_length']} samples of each length, "
        f"{report['compilations']} compilations)"
    )


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None
