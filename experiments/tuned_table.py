"""The table of block sizes that ``tune_blocks`` writes: its entries, and what they are chosen by."""

from collections.abc import Iterable
from typing import Any

from experiments.kernel_programs import MODELS

Tile = tuple[int, int]
"""Queries and keys."""


def merged(old: Iterable[dict[str, Any]], new: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """New entries take the place of old ones for the same shape and length."""
    entries = {_key(e): e for e in [*old, *new]}
    return [entries[key] for key in sorted(entries, key=str)]


def _key(entry: dict[str, Any]) -> tuple:
    return tuple(entry[k] for k in ("device_kind", "kernel", "heads", "head_dim", "dtype", "width", "length"))


def best_entries(kind: str, shape: tuple[str, int], by: str, figures: dict[tuple[str, int], dict[Tile, float]]) -> list:
    """The best tile of each kernel and length, from what is to be small for each tile."""
    model, width = shape
    heads, head_dim = MODELS[model]
    entries = []
    for (kernel, length), figure_of in figures.items():
        (q, k), figure = min(figure_of.items(), key=lambda x: x[1])
        entries.append({
            "device_kind": kind, "kernel": kernel, "heads": heads, "head_dim": head_dim, "dtype": "bfloat16",
            "width": width, "length": length, "block_q": q, "block_k": k, "figure": figure, "by": by,
        })  # fmt: skip
    return entries


def causal_cycles(length: int, tile: Tile, cost: dict[str, float]) -> float:
    """Cycles of a causal call: of the tiles that the mask leaves, those that it cuts at their own cost."""
    q, k = tile
    whole = cut = 0
    for first in range(0, length, q):
        needed = -(-min(length, first + q) // k)
        within = (first + 1) // k  # tiles whose last key is no later than the first query
        whole, cut = whole + within, cut + needed - within
    return q * k * (whole * cost["interior"] + cut * cost["diagonal"])
