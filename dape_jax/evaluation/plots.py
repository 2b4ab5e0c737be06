"""Plots of evaluation reports."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dape_jax.evaluation.protocols import PROTOCOLS


def title(report: dict[str, Any]) -> str:
    """What the numbers of a report are, for its table."""
    protocol = PROTOCOLS[report["protocol"]]
    scored = protocol.scored.format(k=report["k"])
    return (
        f"Perplexity of {scored} by {protocol.length} length (± standard error over {protocol.error_over}); "
        f"protocol {report['protocol']}: {protocol.note}"
    )


def perplexity_by_length(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Perplexity over context length, both logarithmic, a line a report, with standard errors and training length."""
    plt = _pyplot()
    from matplotlib.ticker import NullLocator, ScalarFormatter

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for report in reports:
        points = [r for r in report["results"] if r["perplexity"] is not None]
        errors = [r["perplexity_standard_error"] for r in points]
        errors = [e if e is not None and math.isfinite(e) else 0.0 for e in errors]
        axes.errorbar(
            [r["length"] for r in points],
            [r["perplexity"] for r in points],
            yerr=errors,
            marker="o",
            capsize=3,
            label=report.get("label", report["method"]),
        )
    lengths = sorted({n for report in reports for n in report["lengths"]})
    for trained in sorted({report["train_length"] for report in reports}):
        axes.axvline(trained, color="grey", linestyle=":", label=f"training length {trained}")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(n) for n in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(ScalarFormatter())
    first = reports[0]
    protocol = PROTOCOLS[first["protocol"]]
    axes.set_xlabel(f"{protocol.length} length (tokens)")
    axes.set_ylabel(f"perplexity of {protocol.scored.format(k=first['k'])}")
    measured = f"protocol {first['protocol']}: {protocol.note}"
    axes.set_title(f"{first['text']['source']}, {first['text']['split']} split\n{measured}", fontsize=10)
    axes.legend()
    axes.grid(alpha=0.3)
    _save(figure, path)


def accuracy_by_length(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy of outputs over input length, a line a report, all of one task; training lengths are shaded."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    first = reports[0]
    axes.axvspan(first["lengths"][0], first["train_length"], color="grey", alpha=0.2, label="training lengths")
    for report in reports:
        axes.plot(report["lengths"], report["accuracy"], linewidth=1, label=report["method"])
    axes.axhline(first["chance"], color="grey", linestyle=":", label="chance")
    axes.set_ylim(0, 102)
    axes.set_xlabel("input length (tokens)")
    axes.set_ylabel("right outputs (%)")
    axes.set_title(f"{first['task']}, {first['samples_of_each_length']} samples of each length", fontsize=10)
    axes.legend()
    axes.grid(alpha=0.3)
    _save(figure, path)


SMOOTHED = 15


def accuracy_of_tasks(table: dict[str, Any], path: Path) -> None:
    """Accuracy over input length, a panel a task and a colour a method, of a ``chomsky_table``; training shaded.

    Thin lines are the lengths themselves, thick ones the mean over a length and its neighbours, ``SMOOTHED`` in all.
    """
    plt = _pyplot()
    tasks = table["tasks"]
    columns = min(3, len(tasks))
    rows = -(-len(tasks) // columns)
    figure, panels = plt.subplots(rows, columns, figsize=(5 * columns, 3.5 * rows), squeeze=False, layout="constrained")
    for panel in panels.ravel()[len(tasks) :]:
        panel.set_axis_off()
    for task, panel in zip(tasks, panels.ravel(), strict=False):
        panel.axvspan(1, table["train_length"], color="grey", alpha=0.2)
        own = [cell for cell in table["cells"] if cell["task"] == task]
        for cell in own:
            lengths = range(table["lengths"][1] - len(cell["accuracy"]) + 1, table["lengths"][1] + 1)
            (line,) = panel.plot(lengths, cell["accuracy"], linewidth=0.5, alpha=0.35)
            panel.plot(
                lengths, _smoothed(cell["accuracy"]), linewidth=1.5, color=line.get_color(), label=cell["method"]
            )
        panel.axhline(own[0]["chance"], color="grey", linestyle=":")
        panel.set(ylim=(0, 102), xlabel="input length (tokens)", ylabel="right outputs (%)", title=task)
        panel.grid(alpha=0.3)
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize=8)
    _save(figure, path)


def _smoothed(values: Sequence[float]) -> np.ndarray:
    """Means over windows of ``SMOOTHED``, cut off at both ends."""
    half, x = SMOOTHED // 2, np.asarray(values)
    return np.asarray([x[max(0, i - half) : i + half + 1].mean() for i in range(len(x))])


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    """Writes a whole file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, dpi=150, format="png")
    _pyplot().close(figure)
    partial.replace(path)
