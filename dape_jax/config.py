"""From an ml_collections ConfigDict to frozen dataclasses, with every name and value checked.

Each dataclass below is one section of a configuration; its fields are all the names there are. ``from_mapping``
refuses unknown names (with the nearest known one), wrong types and values out of range, each in one line that names
the field.
"""

import dataclasses
import types
import typing
from typing import Any

from dape_jax import adapt as adapt_lib
from dape_jax import biases
from dape_jax.attention import BACKENDS
from dape_jax.data.packing import PACKINGS
from dape_jax.errors import UserError, nearest
from dape_jax.nn.transformer import TransformerConfig

ROTARY = "rope"
NONE = "nope"
POSITIONS = (NONE, ROTARY, *biases.BIASES)
"""Position encodings; each also as ``dape_<name>``, with the DAPE network on top."""


@dataclasses.dataclass(frozen=True)
class DapeSection:
    """The DAPE network, where ``model.position`` starts with ``dape_``. See ``dape_jax.Adapt``."""

    variant: str = "concat_residual"
    width: int = 32
    per_head: bool = False
    kernel_width: int = 1


@dataclasses.dataclass(frozen=True)
class FireSection:
    """FIRE's network and threshold. ``init_length`` None is the training length."""

    width: int = 32
    init_length: float | None = None


@dataclasses.dataclass(frozen=True)
class T5Section:
    """T5's buckets."""

    num_buckets: int = 32
    max_distance: int = 128


@dataclasses.dataclass(frozen=True)
class ModelSection:
    """A ``TransformerLM``. ``mlp_ratio`` times ``width`` is the feed-forward width.

    ``dtype`` of activations: "auto" is bfloat16 on TPU and GPU and float32 on CPU. ``remat`` trades time for memory:
    "none", "full" or "attention_saved"; see ``dape_jax.nn.transformer.REMAT``.
    """

    position: str
    num_layers: int
    num_heads: int
    width: int
    mlp_ratio: int = 4
    rope_base: float = 10000.0
    dape: DapeSection = DapeSection()
    fire: FireSection = FireSection()
    t5: T5Section = T5Section()
    dtype: str = "auto"
    attention_backend: str = "auto"
    remat: str = "none"


@dataclasses.dataclass(frozen=True)
class DataSection:
    """Text and its tokens.

    ``source`` is "stdlib" (the running Python's library); "folder", every UTF-8 file below ``path`` that matches
    ``glob``, one document each; "jsonl", .jsonl or .jsonl.zst files in the same way, or one of them as ``path``, with
    one document a line in the field ``text_field``; or "tfds", a prepared dataset of TensorFlow Datasets, ``path``
    its name or folder and ``text_field`` its text feature. ``skip_broken`` leaves broken lines and records out,
    counted, where they would be refused. ``tokenizer`` is "bytes", a tokenizer.json, or a folder with one or with
    encoder.json and vocab.bpe. ``packing`` "stream" reads training windows over the ends of documents; "segments"
    keeps attention, positions and loss within each document. ``cache_dir`` None is ``$XDG_CACHE_HOME/dape_jax`` or
    ``~/.cache/dape_jax``.
    """

    sequence_length: int
    source: str = "stdlib"
    path: str = ""
    glob: str = "**/*"
    text_field: str = "text"
    skip_broken: bool = False
    tokenizer: str = "bytes"
    packing: str = "stream"
    cache_dir: str | None = None
    validation_fraction: float = 0.05
    test_fraction: float = 0.1


@dataclasses.dataclass(frozen=True)
class OptimizerSection:
    """AdamW with linear warm-up, then a cosine from ``learning_rate`` to ``final_fraction`` of it."""

    learning_rate: float
    final_fraction: float = 0.1
    warmup_fraction: float = 0.01
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0


@dataclasses.dataclass(frozen=True)
class TrainingSection:
    """The loop. ``batch_size`` counts sequences over all devices. ``*_every`` are in steps; 0 is never.

    ``accumulate`` is the number of microbatches that a batch is computed in, one after the other: memory as for
    ``batch_size / accumulate`` sequences. ``tensorboard`` writes the metrics as TensorBoard scalars too.
    """

    steps: int
    batch_size: int
    accumulate: int = 1
    seed: int = 0
    log_every: int = 10
    validate_every: int = 0
    validation_windows: int = 64
    checkpoint_every: int = 1000
    keep_checkpoints: int = 2
    tensorboard: bool = False


@dataclasses.dataclass(frozen=True)
class EvaluationSection:
    """Length extrapolation. ``k`` None is the smaller of 256 and the shortest length in the protocol last_k, and 256 in
    official. ``max_windows`` is the most windows at each length. The protocol non_overlapping takes neither."""

    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    k: int | None = None
    max_windows: int = 64


@dataclasses.dataclass(frozen=True)
class MeshSection:
    """Devices: ``data`` replicas x ``fsdp`` shards of the parameters; ``data`` -1 takes what is left."""

    data: int = -1
    fsdp: int = 1


@dataclasses.dataclass(frozen=True)
class Config:
    """A whole run."""

    model: ModelSection
    data: DataSection
    optimizer: OptimizerSection
    training: TrainingSection
    evaluation: EvaluationSection = EvaluationSection()
    mesh: MeshSection = MeshSection()


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


def split_position(position: str) -> tuple[str, bool]:
    """("kerple", True) from "dape_kerple": the encoding, and whether the DAPE network is on top."""
    base = position.removeprefix("dape_")
    if base not in POSITIONS:
        known = [*POSITIONS, *(f"dape_{name}" for name in POSITIONS)]
        raise UserError(f"model.position={position!r} is unknown{nearest(position, known)}")
    return base, base != position


def method_label(position: str) -> str:
    """How tables and plots call a position encoding, such as DAPE-Kerple."""
    names = {
        "nope": "NoPE",
        "rope": "RoPE",
        "alibi": "ALiBi",
        "kerple": "Kerple",
        "kerple_power": "Kerple-power",
        "t5": "T5 bias",
        "fire": "FIRE",
    }
    base, dape = split_position(position)
    return f"DAPE-{names[base]}" if dape else names[base]


def transformer(config: Config, vocab_size: int, platform: str, batch_axes: tuple[str, ...] = ()) -> TransformerConfig:
    """The model of a configuration. ``platform`` ("cpu", "tpu", "gpu") decides the dtype "auto"."""
    model = config.model
    position, dape = split_position(model.position)
    init_length = model.fire.init_length
    bias = {
        "alibi": biases.ALiBi,
        "kerple": biases.KerpleLog,
        "kerple_power": biases.KerplePower,
        "t5": lambda: biases.T5Bias(model.t5.num_buckets, model.t5.max_distance),
        "fire": lambda: biases.FIRE(
            width=model.fire.width,
            init_length=float(config.data.sequence_length if init_length is None else init_length),
            activation="leaky_relu" if dape else "relu",
        ),
    }.get(position, lambda: None)()
    dtype = ("float32" if platform == "cpu" else "bfloat16") if model.dtype == "auto" else model.dtype
    return TransformerConfig(
        vocab_size=vocab_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        width=model.width,
        mlp_width=model.mlp_ratio * model.width,
        bias=bias,
        rope_base=model.rope_base if position == ROTARY else None,
        adapt=_adapt(model.dape) if dape else None,
        dtype=dtype,
        backend=model.attention_backend,
        batch_axes=batch_axes,
        remat=model.remat,
    )


def _adapt(dape: DapeSection) -> adapt_lib.Adapt:
    return adapt_lib.Adapt(dape.variant, dape.width, dape.per_head, dape.kernel_width)


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
    dtypes = ("auto", "float32", "bfloat16")
    need("model.dtype", model.dtype in dtypes, f"is unknown{nearest(model.dtype, dtypes)}")
    need("data.sequence_length", data.sequence_length >= 1, "1 or more is needed")
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
    _adapt(model.dape)  # checked even where it is not used
    transformer(config, vocab_size=1, platform="cpu")  # raises for shapes and DAPE options that do not fit
