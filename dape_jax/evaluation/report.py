"""Evaluation reports: what was measured, in JSON, and the table and plot made from it."""

import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dape_jax
from dape_jax import config as config_lib
from dape_jax.data.cache import TokenCache
from dape_jax.errors import UserError
from dape_jax.evaluation import plots
from dape_jax.evaluation.extrapolation import LengthScores
from dape_jax.evaluation.protocols import PROTOCOLS, Plan
from dape_jax.evaluation.statistics import perplexity
from dape_jax.evaluation.windows import Targets, Windows
from dape_jax.rotary import YaRN
from dape_jax.training.run import Run

FORMAT = 1


def make_report(
    run: Run,
    plan: Plan,
    scores: dict[int, LengthScores],
    step: int,
    train_dtype: str | None = None,
    draw_seed: int = 0,
) -> dict[str, Any]:
    """The report of one run as a JSON-able dictionary.

    ``train_dtype`` is that of the activations in training, ``draw_seed`` that of randomised positions.
    """
    config = run.config
    documents = [] if plan.targets is None else _documents(plan.targets, scores)
    results = []
    for windows in plan.windows:
        s = scores[windows.length]
        if plan.targets is None:
            value = perplexity(s.nll_sums, s.targets)
        else:  # the windows of a document are one sampling unit
            sums = [d["nll_sum"][str(windows.length)] for d in documents]
            value = perplexity(np.asarray(sums), np.asarray([d["scored_tokens"] for d in documents], np.float64))
        results.append(
            {
                "length": windows.length,
                "perplexity": value.perplexity,
                "perplexity_standard_error": value.perplexity_standard_error,
                "nll": value.nll,
                "nll_standard_error": value.nll_standard_error,
                "scored_tokens": int(s.targets.sum()),
                **_position_result(run, windows.length, s),
                **(_stream_result(run.tokens, windows) if plan.targets is None else {}),
                "rows_at_once": s.rows,
                "seconds": round(s.seconds, 3),
            }
        )
    source = run.tokens.manifest["source"]
    return {
        "format": FORMAT,
        "protocol": plan.protocol,
        "method": config_lib.method_label(config.model.position),
        "position": config.model.position,
        "train_length": config.data.sequence_length,
        **_position_header(run, next(iter(scores.values())), draw_seed),
        "step": step,
        "seed": config.training.seed,
        "k": plan.k,
        "lengths": list(scores),
        **(_stream_header(run, plan) if plan.targets is None else _documents_header(run, plan.targets, plan)),
        "text": {
            "source": source["name"],
            "split": plan.split,
            "tokens_sha256": run.tokens.manifest["tokens_sha256"],
        },
        "tokenizer": run.tokens.manifest["tokenizer"]["name"],
        "dtype": run.model.dtype,
        "train_dtype": train_dtype or run.model.dtype,
        "backend": run.model.attention_backend(max(scores)),
        "device": f"{run.mesh.size} x {jax.devices()[0].device_kind}",
        "versions": {"dape_jax": dape_jax.__version__, "jax": jax.__version__},
        "results": results,
        **({} if plan.targets is None else {"documents": documents}),
    }


def _position_header(run: Run, scores: LengthScores, seed: int) -> dict[str, Any]:
    """What positions were drawn from, where they were."""
    if run.model.random_range is None:
        return {}
    return {"randomised_positions": {"range": run.model.random_range, "draws": len(scores.nll_draws), "seed": seed}}


def _position_result(run: Run, length: int, scores: LengthScores) -> dict[str, Any]:
    """What an encoding depends on at one length: YaRN's scale, and the spread over draws of randomised positions."""
    rotary = run.model.for_length(length).rotary
    result: dict[str, Any] = {"yarn_scale": rotary.scale} if isinstance(rotary, YaRN) else {}
    if run.model.random_range is not None:
        values = np.exp(scores.nll_draws / scores.targets.sum())
        spread = float(values.std(ddof=1)) if len(values) > 1 else math.nan
        result |= {"perplexity_of_draws": values.tolist(), "perplexity_deviation_over_draws": spread}
    return result


def _documents(targets: Targets, scores: dict[int, LengthScores]) -> list[dict[str, Any]]:
    """Of last_k, what each document's windows sum to."""
    documents = []
    for i, name in enumerate(targets.names):
        own = targets.document == i
        documents.append(
            {
                "name": name,
                "windows": int(own.sum()),
                "scored_tokens": int(next(iter(scores.values())).targets[own].sum()),
                "nll_sum": {str(n): float(s.nll_sums[own].sum()) for n, s in scores.items()},
            }
        )
    return documents


def _documents_header(run: Run, targets: Targets, plan: Plan) -> dict[str, Any]:
    """Of last_k, the windows, which are the same at every length."""
    return {
        "windows": len(targets.end),
        "documents_used": len(targets.names),
        "documents_too_short": targets.too_short,
        "documents_in_split": len(run.tokens.split_documents(plan.split)[0]),
        "targets_sha256": hashlib.sha256(json.dumps([targets.end.tolist(), plan.k]).encode()).hexdigest(),
    }


def _stream_header(run: Run, plan: Plan) -> dict[str, Any]:
    """Of the protocols that read a split as one stream, what holds at every length."""
    first, last = run.tokens.split_bounds(plan.split)
    return {
        **plan.cap,
        "standard_error_over": PROTOCOLS[plan.protocol].error_over,
        "windows_cross_documents": True,
        "train_packing": run.config.data.packing,
        "documents_in_split": len(run.tokens.split_documents(plan.split)[1]),
        "tokens_in_split": last - first,
    }


def _stream_result(tokens: TokenCache, windows: Windows) -> dict[str, Any]:
    """Of the protocols that read a split as one stream, the windows of one length."""
    ends = tokens.documents[:, 1]
    of_first_target = np.searchsorted(ends, windows.start + 1, side="right")
    of_last_target = np.searchsorted(ends, windows.start + windows.inputs, side="right")
    where = np.stack([windows.start, windows.inputs]).astype("<i8")
    return {
        "windows": len(windows),
        "windows_available": windows.available,
        "windows_of_several_documents": int((of_first_target != of_last_target).sum()),
        "scored_of_a_window": windows.scored,
        "targets_sha256": hashlib.sha256(where.tobytes() + str(windows.scored).encode()).hexdigest(),
    }


def write_report(report: dict[str, Any], directory: Path) -> Path:
    """Writes the report and its plot below ``directory``; returns the JSON's path."""
    name = f"{report['protocol']}_{report['text']['split']}_step{report['step']}"
    name += "" if report["k"] is None else f"_k{report['k']}"
    name += "" if report.get("max_tokens") is None else f"_first{report['max_tokens']}"
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


def latest_report(workdir: Path, split: str = "test", protocol: str = "last_k") -> dict[str, Any]:
    """The report of the latest step evaluated on ``split`` by ``protocol``; the newest file if there are several."""
    found, others = [], set()
    for path in (workdir / "evaluation").glob("*.json"):
        name = re.fullmatch(rf"({'|'.join(PROTOCOLS)})_{split}_step(\d+)(_k\d+)?(_first\d+)?_\d+to\d+", path.stem)
        if name and name[1] == protocol:
            found.append((int(name[2]), path.stat().st_mtime_ns, path))
        elif name:
            others.add(name[1])
    if not found:
        there = f"; what there is is by {' and '.join(sorted(others))}" if others else ""
        raise UserError(
            f"{workdir} holds no evaluation of the {split} split; run experiments.evaluate --protocol={protocol} "
            f"first{there}"
        )
    path = max(found)[2]
    try:
        report = json.loads(path.read_text())
        found = report["format"]
    except (ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path} is damaged: {e!r}") from e
    if found != FORMAT:
        raise UserError(f"{path} has format {found}; this version reads {FORMAT}")
    needed = (*_SAME, *_SAME_DOCUMENTS) if protocol == "last_k" else _SAME
    missing = [n for n in (*needed, "results", "method", "train_length", "lengths", "step") if n not in report]
    if missing:
        raise UserError(f"{path} is damaged: there is no {missing[0]} in it")
    if report["protocol"] != protocol:
        raise UserError(f"{path} is damaged: it is a report of the protocol {report['protocol']}")
    return report


_SAME = ("protocol", "k", "text", "tokenizer")
_SAME_DOCUMENTS = ("windows", "documents_used", "targets_sha256")


def check_comparable(reports: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Refuses to put numbers side by side that were not measured on the same tokens in the same way."""
    for report, name in zip(reports, names, strict=True):
        for what, value, wanted in _differences(report, reports[0]):
            raise UserError(
                f"{name} and {names[0]} cannot be compared: {what} is {value} and {wanted}; "
                "evaluate them with the same protocol, lengths, k, split and number of windows or tokens"
            )


def _differences(report: dict[str, Any], other: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """What two reports measured differently: its name and both values."""
    for what in _SAME:
        if report[what] != other[what]:
            yield what, report[what], other[what]
    if report["protocol"] == "last_k":
        for what in _SAME_DOCUMENTS:
            if report[what] != other[what]:
                yield what, report[what], other[what]
        return
    targets = {r["length"]: r["targets_sha256"] for r in other["results"]}
    for r in report["results"]:
        if targets.get(r["length"], r["targets_sha256"]) != r["targets_sha256"]:
            yield f"targets_sha256 at length {r['length']}", r["targets_sha256"], targets[r["length"]]


def with_labels(reports: Sequence[dict[str, Any]], names: Sequence[str]) -> list[dict[str, Any]]:
    """Reports with a ``label``: the method, and the run's name where one method occurs twice."""
    methods = [report["method"] for report in reports]
    labels = [m if methods.count(m) == 1 else f"{m} ({name})" for m, name in zip(methods, names, strict=True)]
    return [{**report, "label": label} for report, label in zip(reports, labels, strict=True)]
