"""What makes two records of a run, or two configurations, those of one and the same run."""

from collections.abc import Mapping
from typing import Any, NamedTuple

FREE = ("training.log_every", "training.checkpoint_every", "training.keep_checkpoints", "training.validate_every",
        "training.validation_windows", "training.accumulate", "training.tensorboard", "evaluation", "mesh",
        "data.cache_dir", "data.path", "data.tokenizer", "model.remat")  # fmt: skip
"""Fields that a resumed run may change: they do not change what is computed, only where, how often and how fast.
``data.path`` and ``data.tokenizer`` may move because the text and the tokenizer themselves are compared, by hashes.
``training.accumulate`` goes with the number of devices."""


class Difference(NamedTuple):
    """The first field that is not the same, and its two values."""

    field: str
    before: Any
    now: Any


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> Difference | None:
    """What differs, but for fields that may change (``FREE``), between two records or configurations."""
    before, now = _flat(before), _flat(now)
    for name in sorted({*before, *now}):
        field = name.removeprefix("config.")
        if before.get(name) != now.get(name) and not any(field == f or field.startswith(f"{f}.") for f in FREE):
            return Difference(field, before.get(name), now.get(name))
    return None


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, Mapping):
        return {prefix: tree}
    flat = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}.{name}" if prefix else name)
    return flat
