"""What the TPU attention kernels cost, from the compiler's static schedule: no TPU is needed.

python -m experiments.kernel_cost [--targets=v5e,v6e] [--models=125M] [--kernels=forward,backward,splash]
    [--widths=32,8] [--length=2048] [--block_q=N --block_k=N] [--verbose] [--output=PATH.json]

DAPE-Kerple, causal, bfloat16, one sequence, compiled ahead of time by libtpu (pip install "jax[tpu]"). Figures are
cycles of one core for each (query, key) position over all heads together. Ratios between kernels compiled the same way
mean something; seconds do not follow from them.

- interior, diagonal: one grid step without and with the causal mask: the larger of its bundles, loops counted as often
  as they run, and its MXU rows at 4 a cycle, over the positions of the tile.
- + ends: an interior step that is also the first and the last of its row of blocks.
- bound: the most that one unit needs for what was compiled, spills left out; of the MXU in rows, of others in slots.
- pieces: such bounds of every stretch between the beginnings and ends of loops, added up: nothing is scheduled across
  those, so that a step whose stretches need different units cannot come below.
- design: what the MXU needs for the formula in one bfloat16 pass; the backward's is counted in the same way.
- splash: JAX's splash attention, forward, without DAPE, at the better of blocks of 512 and 1,024, same length.

A dense product compiled in the same run says how far its bundles alone lie below what the MXU needs.
"""

import importlib.metadata
import importlib.util
import sys
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from dape_jax.errors import UserError
from dape_jax.evaluation.report import write_json
from experiments import command
from experiments.compiled_cost import calibrate, compare_to_splash, compile_order, describe
from experiments.kernel_programs import MODELS, NAMES, TOPOLOGIES
from experiments.static_schedule import Node, Schedule, straight

_TARGETS = flags.DEFINE_string("targets", "v5e,v6e", f"Comma-separated, of {', '.join(TOPOLOGIES)}.")
_MODELS = flags.DEFINE_string("models", "125M", f"Comma-separated shapes, of {', '.join(MODELS)}.")
_KERNELS = flags.DEFINE_string("kernels", "forward,backward,splash", "Comma-separated, of forward, backward, splash.")
_WIDTHS = flags.DEFINE_string("widths", "32,8", "Comma-separated widths D of the DAPE network.")
_LENGTH = flags.DEFINE_integer("length", 2048, "Queries and keys.")
_BLOCK_Q = flags.DEFINE_integer(
    "block_q", None, "Queries of a tile, with --block_k; by default the kernels' own choice."
)
_BLOCK_K = flags.DEFINE_integer("block_k", None, "Keys of a tile.")
_VERBOSE = flags.DEFINE_bool("verbose", False, "Print the loops and branches of every kernel.")
_OUTPUT = flags.DEFINE_string("output", "runs/kernel_cost.json", "Path of the JSON.")
_USAGE = (
    "python -m experiments.kernel_cost [--targets=v5e,v6e] [--models=125M] [--kernels=forward,backward,splash] "
    "[--widths=32,8] [--length=2048] [--block_q=N --block_k=N] [--verbose] [--output=PATH.json]"
)
_SPLASH_BLOCKS = (512, 1024)


def main(_: list[str]) -> None:
    targets = command.names("targets", _TARGETS.value, TOPOLOGIES)
    models = command.names("models", _MODELS.value, MODELS)
    kernels = command.names("kernels", _KERNELS.value, (*NAMES, "splash"))
    widths = command.integers("widths", _WIDTHS.value)
    _check_numbers(widths)
    output = command.writable("output", _OUTPUT.value)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError('--targets: compiling for a TPU needs libtpu, which is not installed; pip install "jax[tpu]"')
    orders = [order for target in targets for order in _orders(target, models, kernels, widths)]
    calibration: dict[str, Any] = {}
    entries: list[dict[str, Any]] = []
    trees: list[str] = []
    left_out: list[str] = []
    with tqdm(total=len(orders), desc="compiling", unit="program") as progress:
        for order in orders:
            progress.set_postfix_str(" ".join(str(order[k]) for k in ("target", "program", "width") if k in order))
            try:
                made, schedules = compile_order(order)
            except UserError as e:
                left_out.append(str(e))
                progress.write(f"left out: {e}")
                continue
            for name, schedule in schedules.items():
                if order["program"] == "dense":
                    calibration[order["target"]] = calibrate(order["target"], schedule)
                elif order["program"] == "splash" or any(NAMES.get(kernel) == name for kernel in kernels):
                    entries.append(describe(order, made, name, schedule))
                    trees.append(_title(entries[-1]) + "\n" + _tree(schedule, schedule.root))
            progress.update()
    if not entries:
        raise UserError(f"nothing was compiled: {'; '.join(left_out)}")
    compare_to_splash(entries)
    report = {
        "measured": f"DAPE-Kerple, causal, bfloat16, 1 sequence of {_LENGTH.value}; cycles a position over all heads",
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")},
        "calibration": calibration, "kernels": entries, "left_out": left_out,
    }  # fmt: skip
    try:
        write_json(report, output)
    except OSError as e:
        raise UserError(f"--output={output}: cannot be written: {e.strerror or e}") from e
    if _VERBOSE.value:
        print("\n".join(trees))
    _print_table(report)
    print(output)


# Flags ----------------------------------------------------------------------------------------------------------------


def _check_numbers(widths: list[int]) -> None:
    for width in widths:
        if width < 1:
            raise UserError(f"--widths={_WIDTHS.value}: {width} is too small; 1 or more is needed")
    if _LENGTH.value < max(_SPLASH_BLOCKS) or _LENGTH.value % max(_SPLASH_BLOCKS):
        raise UserError(f"--length={_LENGTH.value}: a multiple of {max(_SPLASH_BLOCKS)} is needed")
    if (_BLOCK_Q.value is None) != (_BLOCK_K.value is None):
        missing = "block_q" if _BLOCK_Q.value is None else "block_k"
        raise UserError(f"--{missing} is missing; give both block sizes or none")
    for flag in (_BLOCK_Q, _BLOCK_K):
        if flag.value is not None and flag.value < 1:
            raise UserError(f"--{flag.name}={flag.value}: 1 or more is needed")


# Compiling ------------------------------------------------------------------------------------------------------------


def _orders(target: str, models: list[str], kernels: list[str], widths: list[int]) -> list[dict[str, Any]]:
    """What to compile for one target: the backward's program holds a forward, too."""
    orders: list[dict[str, Any]] = [{"target": target, "program": "dense"}]
    for model in models:
        common = {"target": target, "model": model, "length": _LENGTH.value}
        if "splash" in kernels:
            orders += [{**common, "program": "splash", "block_q": n, "block_k": n} for n in _SPLASH_BLOCKS]
        if "forward" in kernels or "backward" in kernels:
            blocks = {"block_q": _BLOCK_Q.value, "block_k": _BLOCK_K.value, "backward": "backward" in kernels}
            orders += [{**common, "program": "dape", "width": width, **blocks} for width in widths]
    return orders


# Printing -------------------------------------------------------------------------------------------------------------


def _title(entry: dict[str, Any]) -> str:
    width = f", D {entry['width']}" if entry["width"] else ""
    return f"{entry['target']} {entry['model']} {entry['kernel']}{width}, {_blocks(entry)}"


def _blocks(entry: dict[str, Any]) -> str:
    group = f", group {entry['group']}" if entry["group"] else ""
    return f"{entry['block_q']} x {entry['block_k']}{group}"


def _tree(schedule: Schedule, node: Node, depth: int = 1) -> str:
    """The program's loops and branches; bundles and rows are those of one turn outside the lines below."""
    work = straight(schedule, node)
    times = f" x {node.trips}" if node.trips is not None else ""
    line = f"{'  ' * depth}{node.kind}{times} [{node.start}, {node.end}): {work['bundles']:.0f} bundles"
    line += f", {work['rows']:.0f} MXU rows, {work['VALU']:.0f} VALU slots"
    return "\n".join([line, *(_tree(schedule, child, depth + 1) for child in node.children)])


def _print_table(report: dict[str, Any]) -> None:
    table = Table(title=report["measured"])
    headings = ("target", "kernel", "D", "tile", "interior", "diagonal", "+ ends", "bound", "x bound", "pieces",
                "design", "x design", "x splash", "+ ends", "spills")  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("target", "kernel", "tile") else "right")

    def times(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    for e in report["kernels"]:
        bound = f"{e['bounds'][e['largest_bound']]:.3f} {e['largest_bound']}"
        table.add_row(
            f"{e['target']} {e['model']}", e["kernel"], str(e["width"] or "-"), _blocks(e), f"{e['interior']:.3f}",
            f"{e['diagonal']:.3f}", f"{e['with_ends']:.3f}", bound, times(e["ratio_to_largest_bound"]),
            f"{e['phased_bound']:.3f}", f"{e['design_bound']:.3f}", times(e["ratio_to_design_bound"]),
            times(e["interior_to_splash"]), times(e["with_ends_to_splash"]), f"{sum(e['spills'].values()):.3f}",
        )  # fmt: skip
    console = Console(width=None if sys.stdout.isatty() else 170)
    console.print(table)
    for target, x in report["calibration"].items():
        print(f"{target}: a dense product's bundles alone are {x['mxu_cycles_over_bundles']:.2f} times the MXU's peak")
    for entry in report["kernels"]:
        for note in entry["notes"]:
            print(f"{_title(entry)}: {note}")


if __name__ == "__main__":
    command.run(main, _USAGE)
