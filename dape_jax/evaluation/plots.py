"""Plots of evaluation reports."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def perplexity_by_length(reports: Sequence[dict[str, Any]], path: Path) -> None:
    """Perplexity over context length, both logarithmic, a line a report, with standard errors and training length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
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
    axes.set_xlabel("context length (tokens)")
    axes.set_ylabel(f"perplexity of the last {reports[0]['k']} tokens")
    axes.set_title(f"{reports[0]['text']['source']}, {reports[0]['text']['split']} split", fontsize=10)
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, dpi=150, format="png")
    plt.close(figure)
    partial.replace(path)
