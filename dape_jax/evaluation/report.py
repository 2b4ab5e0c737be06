"""Evaluation reports: what was measured, in JSON, and the table and plot made from it."""

import hashlib
import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

import dape_jax
from dape_jax import config as config_lib
from dape_jax.attention import choose_backend
from dape_jax.errors import UserError
from dape_jax.evaluation import plots
from dape_jax.evaluation.extrapolation import LengthScores, WindowPlan
from dape_jax.evaluation.statistics import perplexity
from dape_jax.training.run import Run

FORMAT = 1


def make_report(
    run: Run,
    plan: WindowPlan,
    scores: dict[int, LengthScores],
    k: int,
    split: str,
    step: int,
    train_dtype: str | None = None,
) -> dict[str, Any]:
    """The report of one run as a JSON-able dictionary. ``train_dtype`` is that of the activations in training."""
    config = run.config
    documents = [
        {
            "name": name,
            "windows": int((plan.document == i).sum()),
            "scored_tokens": int((plan.document == i).sum()) * k,
            "nll_sum": {str(n): float(s.nll[plan.document == i].sum(dtype=np.float64)) for n, s in scores.items()},
        }
        for i, name in enumerate(plan.names)
    ]
    counts = np.asarray([d["scored_tokens"] for d in documents], np.float64)
    results = []
    for length, s in scores.items():
        value = perplexity(np.asarray([d["nll_sum"][str(length)] for d in documents]), counts)
        results.append(
            {
                "length": length,
                "perplexity": value.perplexity,
                "perplexity_standard_error": value.perplexity_standard_error,
                "nll": value.nll,
                "nll_standard_error": value.nll_standard_error,
                "scored_tokens": int(s.nll.size),
                "rows_at_once": s.rows,
                "seconds": round(s.seconds, 3),
            }
        )
    source = run.tokens.manifest["source"]
    return {
        "format": FORMAT,
        "protocol": "last_k",
        "method": config_lib.method_label(config.model.position),
        "position": config.model.position,
        "train_length": config.data.sequence_length,
        "step": step,
        "seed": config.training.seed,
        "k": k,
        "lengths": list(scores),
        "windows": len(plan.end),
        "documents_used": len(plan.names),
        "documents_too_short": plan.too_short,
        "documents_in_split": len(run.tokens.split_documents(split)[0]),
        "targets_sha256": hashlib.sha256(json.dumps([plan.end.tolist(), k]).encode()).hexdigest(),
        "text": {"source": source["name"], "split": split, "tokens_sha256": run.tokens.manifest["tokens_sha256"]},
        "tokenizer": run.tokens.manifest["tokenizer"]["name"],
        "dtype": run.model.dtype,
        "train_dtype": train_dtype or run.model.dtype,
        "backend": choose_backend(run.model.backend),
        "device": f"{run.mesh.size} x {jax.devices()[0].device_kind}",
        "versions": {"dape_jax": dape_jax.__version__, "jax": jax.__version__},
        "results": results,
        "documents": documents,
    }


def write_report(report: dict[str, Any], directory: Path) -> Path:
    """Writes the report and its plot below ``directory``; returns the JSON's path."""
    name = f"{report['protocol']}_{report['text']['split']}_step{report['step']}_k{report['k']}"
    path = directory / f"{name}_{min(report['lengths'])}to{max(report['lengths'])}.json"
    write_json(report, path)
    plots.perplexity_by_length([report], path.with_suffix(".png"))
    return path


def write_json(value: dict[str, Any], path: Path) -> None:
    """Writes a whole file or none. NaN (the standard error over one document) becomes null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    try:
        partial.write_text(json.dumps(_finite(value), indent=1, allow_nan=False) + "\n")
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def latest_report(workdir: Path, split: str = "test") -> dict[str, Any]:
    """The report of the latest step evaluated on ``split`` in ``workdir``; the newest file if there are several."""
    found = []
    for path in (workdir / "evaluation").glob("*.json"):
        name = re.fullmatch(rf"last_k_{split}_step(\d+)_k\d+_\d+to\d+", path.stem)
        if name:
            found.append((int(name[1]), path.stat().st_mtime_ns, path))
    if not found:
        raise UserError(f"{workdir} holds no evaluation of the {split} split; run experiments.evaluate first")
    path = max(found)[2]
    try:
        report = json.loads(path.read_text())
        found = report["format"]
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path} is damaged: {e!r}") from e
    if found != FORMAT:
        raise UserError(f"{path} has format {found}; this version reads {FORMAT}")
    missing = [name for name in (*_SAME, "results", "method", "train_length", "lengths", "step") if name not in report]
    if missing:
        raise UserError(f"{path} is damaged: there is no {missing[0]} in it")
    return report


_SAME = ("protocol", "k", "text", "tokenizer", "windows", "documents_used", "targets_sha256")


def check_comparable(reports: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Refuses to put numbers side by side that were not measured on the same tokens in the same way."""
    for what in _SAME:
        for report, name in zip(reports, names, strict=True):
            if report[what] != reports[0][what]:
                raise UserError(
                    f"{name} and {names[0]} cannot be compared: {what} is {report[what]} and {reports[0][what]}; "
                    "evaluate them with the same lengths, k, split and number of windows"
                )


def with_labels(reports: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Reports with a ``label``: the method, and the run's name where one method occurs twice."""
    methods = [report["method"] for report in reports]
    labels = [m if methods.count(m) == 1 else f"{m} ({name})" for m, name in zip(methods, names, strict=True)]
    return [{**report, "label": label} for report, label in zip(reports, labels, strict=True)]


def print_table(reports: Sequence[dict[str, Any]]) -> None:
    """Perplexity by length and method, with standard errors over documents.

    A line a method where that fits the terminal, else a line a length.
    """
    lengths = sorted({n for report in reports for n in report["lengths"]})
    cells = {(i, r["length"]): _cell(r) for i, report in enumerate(reports) for r in report["results"]}
    labels = [report.get("label", report["method"]) for report in reports]
    first = reports[0]
    title = f"Perplexity of the last {first['k']} tokens by context length (± standard error over documents)"
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
    console.print(
        f"{first['text']['source']}, {first['text']['split']} split: {first['windows']} windows of "
        f"{first['documents_used']} documents, the same targets at every length; {first['documents_too_short']} of "
        f"{first['documents_in_split']} documents are shorter than the longest length and left out.",
        highlight=False,
    )


def _terminal() -> Console:
    return Console()


def _cell(result: dict[str, Any]) -> str:
    value, error = result["perplexity"], result["perplexity_standard_error"]
    if value is None or not math.isfinite(value):
        return "inf"
    return f"{value:.2f}" if error is None or not math.isfinite(error) else f"{value:.2f} ± {error:.2f}"
