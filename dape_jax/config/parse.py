"""From an ml_collections ConfigDict to frozen dataclasses, with every name, type and value checked.

Unknown names (with the nearest known one), wrong types and values out of range are refused, each in one line that names
the field.
"""

import dataclasses
import types
import typing
from typing import Any

from dape_jax.attention import BACKENDS
from dape_jax.config.model import adapt_network, split_position, transformer
from dape_jax.config.sections import CHOMSKY, Config
from dape_jax.data.chomsky import TASKS, get_task
from dape_jax.data.packing import PACKINGS
from dape_jax.errors import UserError, nearest


def from_mapping(mapping: Any) -> Config:
    """Checks a ConfigDict or a nested dictionary and freezes it."""
    config = _build(Config, mapping, "")
    _check_ranges(config)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """The configuration as nested dictionaries that JSON can hold; ``from_mapping`` inverts it."""
    as_dict = dataclasses.asdict(config)
    as_dict["evaluation"]["lengths"] = list(config.evaluation.lengths)
    return as_dict


def _build(cls: type, mapping: Any, path: str) -> Any:
    if not hasattr(mapping, "items"):
        raise UserError(f"{path.rstrip('.')}={mapping!r}: a section with the fields of {cls.__name__} is needed")
    hints = typing.get_type_hints(cls)
    values = {}
    for name, value in mapping.items():
        if name not in hints:
            raise UserError(f"{path}{name} is no field of the configuration{nearest(name, hints)}")
        values[name] = _value(hints[name], value, f"{path}{name}")
    for field in dataclasses.fields(cls):
        if field.name not in values and field.default is dataclasses.MISSING:
            raise UserError(f"{path}{field.name} is missing from the configuration")
    return cls(**values)


def _value(hint: Any, value: Any, path: str) -> Any:
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value, f"{path}.")
    if isinstance(hint, types.UnionType):  # X | None
        return None if value is None else _value(typing.get_args(hint)[0], value, path)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
            raise UserError(f"{path}={value!r}: a list of integers is needed")
        return tuple(value)
    accepted = (int, float) if hint is float else hint
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise UserError(f"{path}={value!r} is a {type(value).__name__}; {hint.__name__} is needed")
    return hint(value)


def _check_ranges(config: Config) -> None:
    def need(path: str, condition: bool, what: str) -> None:
        value = config
        for name in path.split("."):
            value = getattr(value, name)
        if not condition:
            raise UserError(f"{path}={value!r}: {what}")

    inf, lengths, k = float("inf"), config.evaluation.lengths, config.evaluation.k
    model, data, optimizer, training = config.model, config.data, config.optimizer, config.training
    need("model.mlp_ratio", model.mlp_ratio >= 1, "1 or more is needed")
    need("model.rope_base", 0 < model.rope_base < inf, "a positive number is needed")
    need("model.fire.width", model.fire.width >= 1, "1 or more is needed")
    need(
        "model.fire.init_length",
        model.fire.init_length is None or 0 < model.fire.init_length < inf,
        "a positive number is needed",
    )
    need("model.t5.num_buckets", model.t5.num_buckets >= 2, "2 or more is needed")
    need(
        "model.t5.max_distance",
        model.t5.max_distance > model.t5.num_buckets // 2,
        "more than half of num_buckets is needed",
    )
    need("model.yarn.beta_slow", model.yarn.beta_slow > 0, "a positive number is needed")
    need("model.yarn.beta_fast", model.yarn.beta_slow < model.yarn.beta_fast < inf, "more than beta_slow is needed")
    sequence = f"data.sequence_length={data.sequence_length} or more is needed"
    position = split_position(model.position)
    learned, drawn_from = model.learned.length, model.randomised.range
    if position.encoding == "learned":
        need("model.learned.length", learned is None or learned >= data.sequence_length, sequence)
    if position.randomised:
        need("model.randomised.range", drawn_from is None or drawn_from >= data.sequence_length, sequence)
        longest = drawn_from or 4 * data.sequence_length
        need("evaluation.lengths", max(lengths, default=0) <= longest,
             f"lengths up to model.randomised.range={longest} are needed, which positions are drawn from")  # fmt: skip
    dtypes = ("auto", "float32", "bfloat16")
    need("model.dtype", model.dtype in dtypes, f"is unknown{nearest(model.dtype, dtypes)}")
    need("data.sequence_length", data.sequence_length >= 1, "1 or more is needed")
    if data.source == CHOMSKY:
        need("data.task", data.task is not None, f"one of {', '.join(TASKS)} is needed")
        get_task(str(data.task))
    else:
        need("data.task", data.task is None, f"is for data.source={CHOMSKY!r} alone")
    need("data.cache_dir", data.cache_dir != "", "the path of a folder is needed")
    need("data.packing", data.packing in PACKINGS, f"is unknown{nearest(data.packing, PACKINGS)}")
    need("data.validation_fraction", 0 < data.validation_fraction < 1, "a number between 0 and 1 is needed")
    need("data.test_fraction", 0 < data.test_fraction < 1 - data.validation_fraction,
         "a number above 0 is needed that leaves something to train on")  # fmt: skip
    need("optimizer.learning_rate", 0 < optimizer.learning_rate < inf, "a positive number is needed")
    for name in ("final_fraction", "warmup_fraction"):
        need(f"optimizer.{name}", 0 <= getattr(optimizer, name) <= 1, "a number from 0 to 1 is needed")
    for name in ("b1", "b2"):
        need(f"optimizer.{name}", 0 <= getattr(optimizer, name) < 1, "a number from 0 to below 1 is needed")
    need("optimizer.eps", 0 < optimizer.eps < inf, "a positive number is needed")
    need("optimizer.weight_decay", 0 <= optimizer.weight_decay < inf, "a number of 0 or more is needed")
    need("optimizer.clip_norm", optimizer.clip_norm > 0, "a positive number is needed")
    for name in ("steps", "batch_size", "accumulate", "log_every", "checkpoint_every", "keep_checkpoints",
                 "validation_windows"):  # fmt: skip
        need(f"training.{name}", getattr(training, name) >= 1, "1 or more is needed")
    need("training.validate_every", training.validate_every >= 0, "0 (never) or more is needed")
    need("training.seed", 0 <= training.seed < 2**32, "an integer from 0 to 2**32 - 1 is needed")
    need("evaluation.lengths", bool(lengths), "at least one length is needed")
    need("evaluation.lengths", all(1 <= n < 2**31 for n in lengths), "lengths from 1 to 2**31 - 1 are needed")
    need("evaluation.k", k is None or k >= 1, "1 or more is needed")
    need("evaluation.max_windows", config.evaluation.max_windows >= 1, "1 or more is needed")
    need("evaluation.lengths", len(set(lengths)) == len(lengths), "each length once is needed")
    need("evaluation.k", k is None or k <= min(lengths), "the shortest of evaluation.lengths or less is needed")
    need("mesh.fsdp", config.mesh.fsdp >= 1, "1 or more is needed")
    need("mesh.data", config.mesh.data == -1 or config.mesh.data >= 1, "1 or more is needed, or -1 for what is left")
    backends = ("auto", *BACKENDS)
    need("model.attention_backend", model.attention_backend in backends,
         f"is unknown{nearest(model.attention_backend, backends)}")  # fmt: skip
    adapt_network(model.dape)  # checked even where it is not used
    transformer(config, vocab_size=1, platform="cpu")  # raises for shapes and DAPE options that do not fit
