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
- design: what the MXU needs for the formula in one bfloat16 pass; the backward's is counted in the same way.
- splash: JAX's splash attention, forward, without DAPE, at the better of blocks of 512 and 1,024, same length.

A dense product compiled in the same run says how far its bundles alone lie below what the MXU needs.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from absl import flags
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from dape_jax.errors import UserError, nearest
from dape_jax.evaluation.report import write_json
from experiments import command
from experiments.kernel_programs import DENSE, MODELS, NAMES, TOPOLOGIES
from experiments.static_schedule import (
    MXU_ROWS_PER_CYCLE,
    Node,
    Schedule,
    ScheduleError,
    Step,
    Work,
    parse,
    step,
    straight,
)

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
_ROOT = Path(__file__).parent.parent
_SPLASH_BLOCKS = (512, 1024)
LANES = {"v4": 128, "v5e": 128, "v5p": 128, "v6e": 256}
"""Contraction entries and outputs of one MXU row."""
UNITS = {
    "VALU": "VALU",
    "XLU": "XLU",
    "EUP": "EUP",
    "VPOP": "pop",
    "VLOAD": "load",
    "VSTORE": "store",
    "SALU": "scalar",
}
"""Names in the dump and here. The dump's MXU column is how many are occupied, results on their way included."""
SPILLS = {"VLOAD": "VLOAD:FILL", "VSTORE": "VSTORE:SPILL"}
"""Contained in the columns of loads and stores."""


def main(_: list[str]) -> None:
    targets = _names("targets", _TARGETS.value, TOPOLOGIES)
    models = _names("models", _MODELS.value, MODELS)
    kernels = _names("kernels", _KERNELS.value, (*NAMES, "splash"))
    widths = command.integers("widths", _WIDTHS.value)
    _check_numbers(widths)
    output = _writable(Path(_OUTPUT.value).expanduser())
    if importlib.util.find_spec("libtpu") is None:
        raise UserError('--targets: compiling for a TPU needs libtpu, which is not installed; pip install "jax[tpu]"')
    orders = [order for target in targets for order in _orders(target, models, kernels, widths)]
    calibration: dict[str, Any] = {}
    entries: list[dict[str, Any]] = []
    trees: list[str] = []
    with tqdm(total=len(orders), desc="compiling", unit="program") as progress:
        for order in orders:
            progress.set_postfix_str(" ".join(str(order[k]) for k in ("target", "program", "width") if k in order))
            made, schedules = _compile(order)
            for name, schedule in schedules.items():
                if order["program"] == "dense":
                    calibration[order["target"]] = _calibrate(order["target"], schedule)
                elif order["program"] == "splash" or any(NAMES.get(kernel) == name for kernel in kernels):
                    entries.append(describe(order, made, name, schedule))
                    trees.append(_title(entries[-1]) + "\n" + _tree(schedule, schedule.root))
            progress.update()
    compare_to_splash(entries)
    report = {
        "measured": f"DAPE-Kerple, causal, bfloat16, 1 sequence of {_LENGTH.value}; cycles a position over all heads",
        "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")},
        "calibration": calibration, "kernels": entries,
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


def _names(flag: str, value: str, known: Any) -> list[str]:
    names = value.split(",")
    for name in names:
        if name not in known:
            raise UserError(f"--{flag}={value}: {name!r} is unknown{nearest(name, known)}")
        if names.count(name) > 1:
            raise UserError(f"--{flag}={value} names {name} twice")
    return names


def _check_numbers(widths: list[int]) -> None:
    for width in widths:
        if width < 1:
            raise UserError(f"--widths={_WIDTHS.value}: {width} is too small; 1 or more is needed")
        if widths.count(width) > 1:
            raise UserError(f"--widths={_WIDTHS.value} names {width} twice")
    if _LENGTH.value < max(_SPLASH_BLOCKS) or _LENGTH.value % max(_SPLASH_BLOCKS):
        raise UserError(f"--length={_LENGTH.value}: a multiple of {max(_SPLASH_BLOCKS)} is needed")
    if (_BLOCK_Q.value is None) != (_BLOCK_K.value is None):
        missing = "block_q" if _BLOCK_Q.value is None else "block_k"
        raise UserError(f"--{missing} is missing; give both block sizes or none")


def _writable(output: Path) -> Path:
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as e:
        raise UserError(f"--output={output}: cannot be written: {e.strerror or e}") from e
    return output


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


def _compile(order: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Schedule]]:
    """What the compiling process says of itself, and the schedules of its Pallas kernels by name."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {
            "LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true",
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_COMPILATION_CACHE": "false",
            "TPU_SKIP_MDS_QUERY": "1",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        }
        line = [sys.executable, "-m", "experiments.kernel_programs", json.dumps(order)]
        done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=_ROOT, env=environment)
        what = ", ".join(f"{k} {v}" for k, v in order.items() if v is not None)
        if done.returncode:
            said = [x for x in done.stderr.strip().splitlines() if re.match(r"\w[\w.]*(Error|Exception)\b", x)]
            command.stop(f"compiling {what} failed: {(said or ['no reason given'])[-1]}")
        made = json.loads(done.stdout.splitlines()[-1])
        if "refused" in made:
            raise UserError(f"{what}: {made['refused']}")
        try:
            wanted = list(made["tiles"])
            return made, {name: _schedule(Path(folder), name) for name in wanted}
        except ScheduleError as e:
            command.stop(f"{what}: this libtpu's dump cannot be read: {e}")


def _schedule(folder: Path, name: str) -> Schedule:
    texts = []
    for pattern in (f"*{name}*[0-9]-final_bundles.txt", f"*{name}*-final_hlo-static-per-bundle-utilization.txt"):
        found = list(folder.glob(pattern))
        if len(found) != 1:
            raise ScheduleError(f"{len(found)} files {pattern} where one is expected")
        texts.append(found[0].read_text(errors="replace"))
    return parse(*texts)


# Figures --------------------------------------------------------------------------------------------------------------


def arithmetic_bound(kernel: str, heads: int, head_dim: int, width: int | None, lanes: int) -> float:
    """Cycles a position that the MXU needs for the formula in one bfloat16 pass.

    A product that turns n numbers a position into m costs max(n, m) / lanes rows. The network's first layer reads two
    numbers a head (S and B, or S in two parts). Products over head dimensions up to the lanes cost one row a head for
    every ``lanes`` positions. The backward recomputes the logits and the network, passes the gradient back through
    both layers, and sums the gradients of the weights over positions, where the smaller side is what goes in.
    """
    per_product = heads * -(-head_dim // lanes)
    if width is None:
        return 2 * per_product / (lanes * MXU_ROWS_PER_CYCLE)
    layers = max(width, 2 * heads) + max(width, heads)
    rows = 2 * per_product + layers
    if kernel == "backward":
        rows = 5 * per_product + 2 * layers + min(width, 2 * heads) + min(width, heads)
    return rows / (lanes * MXU_ROWS_PER_CYCLE)


def unit_bounds(work: Work, capacity: dict[str, int], positions: float) -> dict[str, float]:
    """Cycles a position that each unit needs for what was compiled, without spills."""
    bounds = {"MXU": work["rows"] / MXU_ROWS_PER_CYCLE}
    for name, unit in UNITS.items():
        spilled = work[SPILLS[name]] if name in SPILLS else 0.0
        bounds[unit] = (work[name] - spilled) / capacity[name]
    return {unit: bound / positions for unit, bound in bounds.items()}


def describe(order: dict[str, Any], made: dict[str, Any], name: str, schedule: Schedule) -> dict[str, Any]:
    """The figures of one kernel."""
    is_splash = order["program"] == "splash"
    kernel = "splash" if is_splash else next(k for k, v in NAMES.items() if v == name)
    heads, head_dim = MODELS[order["model"]]
    # A step of splash attention is one head's.
    tile = made["tiles"][name]
    positions = tile["block_q"] * tile["block_k"] / (heads if is_splash else 1)
    found = step(schedule)
    interior, diagonal = found.variants[0], found.variants[-1]
    bounds = unit_bounds(interior, schedule.capacity, positions)
    largest = max(bounds, key=lambda unit: bounds[unit])
    design = arithmetic_bound(kernel, heads, head_dim, order.get("width"), LANES[order["target"]])
    cycles = interior.cycles() / positions
    notes = [*made["notes"], *found.notes]
    # Rows that go in are counted, and the design's bound also counts the numbers that stay, where they are more.
    if bounds["MXU"] < 0.6 * design:
        notes.append(f"MXU rows need {bounds['MXU']:.3f}, less than the design's {design:.3f}: work may be missing")
    return {
        "target": order["target"], "model": order["model"], "heads": heads, "head_dim": head_dim, "kernel": kernel,
        "width": order.get("width"), "length": order["length"], **tile, "compiled_with_backward": order.get("backward"),
        "interior": cycles,
        "diagonal": diagonal.cycles() / positions,
        "with_ends": _with_ends(found) / positions,
        "variants": len(found.variants),
        "interior_bundles": interior["bundles"],
        "interior_mxu_rows": interior["rows"],
        "mxu_occupied": interior["MXU"] / schedule.capacity["MXU"] / positions,
        "weight_pushes": interior["weight_pushes"] / positions,
        "bounds": bounds,
        "largest_bound": largest,
        "ratio_to_largest_bound": cycles / bounds[largest],
        "design_bound": design,
        "ratio_to_design_bound": cycles / design,
        "spills": {"fills": interior["VLOAD:FILL"] / positions, "stores": interior["VSTORE:SPILL"] / positions},
        "notes": notes,
    }  # fmt: skip


def _with_ends(found: Step) -> float:
    return found.variants[0].cycles() + sum(work.cycles() for _, work in found.others)


def compare_to_splash(entries: list[dict[str, Any]]) -> None:
    """Adds a forward's ratios to splash attention at its best block size, for the same target and model."""
    for entry in entries:
        shape = (entry["target"], entry["model"])
        same = [e for e in entries if e["kernel"] == "splash" and (e["target"], e["model"]) == shape]
        for field in ("interior", "with_ends"):
            best = None if entry["kernel"] == "backward" else min((e[field] for e in same), default=None)
            entry[f"{field}_to_splash"] = None if best is None else entry[field] / best


def _calibrate(target: str, schedule: Schedule) -> dict[str, float]:
    """The dense product: that its rows are counted right, and how densely its bundles pack them."""
    m, k, n = DENSE
    expected = m * (k // LANES[target]) * (n // LANES[target])
    work = step(schedule).variants[0]
    if work["rows"] != expected:
        command.stop(
            f"{target}: {work['rows']:.0f} MXU rows counted in a dense product of {m} x {k} x {n}, where {expected} "
            "are needed: this libtpu's instructions are not known"
        )
    cycles = expected / MXU_ROWS_PER_CYCLE
    return {"rows": expected, "bundles": work["bundles"], "mxu_cycles_over_bundles": cycles / work["bundles"]}


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
    headings = ("target", "kernel", "D", "tile", "interior", "diagonal", "+ ends", "bound", "x bound", "design",
                "x design", "x splash", "+ ends", "spills")  # fmt: skip
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("target", "kernel", "tile") else "right")

    def times(value: float | None) -> str:
        return "-" if value is None else f"{value:.2f}"

    for e in report["kernels"]:
        bound = f"{e['bounds'][e['largest_bound']]:.3f} {e['largest_bound']}"
        table.add_row(
            f"{e['target']} {e['model']}", e["kernel"], str(e["width"] or "-"), _blocks(e), f"{e['interior']:.3f}",
            f"{e['diagonal']:.3f}", f"{e['with_ends']:.3f}", bound, times(e["ratio_to_largest_bound"]),
            f"{e['design_bound']:.3f}", times(e["ratio_to_design_bound"]), times(e["interior_to_splash"]),
            times(e["with_ends_to_splash"]), f"{sum(e['spills'].values()):.3f}",
        )  # fmt: skip
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for target, x in report["calibration"].items():
        print(f"{target}: a dense product's bundles alone are {x['mxu_cycles_over_bundles']:.2f} times the MXU's peak")
    for entry in report["kernels"]:
        for note in entry["notes"]:
            print(f"{_title(entry)}: {note}")


if __name__ == "__main__":
    command.run(main, _USAGE)
