"""The tables of tiles that ``tune_blocks`` and ``bench_gpu`` write: their entries, and what they are chosen by."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dape_jax.errors import UserError
from experiments.kernel_programs import MODELS

Tile = tuple[int, int]
"""Queries and keys."""


def read(flag: str, path: Path) -> list[dict[str, Any]]:
    """The entries at a path, none if there is no file; ``flag`` gave it."""
    try:
        return merged(json.loads(path.read_text())["tiles"] if path.exists() else [], [])
    except (ValueError, KeyError, TypeError, OSError) as e:
        raise UserError(f"--{flag}={path}: is no table of tiles; give another path, or remove it") from e


def merged(old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """New entries take the place of old ones for the same shape and length."""
    entries = {_key(e): e for e in [*old, *new]}
    return [entries[key] for key in sorted(entries, key=str)]


def _key(entry: dict[str, Any]) -> tuple:
    return tuple(entry[k] for k in ("device_kind", "kernel", "heads", "head_dim", "dtype", "width", "length"))


def best_entries(kind: str, shape: tuple[str, int], by: str, figures: dict[tuple[str, int], dict[Tile, float]]) -> list:
    """The best tile of each kernel and length, from what is to be small for each tile."""
    model, width = shape
    entries = []
    for (kernel, length), figure_of in figures.items():
        (q, k), figure = min(figure_of.items(), key=lambda x: x[1])
        tile = {"block_q": q, "block_k": k}
        entries.append(entry(kind, kernel, MODELS[model], width, length, tile) | {"figure": figure, "by": by})
    return entries


def entry(
    kind: str, kernel: str, heads_of: tuple[int, int], width: int, length: int, tile: dict[str, int]
) -> dict[str, Any]:
    """For ``heads_of`` (heads, head dimension), in bfloat16."""
    heads, head_dim = heads_of
    return {
        "device_kind": kind, "kernel": kernel, "heads": heads, "head_dim": head_dim, "dtype": "bfloat16",
        "width": width, "length": length, **tile,
    }  # fmt: skip


def best_of_each_kernel(timed: list[dict[str, Any]], by: str) -> list[dict[str, Any]]:
    """From what was timed, each with an ``entry`` and, unless it failed, ``seconds``."""
    best: dict[str, dict[str, Any]] = {}
    for x in sorted((x for x in timed if "seconds" in x), key=lambda x: x["seconds"]):
        best.setdefault(x["entry"]["kernel"], x["entry"] | {"figure": x["seconds"], "by": by})
    return list(best.values())


def causal_cycles(length: int, tile: Tile, cost: dict[str, float]) -> float:
    """Cycles of a causal call: of the tiles that the mask leaves, those that it cuts at their own cost."""
    q, k = tile
    whole = cut = 0
    for first in range(0, length, q):
        needed = -(-min(length, first + q) // k)
        within = (first + 1) // k  # tiles whose last key is no later than the first query
        whole, cut = whole + within, cut + needed - within
    return q * k * (whole * cost["interior"] + cut * cost["diagonal"])
