"""TPU programs compiled ahead of time, each in a process of its own, and the figures of their static schedules."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from dape_jax.errors import UserError
from experiments import command
from experiments.kernel_programs import DENSE, MODELS, NAMES
from experiments.static_schedule import MXU_ROWS_PER_CYCLE, Schedule, ScheduleError, Step, Work, parse, step

_ROOT = Path(__file__).parent.parent
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


def compile_order(order: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Schedule]]:
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
    return {unit: float(each.sum()) / positions for unit, each in _needed(work, capacity).items()}


def pieces(work: Work, capacity: dict[str, int], positions: float) -> list[dict[str, Any]]:
    """Of each piece, in order, the cycles a position that it takes, and those that its own largest unit needs.

    A kernel whose products, tables and softmax are separate pieces cannot come below the sum of these bounds, however
    dense each piece is.
    """
    needed = _needed(work, capacity)
    bounds = np.stack(list(needed.values())) / positions
    largest = bounds.argmax(axis=0)
    bundles = work.pieces[:, work.columns.index("bundles")] / positions
    return [
        {"bundles": float(bundles[n]), "bound": float(bounds[unit, n]), "unit": list(needed)[unit]}
        for n, unit in enumerate(largest)
    ]


def _needed(work: Work, capacity: dict[str, int]) -> dict[str, np.ndarray]:
    """Cycles of each unit in each piece."""

    def column(name: str) -> np.ndarray:
        return work.pieces[:, work.columns.index(name)]

    needed = {"MXU": column("rows") / MXU_ROWS_PER_CYCLE}
    for name, unit in UNITS.items():
        spilled = column(SPILLS[name]) if name in SPILLS else 0.0
        needed[unit] = (column(name) - spilled) / capacity[name]
    return needed


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
    stretches = pieces(interior, schedule.capacity, positions)
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
        "phased_bound": sum(piece["bound"] for piece in stretches),
        "pieces": stretches,
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


def calibrate(target: str, schedule: Schedule) -> dict[str, float]:
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
