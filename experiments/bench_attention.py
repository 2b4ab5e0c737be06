"""Times this project's blockwise attention and eager PyTorch's computation of the same formula in turn.

python -m experiments.bench_attention [--lengths=512,1024,2048,4096] [--torch_python=PATH] [--output=PATH]

DAPE-Kerple, causal, float32, one sequence, 12 heads of 64, D = 32, on CPU; forward alone, and forward with backward.
Each contender runs in a process of its own; its memory is the peak above what the process held after its imports.
PyTorch's forward alone is without autograd. Then the short regime: a whole training step of the quickstart's model at
length 64 with DAPE-Kerple over one with Kerple. PyTorch is optional: without it this project's figures stand alone.
Ratios are of medians; the ones of the best times stand beside them. Relative errors are between the two contenders'
outputs and gradients, the largest: about 1e-6, and 1e-3 where a hidden unit within rounding of zero falls on either
side of LeakyReLU's kink. PyTorch's backward at length 4,096 takes about 12 GiB.
"""

import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from dape_jax.errors import UserError
from dape_jax.evaluation.report import write_json
from experiments import command
from experiments.contenders import HEAD_DIM, HEADS, WIDTH

_LENGTHS = flags.DEFINE_string("lengths", "512,1024,2048,4096", "Comma-separated sequence lengths.")
_SHORT_BATCHES = flags.DEFINE_string(
    "short_batches", "32,64", "Comma-separated batch sizes of the training step at length 64; 'none' leaves it out."
)
_TORCH_PYTHON = flags.DEFINE_string(
    "torch_python", None, "A Python interpreter that has PyTorch; default this one, if it has."
)
_ROUNDS = flags.DEFINE_integer("rounds", 2, "Processes of each contender, in turn.")
_CALLS = flags.DEFINE_integer("calls", 3, "Timed calls in each process, after a first one.")
_OUTPUT = flags.DEFINE_string("output", "runs/bench_attention", "Path without suffix of the JSON and PNG.")
_USAGE = (
    "python -m experiments.bench_attention [--lengths=512,1024,2048,4096] [--short_batches=32,64] "
    "[--torch_python=PATH] [--rounds=2] [--calls=3] [--output=PATH]"
)
_ROOT = Path(__file__).parent.parent
_SHORT_LENGTH, _SHORT_CALLS = 64, 20  # steps of a few hundredths of a second, so there are more of them


def main(_: list[str]) -> None:
    lengths = _sizes("lengths", _LENGTHS.value)
    batches = [] if _SHORT_BATCHES.value == "none" else _sizes("short_batches", _SHORT_BATCHES.value)
    for flag in (_ROUNDS, _CALLS):
        if flag.value < 1:
            raise UserError(f"--{flag.name}={flag.value}: 1 or more is needed")
    output = Path(_OUTPUT.value).expanduser()
    torch_python = _find_torch(_TORCH_PYTHON.value)
    paths = [output.with_name(output.name + suffix) for suffix in (".json", ".png")]
    try:  # before the long work
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output.parent):
            pass
    except OSError as e:
        raise UserError(f"--output={output}: cannot be written: {e.strerror or e}") from e
    machine = _machine()
    report: dict[str, Any] = {
        "measured": f"DAPE-Kerple, causal, float32, 1 sequence, {HEADS} heads of {HEAD_DIM}, D = {WIDTH}",
        "rounds": _ROUNDS.value, "calls": _CALLS.value, "machine": machine,
    }  # fmt: skip
    print(f"{report['measured']}; {machine['threads']} threads, load {machine['load']}, {machine['processor']}")
    contenders = {"dape_jax": sys.executable} | ({"torch": torch_python} if torch_python else {})
    report["attention"] = [_attention(contenders, length, backward) for length in lengths for backward in (False, True)]
    report["training_step"] = [_training_step(batch) for batch in batches]
    report["load_at_the_end"] = _load()
    try:
        write_json(report, paths[0])
        _plot(report, paths[1])
    except OSError as e:
        raise UserError(f"--output={output}: cannot be written: {e.strerror or e}") from e
    print(f"load at the end {report['load_at_the_end']}\n{paths[0]}\n{paths[1]}")


def _sizes(name: str, value: str) -> list[int]:
    sizes = command.integers(name, value)
    for size in sizes:
        if size < 1:
            raise UserError(f"--{name}={value}: {size} is too small; 1 or more is needed")
        if sizes.count(size) > 1:
            raise UserError(f"--{name}={value} names {size} twice")
    return sorted(sizes)


def _find_torch(named: str | None) -> str | None:
    """An interpreter with PyTorch; None if none is named and this one has it not."""
    python = sys.executable if named is None else str(Path(named).expanduser())
    try:
        found = subprocess.run([python, "-c", "import torch"], capture_output=True, text=True, check=False)
    except OSError as e:
        raise UserError(f"--torch_python={named} cannot be run: {e.strerror or e}") from e
    if found.returncode == 0:
        return python
    if named is not None:
        reason = (found.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"--torch_python={named} cannot import torch: {reason}")
    print("PyTorch cannot be imported here: only this project's figures (--torch_python=PATH names another Python)")
    return None


def _attention(contenders: dict[str, str], length: int, backward: bool) -> dict[str, Any]:
    """The figures of all contenders at one length, printed as soon as they are there."""
    orders = {"length": length, "backward": backward, "calls": _CALLS.value, "threads": _threads()}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
    with tempfile.TemporaryDirectory() as folder:
        saved = {name: Path(folder) / f"{name}.npz" for name in contenders}
        for i in range(_ROUNDS.value):
            for name, python in contenders.items():
                order = {**orders, "contender": name, "save": None if i else str(saved[name])}
                runs[name].append(_run(python, order))
        errors = _errors(*saved.values()) if all(path.exists() for path in saved.values()) else {}
    entry: dict[str, Any] = {"length": length, "pass": "forward and backward" if backward else "forward"}
    entry |= {name: _summary(figures) for name, figures in runs.items()}
    ours, torch = entry["dape_jax"], entry.get("torch")
    if "failed" in ours:
        command.stop(f"dape_jax at length {length}, {entry['pass']}: {ours['failed']}")
    line = f"{length:>6} {entry['pass']:<20} dape_jax {_text(ours)}, first call {ours['first_call_s']:.1f} s"
    if torch is not None:
        line += f"; PyTorch {_text(torch)}"
        if "failed" not in torch:
            ratios = {f"time_{kind}": torch[f"{kind}_s"] / ours[f"{kind}_s"] for kind in ("median", "best")}
            ratios["memory"] = ours["above_base_bytes"] / torch["above_base_bytes"]
            entry |= {"ratios": ratios, "relative_errors": errors}
            line += (
                f"; {ratios['time_median']:.1f} times as fast (best {ratios['time_best']:.1f}), "
                f"{ratios['memory']:.3f} of the memory, relative error {max(errors.values()):.1e}"
            )
    print(line, flush=True)
    return entry


def _training_step(batch: int) -> dict[str, Any]:
    order = {"contender": "training_step", "batch": batch, "length": _SHORT_LENGTH,
             "calls": _SHORT_CALLS}  # fmt: skip
    runs = [_run(sys.executable, order) for _ in range(_ROUNDS.value)]
    failed = [run["failed"] for run in runs if "failed" in run]
    if failed:
        command.stop(f"the training step at batch {batch} failed: {failed[0]}")
    times = {name: [t for run in runs for t in run["times_s"][name]] for name in ("dape_kerple", "kerple")}
    medians, best = ({name: f(ts) for name, ts in times.items()} for f in (statistics.median, min))
    ratios = {"median": medians["dape_kerple"] / medians["kerple"], "best": best["dape_kerple"] / best["kerple"]}
    print(
        f"training step, batch {batch} at length {_SHORT_LENGTH}: DAPE-Kerple {1000 * medians['dape_kerple']:.1f} ms, "
        f"Kerple {1000 * medians['kerple']:.1f} ms, ratio {ratios['median']:.2f} (best {ratios['best']:.2f})",
        flush=True,
    )
    return {"batch": batch, "length": _SHORT_LENGTH, "ratios": ratios, "medians_s": medians, "best_s": best,
            "times_s": times}  # fmt: skip


def _run(python: str, order: dict[str, Any]) -> dict[str, Any]:
    """The figures that a contender prints, or {"failed": why}: a long sequence may well exceed the memory."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    line = [python, "-m", "experiments.contenders", json.dumps(order)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=_ROOT, env=environment)
    if done.returncode < 0:
        return {"failed": f"ended by {signal.Signals(-done.returncode).name}, perhaps out of memory"}
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or ["no reason given"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def _summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Median and best over all calls of all processes; memory is the median over the processes."""
    for run in runs:
        if "failed" in run:
            return run
    times = [t for run in runs for t in run["times_s"]]
    return {
        "version": runs[0]["version"],
        "median_s": statistics.median(times),
        "best_s": min(times),
        "times_s": times,
        "first_call_s": statistics.median(run["first_call_s"] for run in runs),
        "above_base_bytes": statistics.median(run["above_base_bytes"] for run in runs),
        "base_bytes": statistics.median(run["base_bytes"] for run in runs),
    }


def _text(figures: dict[str, Any]) -> str:
    if "failed" in figures:
        return f"failed ({figures['failed']})"
    return f"{figures['median_s']:.3f} s (best {figures['best_s']:.3f}), {figures['above_base_bytes'] / 2**20:.0f} MiB"


def _errors(*paths: Path) -> dict[str, float]:
    """Norm of the difference over the norm, of the output and of each gradient.

    That of b2, which is zero but for rounding, and over the norm of b1's.
    """
    (ours, theirs) = (np.load(path) for path in paths) if len(paths) == 2 else ({}, {})
    errors = {}
    for name in ours:
        scale = np.linalg.norm(theirs["b1" if name == "b2" else name].astype(np.float64))
        errors[name] = float(np.linalg.norm(ours[name].astype(np.float64) - theirs[name]) / scale)
    return errors


def _threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _load() -> str:
    return " ".join(f"{x:.2f}" for x in os.getloadavg())


def _machine() -> dict[str, Any]:
    processor = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        names = [x.partition(":")[2].strip() for x in Path("/proc/cpuinfo").read_text().splitlines()
                 if x.startswith("model name")]  # fmt: skip
        processor = names[0] if names else processor
    return {"threads": _threads(), "processor": processor, "python": platform.python_version(), "load": _load()}


def _plot(report: dict[str, Any], path: Path) -> None:
    """Seconds and peak memory over length, both logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for name, label in (("dape_jax", "dape_jax, blockwise"), ("torch", "PyTorch, eager")):
        for kind, style in (("forward", "-"), ("forward and backward", "--")):
            points = _points(report["attention"], name, kind)
            colour = "tab:blue" if name == "dape_jax" else "tab:orange"
            for axis, field, unit in ((axes[0], "median_s", 1), (axes[1], "above_base_bytes", 2**20)):
                if points:
                    axis.plot([n for n, _ in points], [x[field] / unit for _, x in points], style, marker="o",
                              color=colour, label=f"{label}, {kind}")  # fmt: skip
    lengths = sorted({entry["length"] for entry in report["attention"]})
    for axis, label in ((axes[0], "seconds a call (median)"), (axes[1], "peak memory above the base (MiB)")):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(lengths, [str(n) for n in lengths])
        axis.set_xlabel("length (tokens)")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    figure.suptitle(f"{report['measured']}; {report['machine']['threads']} CPU threads", fontsize=10)
    partial = path.with_name(path.name + ".partial")
    figure.savefig(partial, dpi=150, format="png")
    plt.close(figure)
    partial.replace(path)


def _points(entries: Sequence[dict[str, Any]], name: str, kind: str) -> list[tuple[int, dict[str, Any]]]:
    return [(e["length"], e[name]) for e in entries if e["pass"] == kind and "median_s" in e.get(name, {})]


if __name__ == "__main__":
    command.run(main, _USAGE)
