"""The tiles that were tuned: a table for each kind of accelerator, ``tpu_tuned.json`` and ``gpu_tuned.json``.

``experiments.tune_blocks`` and ``experiments.bench_gpu`` write them.
"""

import contextlib
import contextvars
import functools
import json
from collections.abc import Iterator
from importlib import resources
from typing import Any

from dape_jax.attention.arguments import Arrays, Spec
from dape_jax.attention.target import Target

Entry = dict[str, Any]
"""What it is for, ``shape_of`` and the length, then the tile: block_q and block_k, and on GPUs warps and stages."""

_replaced: contextvars.ContextVar[dict[str, list[Entry]] | None] = contextvars.ContextVar("tuned_tiles", default=None)


@contextlib.contextmanager
def using(platform: str, entries: list[Entry]) -> Iterator[None]:
    """Within the context a platform's table holds these entries, for what is traced: to try tiles out."""
    token = _replaced.set({**(_replaced.get() or {}), platform: entries})
    try:
        yield
    finally:
        _replaced.reset(token)


@functools.cache
def _shipped(platform: str) -> list[Entry]:
    return json.loads(resources.files("dape_jax.attention").joinpath(f"{platform}_tuned.json").read_text())["tiles"]


def shape_of(spec: Spec, arrays: Arrays, target: Target, kernel: str) -> Entry:
    """What an entry of a table is for, besides the length."""
    return {
        "device_kind": target.device_kind,
        "kernel": kernel,
        "heads": spec.num_heads,
        "head_dim": arrays.q.shape[3],
        "dtype": str(arrays.q.dtype),
        "width": None if spec.adapt is None else spec.adapt.width,
    }


def find(platform: str, spec: Spec, arrays: Arrays, target: Target, kernel: str) -> Entry | None:
    """Of the longest sequences in the table that are not longer than these; None for shapes that were not tuned.

    Those with fewer key heads, with a network for each head or with one that convolves never are.
    """
    adapt = spec.adapt
    if arrays.k.shape[0] != spec.num_heads or (adapt is not None and (adapt.per_head or adapt.kernel_width > 1)):
        return None
    table = (_replaced.get() or {}).get(platform, _shipped(platform))
    shape, length = shape_of(spec, arrays, target, kernel), arrays.k.shape[2]
    fitting = [e for e in table if shape.items() <= e.items() and e["length"] <= length]
    return max(fitting, key=lambda e: e["length"], default=None)
