"""The table of many runs on tasks of the Chomsky hierarchy: mean and deviation over seeds, beside the paper's."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dape_jax import config as config_lib
from dape_jax.adapt import Adapt
from dape_jax.data.chomsky import get_task
from dape_jax.errors import UserError
from dape_jax.evaluation import plots
from dape_jax.evaluation.chomsky_paper import printed
from dape_jax.evaluation.chomsky_report import PROTOCOL, report_name
from dape_jax.evaluation.report import FORMAT, write_json

NUMBERS = ("score", "score_of_sequences", "score_in_training_range")
SHARED = ("train_length", "step", "samples_of_each_length", "model", "evaluation_seed", "train_dtype")
"""What all runs of a table must have in common."""
AT_CHANCE = "°"
"""Marks an accuracy that is not above chance by more than two standard errors."""


def find_report(
    workdir: Path, task: str, position: str, seed: int, step: int, longest: int, samples: int
) -> dict[str, Any] | None:
    """The report of a run at a step, up to a length and with so many samples of each; None if there is none.

    Raises:
      UserError: it is there and damaged, or another run's.
    """
    path = workdir / "evaluation" / report_name(task, step, longest)
    if not path.exists():
        return None
    try:
        report = json.loads(path.read_text())
        if report["format"] != FORMAT:
            raise UserError(f"{path} has format {report['format']}; this version reads {FORMAT}")
        for name in (*SHARED, *NUMBERS, "task", "position", "network", "seed", "lengths", "accuracy"):
            if name not in report:
                raise KeyError(name)
        if not all(isinstance(report[name], int | float) for name in NUMBERS):
            raise TypeError(f"{', '.join(NUMBERS)} must be numbers")
        if len(report["accuracy"]) != len(report["lengths"]) or report["lengths"][-1] != longest:
            raise ValueError(f"{len(report['accuracy'])} accuracies up to length {longest}")
    except (OSError, ValueError, KeyError, TypeError, IndexError) as e:
        raise UserError(f"{path} is damaged: {e!r}; remove it, and it is made again") from e
    wanted = {"task": task, "position": position, "seed": seed, "step": step, "evaluation_seed": 0}
    other = [f"{name}={report[name]!r}" for name, value in wanted.items() if report[name] != value]
    if other:
        raise UserError(f"{path} is the report of another run: {', '.join(other)}; remove it, and it is made again")
    return report if report["samples_of_each_length"] == samples else None


def make_table(reports: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The table as a JSON-able dictionary, from the reports of any tasks, methods and seeds.

    Raises:
      UserError: the runs were not trained or scored alike.
    """
    reports = [{**report, "longest": report["lengths"][-1]} for report in reports]
    for position in {report["position"] for report in reports}:
        if len({json.dumps(r["network"]) for r in reports if r["position"] == position}) > 1:
            raise UserError(f"the runs cannot stand in one table: the DAPE networks of {position} differ")
    for what in (*SHARED, "longest"):
        differing = {json.dumps(report[what]) for report in reports}
        if len(differing) > 1:
            raise UserError(f"the runs cannot stand in one table: {what} is {' and '.join(sorted(differing))}")
    tasks = list(dict.fromkeys(report["task"] for report in reports))
    positions = list(dict.fromkeys(report["position"] for report in reports))
    cells = []
    for task in tasks:
        for position in positions:
            own = [r for r in reports if (r["task"], r["position"]) == (task, position)]
            if own:
                cells.append(_cell(task, position, own))
    first = reports[0]
    return {
        "format": FORMAT,
        "protocol": f"{PROTOCOL}_table",
        "tasks": tasks,
        "methods": positions,
        "lengths": [first["train_length"] + 1, first["lengths"][-1]],
        **{name: first[name] for name in SHARED},
        "cells": cells,
    }


def _cell(task: str, position: str, reports: list[dict[str, Any]]) -> dict[str, Any]:
    scores = np.asarray([r["score"] for r in reports], np.float64)
    return {
        "task": task,
        "position": position,
        "method": config_lib.method_label(position),
        "seeds": [r["seed"] for r in reports],
        "scores": scores.tolist(),
        "mean": float(scores.mean()),
        "standard_deviation": float(scores.std(ddof=1)) if len(scores) > 1 else None,
        "mean_in_training_range": float(np.mean([r["score_in_training_range"] for r in reports])),
        "mean_of_sequences": float(np.mean([r["score_of_sequences"] for r in reports])),
        **_chance(task, float(scores.mean()), reports),
        "network": reports[0]["network"],
        "paper": printed(task, position) if _as_in_the_paper(reports[0]["network"]) else None,
        "accuracy": np.mean([r["accuracy"] for r in reports], axis=0).round(3).tolist(),
    }


def _as_in_the_paper(network: dict[str, Any] | None) -> bool:
    """Whether the paper's figures are of such a network, whatever its width."""
    if network is None:
        return True
    default = dataclasses.asdict(Adapt())
    return all(network[name] == default[name] for name in default if name != "width")


def _chance(task: str, mean: float, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Chance, and whether a mean is above it by more than two standard errors.

    These are of as many guesses as there were rows: the outputs of one row hang together.
    """
    chance, first = get_task(task).chance, reports[0]
    rows = len(reports) * first["samples_of_each_length"] * (first["longest"] - first["train_length"])
    error = 100 * (chance * (1 - chance) / rows) ** 0.5
    return {"chance": 100 * chance, "above_chance": mean > 100 * chance + 2 * error}


def print_table(table: dict[str, Any]) -> None:
    """A line a task, a column a method: mean ± deviation over seeds, marked if at chance, and the paper's figure."""
    first, last = table["lengths"]
    cells = {(c["task"], c["position"]): c for c in table["cells"]}
    rich = Table(title=f"Right outputs at lengths {first} to {last} in %, mean ± deviation over seeds (paper)")
    rich.add_column("task")
    rich.add_column("chance", justify="right")
    for position in table["methods"]:
        rich.add_column(config_lib.method_label(position), justify="right")
    for task in table["tasks"]:
        star = "*" if get_task(task).permutation_invariant else ""
        row = [_text(cells.get((task, position))) for position in table["methods"]]
        rich.add_row(task + star, f"{100 * get_task(task).chance:.0f}", *row)
    console = Console()
    console = console if console.is_terminal else Console(width=200)
    console.print(rich)
    model = table["model"]
    networks = {json.dumps(cell["network"]) for cell in table["cells"] if cell["network"] is not None}
    for network in sorted(networks):
        console.print("DAPE: " + ", ".join(f"{k} {v}" for k, v in json.loads(network).items()), highlight=False)
    console.print(
        f"{model['layers']} layers of {model['width']}, {model['heads']} heads, {table['step']:,} steps at lengths up "
        f"to {table['train_length']}; {table['samples_of_each_length']} samples of a length. * permutation-invariant. "
        f"{AT_CHANCE} no better than chance. The paper: 5 layers of 256, 8 heads, 200,000 steps, lengths 41 to 500.",
        highlight=False,
    )


def _text(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return ""
    deviation = "" if cell["standard_deviation"] is None else f" ± {cell['standard_deviation']:.1f}"
    mark = "" if cell["above_chance"] else AT_CHANCE
    return f"{cell['mean']:.1f}{deviation}{mark}" + ("" if cell["paper"] is None else f" ({cell['paper']:.1f})")


def write(table: dict[str, Any], path: Path) -> None:
    """The table as ``path``.json and its curves as ``path``.png."""
    write_json(table, path.with_name(path.name + ".json"))
    plots.accuracy_of_tasks(table, path.with_name(path.name + ".png"))
