"""Registers and spilled bytes of the GPU kernels as ptxas compiles them for an H100. Needs no GPU.

python -m experiments.gpu_registers [--shapes=12x64,16x64] [--biases=kerple] [--networks=concat_residual]
    [--width=32] [--kernel_width=1] [--length=2048] [--dtype=bfloat16] [--tile=16x16] [--json=PATH]

Shapes are heads x head dimension. Networks: none, a variant of DAPE, or per_head. Without --tile the kernels' own
tiles are taken. Bytes are per thread and counted once, inside loops or not.
"""

import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
from absl import flags

from dape_jax import Adapt, BlockSizes
from dape_jax.adapt import VARIANTS
from dape_jax.attention import api, gpu
from dape_jax.biases import BIASES
from dape_jax.errors import UserError
from dape_jax.evaluation.report import write_json
from experiments import command, gpu_compile

_SHAPES = flags.DEFINE_string("shapes", "12x64,16x64", "Comma-separated heads x head dimension.")
_BIASES = flags.DEFINE_string("biases", "kerple", "Comma-separated biases; none for none.")
_NETWORKS = flags.DEFINE_string("networks", "concat_residual", "Comma-separated: none, a variant of DAPE, per_head.")
_WIDTH = flags.DEFINE_integer("width", 32, "Hidden units of the network.")
_KERNEL_WIDTH = flags.DEFINE_integer("kernel_width", 1, "Keys that each layer of the network convolves; 3 is DAPE V2.")
_LENGTH = flags.DEFINE_integer("length", 2048, "Tokens.")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float32"], "Of q, k and v.")
_TILE = flags.DEFINE_string("tile", None, "Queries x keys of all kernels' tiles.")
_JSON = flags.DEFINE_string("json", None, "Where to write the figures as JSON.")
_USAGE = (
    "python -m experiments.gpu_registers [--shapes=12x64,16x64] [--biases=kerple] [--networks=concat_residual] "
    "[--width=32] [--kernel_width=1] [--length=2048] [--dtype=bfloat16] [--tile=16x16] [--json=PATH]"
)


def main(_: list[str]) -> None:
    shapes = [_pair("shapes", item) for item in _SHAPES.value.split(",")]
    biases = command.names("biases", _BIASES.value, ("none", *BIASES))
    networks = command.names("networks", _NETWORKS.value, ("none", *VARIANTS, "per_head"))
    blocks = None if _TILE.value is None else BlockSizes(*_pair("tile", _TILE.value), rows=1)
    output = None if _JSON.value is None else command.writable("json", _JSON.value)
    if _LENGTH.value < 1:
        raise UserError(f"--length={_LENGTH.value}: 1 or more is needed")
    if "none" not in networks or len(networks) > 1:
        Adapt(width=_WIDTH.value, kernel_width=_KERNEL_WIDTH.value)  # refused before anything is compiled
    why = gpu_compile.missing()
    if why is not None:
        raise UserError(why)
    rows = []
    print(f"{'heads':>8} {'bias':<14}{'network':<17}{'kernel':<24}{'tile':>8} warps registers  spilled, read back")
    for (heads, d), bias, network in itertools.product(shapes, biases, networks):
        for row in _figures(heads, d, bias, network, blocks):
            rows.append(row)
            print(
                f"{heads:>4}x{d:<4}{bias:<14}{network:<17}{row['kernel']:<24}{row['tile']:>8}{row['warps']:>6}"
                f"{row['registers']:>10}{row['spill_stores']:>9}{row['spill_loads']:>11}",
                flush=True,
            )
    if output is not None:
        sizes = {"length": _LENGTH.value, "width": _WIDTH.value, "kernel_width": _KERNEL_WIDTH.value}
        write_json({**sizes, "dtype": _DTYPE.value, "kernels": rows}, output)


def _figures(heads: int, d: int, bias_name: str, network: str, blocks: BlockSizes | None) -> list[dict[str, Any]]:
    bias = None if bias_name == "none" else BIASES[bias_name]()
    adapt = None
    if network != "none":
        variant = "concat_residual" if network == "per_head" else network
        adapt = Adapt(variant, _WIDTH.value, network == "per_head", _KERNEL_WIDTH.value)
    dtype = jnp.dtype(_DTYPE.value)
    tiles = gpu.default_tiles(api.Spec(bias, adapt, True, 1.0, heads), dtype == jnp.float32)
    if blocks is not None:
        tiles = tuple(tile._replace(q=blocks.q, k=blocks.k) for tile in tiles)
    tile_of = dict(zip(("forward", "queries", "keys"), tiles, strict=True))
    with tempfile.TemporaryDirectory() as folder:
        gpu_compile.compiled(_LENGTH.value, heads, d, bias, adapt, dtype=dtype, block_sizes=blocks, folder=Path(folder))
        found = {row["kernel"].removeprefix("dape_attention_"): row for row in gpu_compile.registers(Path(folder))}
    return [
        {"heads": heads, "head_dim": d, "bias": bias_name, "network": network, "tile": f"{tile.q}x{tile.k}",
         **found[name], "kernel": name}
        for name, tile in tile_of.items()
    ]  # fmt: skip


def _pair(name: str, item: str) -> tuple[int, int]:
    first, _, second = item.partition("x")
    if not (first.isdigit() and second.isdigit() and int(first) and int(second)):
        raise UserError(f"--{name}: {item!r} is not of the form 12x64, of positive numbers")
    return int(first), int(second)


if __name__ == "__main__":
    command.run(main, _USAGE)
