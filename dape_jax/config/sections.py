"""The sections of a configuration as frozen dataclasses; their fields are all the names that there are."""

import dataclasses


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
class YarnSection:
    """YaRN's ramp. Its training length is ``data.sequence_length``, of a task the tokens of the longest row, and its
    scale that of the length that is read."""

    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclasses.dataclass(frozen=True)
class LearnedSection:
    """The table of learned positions. ``length`` None is the training length, or the range of randomised positions."""

    length: int | None = None


@dataclasses.dataclass(frozen=True)
class RandomisedSection:
    """Randomised positions. They are drawn from ``range``, None for 4 times the training length; no longer sequence
    can be read."""

    range: int | None = None


@dataclasses.dataclass(frozen=True)
class ModelSection:
    """A ``TransformerLM``. ``mlp_ratio`` times ``width`` is the feed-forward width. ``num_kv_heads`` None is
    ``num_heads``.

    ``dtype`` of activations: "auto" is bfloat16 on TPU and GPU and float32 on CPU. ``remat`` trades time for memory:
    "none", "full" or "attention_saved"; see ``dape_jax.nn.transformer.REMAT``.
    """

    position: str
    num_layers: int
    num_heads: int
    width: int
    num_kv_heads: int | None = None
    mlp_ratio: int = 4
    rope_base: float = 10000.0
    dape: DapeSection = DapeSection()
    fire: FireSection = FireSection()
    t5: T5Section = T5Section()
    yarn: YarnSection = YarnSection()
    learned: LearnedSection = LearnedSection()
    randomised: RandomisedSection = RandomisedSection()
    dtype: str = "auto"
    attention_backend: str = "auto"
    remat: str = "none"


CHOMSKY = "chomsky"
"""The value of ``data.source`` that stands for a task instead of a text."""


@dataclasses.dataclass(frozen=True)
class DataSection:
    """Text and its tokens, or a task of the Chomsky Hierarchy Evaluation.

    ``sequence_length`` is that of the training windows. ``source`` is "stdlib" (the running Python's library);
    "folder", every UTF-8 file below ``path`` that matches ``glob``, one document each; "jsonl", .jsonl or .jsonl.zst
    files in the same way, or one of them as ``path``, with one document a line in the field ``text_field``; or "tfds",
    a prepared dataset of TensorFlow Datasets, ``path`` its name or folder and ``text_field`` its text feature.
    ``skip_broken`` leaves broken lines and records out, counted, where they would be refused. ``tokenizer`` is "bytes",
    a tokenizer.json, or a folder with one or with encoder.json and vocab.bpe. ``packing`` "stream" reads training
    windows over the ends of documents; "segments" keeps attention, positions and loss within each document.
    ``cache_dir`` None is ``$XDG_CACHE_HOME/dape_jax`` or ``~/.cache/dape_jax``.

    ``source`` "chomsky" is the task ``task``, with inputs of lengths U(1, ``sequence_length``) for a bidirectional
    encoder; of the other fields it reads none.
    """

    sequence_length: int
    source: str = "stdlib"
    task: str | None = None
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
    official. ``max_windows`` is the most windows at each length. The protocol non_overlapping takes neither.

    A task is scored at every length up to the longest of ``lengths``, with ``max_windows`` samples of each."""

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
