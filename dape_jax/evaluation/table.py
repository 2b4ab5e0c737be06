"""The table of evaluation reports in the terminal."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from dape_jax.evaluation import plots
from dape_jax.evaluation.protocols import PROTOCOLS


def print_table(reports: Sequence[dict[str, Any]]) -> None:
    """Perplexity by length and method, with standard errors.

    A line a method where that fits the terminal, else a line a length.
    """
    lengths = sorted({n for report in reports for n in report["lengths"]})
    cells = {(i, r["length"]): _cell(r) for i, report in enumerate(reports) for r in report["results"]}
    labels = [report.get("label", report["method"]) for report in reports]
    first = reports[0]
    title = plots.title(first)
    wide = Table(title=title)
    for name in ("method", "trained at", "step", *map(str, lengths)):
        wide.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for i, report in enumerate(reports):
        row = [cells.get((i, n), "") for n in lengths]
        wide.add_row(labels[i], str(report["train_length"]), str(report["step"]), *row)
    tall = Table(title=title)
    for name in ("length", *labels):
        tall.add_column(name, justify="right")
    for n in lengths:
        tall.add_row(str(n), *(cells.get((i, n), "") for i in range(len(reports))))
    console, endless = _terminal(), Console(width=10_000)
    needed = Measurement.get(endless, endless.options, wide).maximum
    if not console.is_terminal:  # a file or pipe has no width
        console = Console(width=max(80, needed))
    console.print(wide if needed <= console.width else tall)
    for line in (_footer(reports), *_spreads(reports)):
        console.print(line, highlight=False)


def _footer(reports: Sequence[dict[str, Any]]) -> str:
    """What was scored, in a sentence or two."""
    first = reports[0]
    text = f"{first['text']['source']}, {first['text']['split']} split: "
    if first["protocol"] == "last_k":
        return text + (
            f"{first['windows']} windows of {first['documents_used']} documents, the same targets at every length; "
            f"{first['documents_too_short']} of {first['documents_in_split']} documents are shorter than the longest "
            "length and left out."
        )
    results = {r["length"]: r for report in reports for r in report["results"]}
    unit = PROTOCOLS[first["protocol"]].error_over
    counts = [
        f"{r['scored_tokens']:,} tokens in {r['windows']:,} of {r['windows_available']:,} {unit} at {length}"
        for length, r in sorted(results.items())
    ]
    crossing = f"one stream of {first['tokens_in_split']:,} tokens, whose {unit} cross the ends of documents"
    most = first.get("max_tokens")
    cap = "" if most is None else f", of its first {most:,} tokens alone"
    text += f"{crossing}. Scored{cap}: {', '.join(counts)}."
    if any(report["train_packing"] == "segments" for report in reports):
        text += " In training with data.packing=segments attention stayed within a document; here it does not."
    return text


def _spreads(reports: Sequence[dict[str, Any]]) -> Iterator[str]:
    """For each method whose positions are random, how far its perplexity depends on the draw."""
    for report in reports:
        drawn = report.get("randomised_positions")
        if drawn is not None:
            deviations = [(r["length"], r["perplexity_deviation_over_draws"]) for r in report["results"]]
            by_length = ", ".join(f"{d:.2g} at {n}" for n, d in deviations if d is not None and math.isfinite(d))
            spread = f": standard deviation of the perplexity over them {by_length}" if by_length else ""
            draws = f"{drawn['draws']} draw{'s' * (drawn['draws'] > 1)}"
            yield f"{report.get('label', report['method'])}: {draws} of positions below {drawn['range']:,}{spread}."


def _terminal() -> Console:
    return Console()


def _cell(result: dict[str, Any]) -> str:
    value, error = result["perplexity"], result["perplexity_standard_error"]
    if value is None or not math.isfinite(value):
        return "inf"
    return f"{value:.2f}" if error is None or not math.isfinite(error) else f"{value:.2f} ± {error:.2f}"
