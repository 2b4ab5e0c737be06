"""From the model's section to the model: which encoding a name stands for, and its hyper-parameters."""

import dataclasses
from typing import NamedTuple

from dape_jax import adapt as adapt_lib
from dape_jax import biases
from dape_jax.absolute import Absolute, Learned, Sinusoidal
from dape_jax.config.sections import Config, DapeSection
from dape_jax.errors import UserError, nearest
from dape_jax.nn.transformer import TransformerConfig
from dape_jax.rotary import RoPE, YaRN

LABELS = {
    "nope": "NoPE",
    "rope": "RoPE",
    "yarn": "YaRN",
    "sinusoidal": "Sinusoidal",
    "learned": "Learned",
    "alibi": "ALiBi",
    "kerple": "Kerple",
    "kerple_power": "Kerple-power",
    "t5": "T5 bias",
    "fire": "FIRE",
}
"""Position encodings and what tables and plots call them. Each also as ``randomised_<name>``, with positions drawn at
random, and each of all these as ``dape_<name>``, with the DAPE network on top."""


class Position(NamedTuple):
    """What ``model.position`` names: an encoding, a key of ``LABELS``, and what is done with it."""

    encoding: str
    randomised: bool
    dape: bool


def split_position(position: str) -> Position:
    """("kerple", False, True) from "dape_kerple"."""
    inner = position.removeprefix("dape_")
    encoding = inner.removeprefix("randomised_")
    if encoding not in LABELS:
        raise UserError(f"model.position={position!r} is unknown{nearest(position, positions())}")
    return Position(encoding, inner != encoding, position != inner)


def positions() -> list[str]:
    """All that ``model.position`` may be."""
    names = [*LABELS, *(f"randomised_{name}" for name in LABELS)]
    return [*names, *(f"dape_{name}" for name in names)]


def method_label(position: str) -> str:
    """How tables and plots call a position encoding, such as DAPE-Kerple."""
    encoding, randomised, dape = split_position(position)
    label = f"randomised {LABELS[encoding]}" if randomised else LABELS[encoding]
    return f"DAPE-{label}" if dape else label[0].upper() + label[1:]


def transformer(config: Config, vocab_size: int, platform: str, batch_axes: tuple[str, ...] = ()) -> TransformerConfig:
    """The model of a configuration. ``platform`` ("cpu", "tpu", "gpu") decides the dtype "auto"."""
    model, train_length = config.model, config.data.sequence_length
    encoding, randomised, dape = split_position(model.position)
    random_range = (model.randomised.range or 4 * train_length) if randomised else None
    dtype = ("float32" if platform == "cpu" else "bfloat16") if model.dtype == "auto" else model.dtype
    return TransformerConfig(
        vocab_size=vocab_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        width=model.width,
        mlp_width=model.mlp_ratio * model.width,
        bias=_bias(config, encoding, dape),
        rotary=_rotary(config, encoding),
        absolute=_absolute(config, encoding, random_range),
        random_range=random_range,
        adapt=adapt_network(model.dape) if dape else None,
        dtype=dtype,
        backend=model.attention_backend,
        batch_axes=batch_axes,
        remat=model.remat,
    )


def encoder(
    config: Config,
    vocab_size: int,
    output_size: int,
    longest_row: int,
    platform: str,
    batch_axes: tuple[str, ...] = (),
) -> TransformerConfig:
    """The bidirectional model of a configuration, with ``output_size`` numbers for each token.

    ``longest_row``, tokens of a training row, is the length that YaRN's scale is relative to: a row has outputs besides
    the input that ``data.sequence_length`` is about.
    """
    causal = transformer(config, vocab_size, platform, batch_axes)
    rotary = causal.rotary
    if isinstance(rotary, YaRN):
        rotary = dataclasses.replace(rotary, train_length=longest_row)
    return dataclasses.replace(causal, causal=False, output_size=output_size, rotary=rotary)


def _bias(config: Config, encoding: str, dape: bool) -> biases.Bias | None:
    model = config.model
    if encoding == "t5":
        return biases.T5Bias(model.t5.num_buckets, model.t5.max_distance)
    if encoding == "fire":
        length = config.data.sequence_length if model.fire.init_length is None else model.fire.init_length
        return biases.FIRE(model.fire.width, float(length), "leaky_relu" if dape else "relu")
    return biases.BIASES[encoding]() if encoding in biases.BIASES else None


def _rotary(config: Config, encoding: str) -> RoPE | None:
    base, yarn = config.model.rope_base, config.model.yarn
    if encoding == "yarn":
        return YaRN(base, config.data.sequence_length, 1.0, yarn.beta_fast, yarn.beta_slow)
    return RoPE(base) if encoding == "rope" else None


def _absolute(config: Config, encoding: str, random_range: int | None) -> Absolute | None:
    if encoding == "learned":
        return Learned(config.model.learned.length or random_range or config.data.sequence_length)
    return Sinusoidal() if encoding == "sinusoidal" else None


def adapt_network(dape: DapeSection) -> adapt_lib.Adapt:
    """The DAPE network of a section."""
    return adapt_lib.Adapt(dape.variant, dape.width, dape.per_head, dape.kernel_width)
