"""Searches for the block sizes of the TPU attention kernels and writes them into the table that the kernels read.

python -m experiments.tune_blocks [--by=static] [--targets=v5e,v6e] [--models=125M] [--widths=32]
    [--lengths=512,2048,8192] [--forward=128x256,128x512,128x1024] [--backward=64x256,128x256,128x512]
    [--output=PATH.json]

DAPE-Kerple, causal, bfloat16. ``--by=static`` compiles every tile ahead of time with libtpu and takes the cycles that
``kernel_cost`` reports, times the tiles that a causal mask leaves at each length. ``--by=time`` runs on the TPU at hand
and takes the median of several calls; --targets is then not read. Entries of the same shape and length are replaced.
"""

import importlib.metadata
import importlib.util
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import flags
from jax.experimental import topologies
from tqdm import tqdm

from dape_jax import Adapt, KerpleLog, dape_attention
from dape_jax.attention import BlockSizes
from dape_jax.errors import UserError
from dape_jax.evaluation.report import write_json
from experiments import command
from experiments.compiled_cost import compile_order, describe
from experiments.kernel_programs import MODELS, NAMES, TOPOLOGIES
from experiments.tuned_table import Tile, best_entries, causal_cycles, merged, read

_BY = flags.DEFINE_enum("by", "static", ["static", "time"], "What is compared: the compiler's schedule, or time.")
_TARGETS = flags.DEFINE_string("targets", "v5e,v6e", f"Comma-separated, of {', '.join(TOPOLOGIES)}.")
_MODELS = flags.DEFINE_string("models", "125M", f"Comma-separated shapes, of {', '.join(MODELS)}.")
_WIDTHS = flags.DEFINE_string("widths", "32", "Comma-separated widths D of the DAPE network.")
_LENGTHS = flags.DEFINE_string("lengths", "512,2048,8192", "Comma-separated sequence lengths.")
_FORWARD = flags.DEFINE_string("forward", "128x256,128x512,128x1024", "Tiles to try, queries x keys.")
_BACKWARD = flags.DEFINE_string("backward", "64x256,128x256,128x512", "Tiles to try, queries x keys.")
_TABLE = Path(__file__).parent.parent / "dape_jax" / "attention" / "tpu_tuned.json"
_OUTPUT = flags.DEFINE_string("output", str(_TABLE), "Path of the table.")
_USAGE = (
    "python -m experiments.tune_blocks [--by=static] [--targets=v5e,v6e] [--models=125M] [--widths=32] "
    "[--lengths=512,2048,8192] [--forward=128x256,128x512] [--backward=64x256,128x512] [--output=PATH.json]"
)
_CALLS = 7


def main(_: list[str]) -> None:
    models, widths = command.names("models", _MODELS.value, MODELS), command.integers("widths", _WIDTHS.value)
    lengths = command.integers("lengths", _LENGTHS.value)
    tiles = {"forward": _tiles("forward", _FORWARD.value), "backward": _tiles("backward", _BACKWARD.value)}
    for name, values in (("widths", widths), ("lengths", lengths)):
        if min(values) < 1:
            raise UserError(f"--{name}={','.join(map(str, values))}: {min(values)} is too small; 1 or more is needed")
    static = _BY.value == "static"
    targets = command.names("targets", _TARGETS.value, TOPOLOGIES) if static else []
    if not static and jax.default_backend() != "tpu":
        raise UserError(f"--by=time needs a TPU, and JAX runs on {jax.default_backend()}; use --by=static")
    output = command.writable("output", _OUTPUT.value)
    old = read("output", output)
    shapes = [(model, width) for model in models for width in widths]
    entries = _static(targets, shapes, lengths, tiles) if static else _timed(shapes, lengths, tiles)
    if not entries:
        raise UserError("--forward, --backward: every tile was left out for the reasons above; nothing is written")
    write_json({"tiles": merged(old, entries)}, output)
    for e in entries:
        shape = f"{e['device_kind']}, {e['heads']} heads of {e['head_dim']}, D {e['width']}, length {e['length']}"
        print(f"{shape}: {e['kernel']} {e['block_q']} x {e['block_k']}")
    print(output)


def _tiles(flag: str, value: str) -> list[Tile]:
    try:
        tiles = [(int(q), int(k)) for q, k in (tile.split("x") for tile in value.split(","))]
        if min(min(tile) for tile in tiles) < 1:
            raise ValueError
        return tiles
    except ValueError:
        raise UserError(f"--{flag}={value}: tiles such as 128x512, separated by commas, are needed") from None


# By the static schedule -----------------------------------------------------------------------------------------------


def _static(targets: list[str], shapes: list, lengths: list[int], tiles: dict[str, list[Tile]]) -> list:
    versions = _versions()
    work = [(t, shape, kernel, tile) for t in targets for shape in shapes for kernel in tiles for tile in tiles[kernel]]
    costs: dict[tuple, dict[Tile, dict[str, Any]]] = {}
    with tqdm(work, desc="compiling", unit="tile") as progress:
        for target, shape, kernel, (q, k) in progress:
            progress.set_postfix_str(f"{target} {shape[0]} D {shape[1]} {kernel} {q} x {k}")
            order = {"target": target, "program": "dape", "model": shape[0], "width": shape[1], "length": 8192,
                     "block_q": q, "block_k": k, "backward": kernel == "backward"}  # fmt: skip
            if kernel == "backward":  # the forward that comes with it is small: it is not looked at
                order |= {"block_q": 128, "block_k": 128, "backward_q": q, "backward_k": k}
            try:
                made, schedules = compile_order(order)
            except UserError as e:
                progress.write(f"left out: {e}")
                continue
            found = describe(order, made, NAMES[kernel], schedules[NAMES[kernel]])
            costs.setdefault((target, shape, kernel), {})[q, k] = found
    entries = []
    for target, shape in [(t, shape) for t in targets for shape in shapes]:
        figures = {
            (kernel, length): {tile: causal_cycles(length, tile, cost) for tile, cost in of_kernel.items()}
            for (t, s, kernel), of_kernel in costs.items()
            for length in lengths
            if (t, s) == (target, shape)
        }
        entries += best_entries(_device_kind(target), shape, f"cycles of the static schedule, {versions}", figures)
    return entries


def _versions() -> str:
    if importlib.util.find_spec("libtpu") is None:
        raise UserError('--by=static: compiling for a TPU needs libtpu, which is not installed; pip install "jax[tpu]"')
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "libtpu"))


def _device_kind(target: str) -> str:
    return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[target]).devices[0].device_kind


# By time --------------------------------------------------------------------------------------------------------------


def _timed(shapes: list, lengths: list[int], tiles: dict[str, list[Tile]]) -> list:
    entries = []
    for shape in shapes:
        figures = {
            (kernel, length): _seconds_of_each(shape, length, kernel, tiles[kernel])
            for kernel in tiles
            for length in tqdm(lengths, desc=f"{shape[0]} D {shape[1]} {kernel}", unit="length")
        }
        figures = {key: of_tiles for key, of_tiles in figures.items() if of_tiles}
        by = f"seconds, jax {jax.__version__}"
        entries += best_entries(jax.devices()[0].device_kind, shape, by, figures)
    return entries


def _seconds_of_each(shape: tuple[str, int], length: int, kernel: str, tiles: list[Tile]) -> dict[Tile, float]:
    """Of the tiles that can be compiled."""
    seconds = {}
    for tile in tiles:
        try:
            seconds[tile] = _seconds(shape, length, kernel, tile)
        except (UserError, jax.errors.JaxRuntimeError) as e:
            tqdm.write(f"left out: {kernel} {tile[0]} x {tile[1]} at length {length}: {str(e).splitlines()[0]}")
    return seconds


def _seconds(shape: tuple[str, int], length: int, kernel: str, tile: Tile) -> float:
    """Median of several calls; of the backward, with a forward that is the same for all tiles."""
    (heads, head_dim), bias, adapt = MODELS[shape[0]], KerpleLog(), Adapt(width=shape[1])
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v = (jax.random.normal(key, (1, length, heads, head_dim), jnp.bfloat16) for key in keys[:3])
    params = (bias.init(keys[3], heads), adapt.init(keys[4], heads, has_bias=True))
    blocks = BlockSizes(*tile) if kernel == "forward" else BlockSizes(128, 128, backward=BlockSizes(*tile))

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, params: tuple) -> jax.Array:
        return dape_attention(
            q, k, v, bias=bias, bias_params=params[0], adapt=adapt, adapt_params=params[1], backend="pallas_tpu",
            block_sizes=blocks,
        )  # fmt: skip

    def both(*arrays: Any) -> Any:
        out, vjp = jax.vjp(attend, *arrays)
        return vjp(out)

    run = jax.jit(attend if kernel == "forward" else both)
    jax.block_until_ready(run(q, k, v, params))
    seconds = []
    for _ in range(_CALLS):
        start = time.perf_counter()
        jax.block_until_ready(run(q, k, v, params))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


if __name__ == "__main__":
    command.run(main, _USAGE)
