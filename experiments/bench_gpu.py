"""The GPU kernels on a GPU: correctness first, then times, as ratios within one run. Fits ten minutes.

python -m experiments.bench_gpu [--lengths=512,1024,2048,4096,8192,16384] [--minutes=9.5] [--output=PATH]
    [--table=dape_jax/attention/gpu_tuned.json]

Correctness: outputs and every gradient against the float32 reference on the device, which receives the same rounded
q, k, v. Times: DAPE-Kerple, causal, bfloat16, one sequence, 12 heads of 64, D = 32, forward alone and forward with
backward, of pallas_gpu, of blockwise, of the formula in eager PyTorch and under torch.compile where PyTorch with CUDA
can be imported (float32 logits and network, TF32 products), and, as the floor, of cuDNN's flash attention without bias
or network. Then each kernel of pallas_gpu in other tiles; --table takes the best of each, for the kernels to choose
it by themselves. What does not fit the time is left out and named. The JSON is rewritten after every figure. Without a
GPU nothing is timed: --correctness_only --interpret runs the first part on CPU.
"""

import contextlib
import functools
import itertools
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch shares the device

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from dape_jax import FIRE, Adapt, ALiBi, KerpleLog, KerplePower, T5Bias, dape_attention
from dape_jax.attention import compile_for, gpu, target, tuned
from dape_jax.errors import UserError
from dape_jax.evaluation.report import write_json
from experiments import command, tuned_table
from experiments.contenders import HEAD_DIM, HEADS, WIDTH, inputs

_LENGTHS = flags.DEFINE_string("lengths", "512,1024,2048,4096,8192,16384", "Comma-separated sequence lengths.")
_MINUTES = flags.DEFINE_float("minutes", 9.5, "After so many minutes nothing more is started.")
_CASES = flags.DEFINE_integer("cases", 100, "How many of the cases of correctness, at most.")
_CORRECTNESS_ONLY = flags.DEFINE_bool("correctness_only", False, "No times.")
_INTERPRET = flags.DEFINE_bool("interpret", False, "Kernels as JAX operations, on any device; with --correctness_only.")
_OUTPUT = flags.DEFINE_string("output", "runs/bench_gpu.json", "The JSON.")
_TABLE = flags.DEFINE_string("table", None, "A table of tiles to put the best ones into.")
_USAGE = (
    "python -m experiments.bench_gpu [--lengths=512,1024,2048,4096,8192,16384] [--minutes=9.5] [--correctness_only "
    "[--interpret]] [--output=PATH] [--table=PATH]"
)
_BOUNDS = {"float32": (1e-5, 5e-5), "bfloat16": (1e-2, 2e-2)}  # outputs, gradients
_TILES = [gpu.Tile(16, 16, 8), gpu.Tile(16, 16, 4), gpu.Tile(16, 16, 8, 2), gpu.Tile(16, 32, 8), gpu.Tile(32, 16, 8)]
_TILES_AT = 2048
_SHARES = {"correctness": 0.4, "times": 0.75, "tiles": 1.0}  # of the time, when nothing more of a part is started


def _cases() -> list[tuple[str, Any, Any, str, dict[str, Any], dict[str, Any]]]:
    """(name, bias, network, dtype, shape, arguments), the most telling first."""
    length, rng = 150, np.random.default_rng(0)
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (2, length)), axis=1), jnp.int32)
    positions = jnp.asarray(rng.integers(0, 9000, (2, length)), jnp.int32)
    valid = jnp.asarray(np.arange(length)[None] < np.array([[length], [70]]))
    kerple, dape = KerpleLog(), Adapt(width=WIDTH)
    model = {"heads": HEADS, "kv_heads": HEADS, "d": HEAD_DIM}
    small = {"heads": 4, "kv_heads": 2, "d": 80}
    cases = [
        ("125M", kerple, dape, "bfloat16", model, {}),
        ("350M", kerple, dape, "bfloat16", {**model, "heads": 16, "kv_heads": 16}, {}),
        ("125M", kerple, dape, "float32", model, {}),
        ("plain", kerple, None, "bfloat16", model, {}),
    ]
    cases += [("bias", bias, dape, "bfloat16", model, {}) for bias in (ALiBi(), KerplePower(), T5Bias(), FIRE(), None)]
    variants = ("concat", "add_residual", "bias_only")
    cases += [("variant", kerple, Adapt(name, width=8), "bfloat16", small, {}) for name in variants]
    cases += [
        ("each head's network", FIRE(), Adapt(per_head=True), "bfloat16", small, {}),
        ("bidirectional", T5Bias(), None, "bfloat16", small, {"causal": False}),
        ("segments", kerple, dape, "bfloat16", small, {"q_segment_ids": ids, "k_segment_ids": ids}),
        ("padding", kerple, dape, "bfloat16", small, {"k_valid": valid}),
        ("positions", kerple, dape, "bfloat16", small, {"q_positions": positions, "k_positions": positions}),
        ("fewer queries", kerple, dape, "bfloat16", {**small, "q_length": 37}, {}),
        ("bias", FIRE(), Adapt(width=8), "float32", small, {}),
        ("each head's network", T5Bias(), Adapt(width=8, per_head=True), "float32", small, {}),
        ("convolution, padding", kerple, Adapt(width=WIDTH, kernel_width=3), "bfloat16", model, {"k_valid": valid}),
        ("convolution", kerple, Adapt("concat", 8, True, 3), "float32", small, {"causal": False}),
    ]
    # And every bias with every kind of network, as the tests of all backends have them.
    biases = (None, ALiBi(), kerple, KerplePower(), T5Bias(), FIRE(width=8, init_length=16.0))
    networks = (
        None, Adapt(width=8), Adapt("concat", width=8), Adapt("add_residual", width=4), Adapt("bias_only", width=8),
        Adapt(width=4, per_head=True), Adapt(width=16, kernel_width=3), Adapt("concat", width=4, kernel_width=5),
        Adapt("add_residual", width=4, kernel_width=3), Adapt(width=4, per_head=True, kernel_width=3),
    )  # fmt: skip
    every = itertools.product(biases, networks)
    cases += [("small", bias, adapt, "float32", {**small, "d": 16}, {}) for bias, adapt in every
              if bias is not None or adapt is None or adapt.variant != "bias_only"]  # fmt: skip
    return [(name, bias, adapt, dtype, {"length": length, "q_length": length, **shape}, kwargs)
            for name, bias, adapt, dtype, shape, kwargs in cases]  # fmt: skip


def main(_: list[str]) -> None:
    lengths = command.integers("lengths", _LENGTHS.value)
    device = jax.devices()[0]
    if _INTERPRET.value and not _CORRECTNESS_ONLY.value:
        raise UserError("--interpret: interpreted kernels have no times worth having; add --correctness_only")
    if device.platform != "gpu" and not _INTERPRET.value:
        raise UserError(f"JAX runs on {device.platform}; a GPU is needed, or --correctness_only --interpret")
    for flag in (_CASES, _MINUTES):
        if not flag.value > 0:  # nor NaN
            raise UserError(f"--{flag.name}={flag.value}: more than 0 is needed")
    if min(lengths) < 1:
        raise UserError(f"--lengths={_LENGTHS.value}: {min(lengths)} is too small; 1 or more is needed")
    table = None if _TABLE.value is None else command.writable("table", _TABLE.value)
    old = [] if table is None else tuned_table.read("table", table)
    path = command.writable("output", _OUTPUT.value)
    report: dict[str, Any] = {
        "device": device.device_kind, "jax": jax.__version__, "python": platform.python_version(),
        "measured": f"DAPE-Kerple, causal, bfloat16, 1 sequence, {HEADS} heads of {HEAD_DIM}, D = {WIDTH}",
        "correctness": [], "times": [], "tiles": [], "left_out": [],
    }  # fmt: skip
    print(f"{report['device']}, JAX {report['jax']}, Python {report['python']}")
    start, seconds = time.monotonic(), 60 * _MINUTES.value
    until = {part: start + seconds * (1.0 if _CORRECTNESS_ONLY.value else share) for part, share in _SHARES.items()}

    def step(what: str, into: str, compute: Callable[[], dict[str, Any]]) -> None:
        if time.monotonic() > until[into]:
            report["left_out"].append(what)
            print(f"left out, no time: {what}")
        else:
            entry = {"what": what, **compute()}
            report[into].append(entry)
            print(
                f"{what}: "
                + ", ".join(
                    f"{key} {_text(value)}" for key, value in entry.items() if key not in ("what", "errors", "entry")
                )
            )
        write_json(report, path)

    for name, bias, adapt, dtype, shape, kwargs in _cases()[: _CASES.value]:
        what = f"{name} {bias} {adapt} {dtype} {sorted(kwargs)}"
        step(what, "correctness", functools.partial(_correctness, bias, adapt, dtype, shape, kwargs))
    wrong = [entry["what"] for entry in report["correctness"] if not entry["within_bounds"]]
    if not _CORRECTNESS_ONLY.value:
        for length in lengths:
            for backward in (False, True):
                what = f"{length} tokens, {'forward and backward' if backward else 'forward'}"
                step(what, "times", functools.partial(_times, length, backward))
        for kernel, tile in itertools.product(gpu.KERNELS, _TILES):
            what = f"{kernel} in tiles of {tile.q} x {tile.k}, {tile.warps} warps, {tile.stages} stages"
            step(f"{what}, {_TILES_AT} tokens", "tiles", functools.partial(_tile_seconds, kernel, tile))
    print(path)
    if wrong:
        command.stop(f"{len(wrong)} cases beyond their bounds: {'; '.join(wrong)}")
    if table is not None:
        best = tuned_table.best_of_each_kernel(report["tiles"], f"seconds, jax {jax.__version__}")
        if best:
            write_json({"tiles": tuned_table.merged(old, best)}, table)
        print(table if best else f"{table}: left as it was, since no tile was timed")


def _text(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _attend(backend: str, bias: Any, adapt: Any, arrays: tuple, **kwargs: Any) -> jax.Array:
    q, k, v, bias_params, adapt_params = arrays
    return dape_attention(
        q, k, v, bias=bias, bias_params=bias_params, adapt=adapt, adapt_params=adapt_params, backend=backend, **kwargs
    )


def _with_gradients(attend: Callable[[Any], jax.Array]) -> Callable:
    def both(arrays: Any, cotangent: jax.Array) -> Any:
        out, vjp = jax.vjp(attend, arrays)
        return out, vjp(cotangent)[0]

    return jax.jit(both)


def _correctness(bias: Any, adapt: Any, dtype: str, shape: dict[str, Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    rng, heads = np.random.default_rng(0), shape["heads"]
    q, cotangent = (rng.standard_normal((2, shape["q_length"], heads, shape["d"])) for _ in range(2))
    k, v = (rng.standard_normal((2, shape["length"], shape["kv_heads"], shape["d"])) for _ in range(2))
    q, k, v, cotangent = (jnp.asarray(x, dtype) for x in (q, k, v, cotangent))
    key = jax.random.key(0)
    bias_params = {} if bias is None else bias.init(key, heads)
    arrays = (q, k, v, bias_params, {} if adapt is None else adapt.init(key, heads, bias is not None))
    with compile_for("interpret") if _INTERPRET.value else contextlib.nullcontext():
        got = _with_gradients(functools.partial(_attend, "pallas_gpu", bias, adapt, **kwargs))(arrays, cotangent)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (arrays, cotangent))
    want = _with_gradients(functools.partial(_attend, "reference", bias, adapt, **kwargs))(*exact)
    errors, within = {}, True
    for (at, w), g in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        w, g = np.asarray(w, np.float64), np.asarray(g, np.float64)
        name, size = jax.tree_util.keystr(at), np.linalg.norm(w)
        if ("b2" in name and "[4]" in name) or size < 1e-5 * w.size**0.5:
            continue  # zero but for rounding
        bound = _BOUNDS[dtype][name != "[0]"]
        errors[name] = float(np.linalg.norm(g - w) / size)
        within = within and errors[name] <= (max(bound, 2e-4) if "'c'" in name else bound)  # one number, large sums
    worst = max(errors, key=lambda name: errors[name])
    return {"within_bounds": bool(within), "output": errors["[0]"], "worst": worst, "worst_error": errors[worst],
            "errors": errors}  # fmt: skip


def _seconds(call: Callable[[], Any], ready: Callable[[Any], Any]) -> float:
    """Median of several groups of calls, the first of them left out; a group takes about a tenth of a second."""
    ready(call())
    started = time.perf_counter()
    ready(call())
    count = max(1, min(50, int(0.1 / max(time.perf_counter() - started, 1e-6))))
    times = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(count - 1):
            call()
        ready(call())
        times.append((time.perf_counter() - started) / count)
    return statistics.median(times)


def _arrays(length: int) -> tuple[dict[str, Any], Any]:
    arrays = {name: jnp.asarray(x) for name, x in inputs(length).items()}
    arrays |= {name: arrays[name].astype(jnp.bfloat16) for name in ("q", "k", "v", "cotangent")}
    return arrays, arrays.pop("cotangent")


def _jax_call(backend: str, length: int, backward: bool) -> Callable[[], Any]:
    """The output, or the output and every gradient. Traced when it is first called."""
    arrays, cotangent = _arrays(length)

    def attend(x: dict[str, Any]) -> jax.Array:
        if backend == "cudnn":
            return jax.nn.dot_product_attention(x["q"], x["k"], x["v"], is_causal=True, implementation="cudnn")
        network = {"w1": x["w1"][None], "b1": x["b1"], "w2": x["w2"][None], "b2": x["b2"]}
        packed = (x["q"], x["k"], x["v"], {"p": x["p"], "a": x["a"]}, network)
        return _attend(backend, KerpleLog(), Adapt(width=WIDTH), packed)

    if backend == "cudnn":
        arrays = {name: arrays[name] for name in "qkv"}
    forward, both = jax.jit(attend), _with_gradients(attend)
    return lambda: both(arrays, cotangent) if backward else forward(arrays)


def _jax_seconds(backend: str, length: int, backward: bool) -> float:
    return _seconds(_jax_call(backend, length, backward), jax.block_until_ready)


def _torch_seconds(compiled: bool, length: int, backward: bool) -> float:
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_float32_matmul_precision("high")
    arrays = {name: torch.from_numpy(x).cuda() for name, x in inputs(length).items()}
    arrays |= {name: arrays[name].bfloat16() for name in ("q", "k", "v", "cotangent")}
    cotangent = arrays.pop("cotangent")

    def attend(x: dict[str, Any]) -> Any:
        q, k, v = (x[name].transpose(1, 2) for name in "qkv")
        scores = (q @ k.transpose(-1, -2)).float() * HEAD_DIM**-0.5
        positions = torch.arange(length, device="cuda")
        distance = (positions[:, None] - positions[None, :]).abs().float()
        bias = (-x["p"][:, None, None] * torch.log1p(x["a"][:, None, None] * distance)).expand_as(scores)
        y = torch.cat([scores, bias], dim=1).permute(0, 2, 3, 1)
        y = torch.nn.functional.leaky_relu(y @ x["w1"] + x["b1"], 0.01) @ x["w2"] + x["b2"]
        future = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)
        logits = (scores + bias + y.permute(0, 3, 1, 2)).masked_fill(future, float("-inf"))
        return (torch.softmax(logits, dim=-1).bfloat16() @ v).transpose(1, 2)

    run = torch.compile(attend) if compiled else attend

    def call() -> None:
        if not backward:
            with torch.no_grad():
                run(arrays)
            return
        for x in arrays.values():
            x.requires_grad_(True).grad = None
        run(arrays).backward(cotangent)

    try:
        return _seconds(call, lambda _: torch.cuda.synchronize())
    finally:
        arrays.clear()
        torch.cuda.empty_cache()


def _torch() -> bool:
    try:
        import torch  # pyright: ignore[reportMissingImports]
    except ImportError:
        return False
    return torch.cuda.is_available()


def _times(length: int, backward: bool) -> dict[str, Any]:
    """Seconds of each contender and ratios of theirs to pallas_gpu's; why, for one that failed."""
    contenders: dict[str, Callable[[int, bool], float]] = {
        name: functools.partial(_jax_seconds, name) for name in ("pallas_gpu", "blockwise", "cudnn")
    }
    if _torch():
        contenders |= {"torch": functools.partial(_torch_seconds, False),
                       "torch.compile": functools.partial(_torch_seconds, True)}  # fmt: skip
    seconds: dict[str, Any] = {}
    for name, measure in contenders.items():
        try:
            seconds[f"{name}_s"] = measure(length, backward)
        except Exception as e:  # a long sequence may well exceed the memory of some of them
            seconds[f"{name}_failed"] = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}"
    ours = seconds.get("pallas_gpu_s")
    ratios = {f"{name}_over_ours": seconds[f"{name}_s"] / ours for name in contenders
              if ours and name != "pallas_gpu" and f"{name}_s" in seconds}  # fmt: skip
    return {**seconds, **ratios}


def _entry(kernel: str, tile: gpu.Tile) -> dict[str, Any]:
    sizes = {"block_q": tile.q, "block_k": tile.k, "warps": tile.warps, "stages": tile.stages}
    return tuned_table.entry(target.current().device_kind, kernel, (HEADS, HEAD_DIM), WIDTH, _TILES_AT, sizes)


def _tile_seconds(kernel: str, tile: gpu.Tile) -> dict[str, Any]:
    """With one kernel in this tile and the others in their usual ones: of the forward alone, or of both passes."""
    entry, call = _entry(kernel, tile), functools.partial(_jax_call, "pallas_gpu", _TILES_AT, kernel != "forward")
    try:
        with tuned.using("gpu", []):
            usual = call()()
        with tuned.using("gpu", [entry]):
            tried = call()
            got, seconds = tried(), _seconds(tried, jax.block_until_ready)
    except Exception as e:  # more shared memory than there is
        return {"entry": entry, "failed": f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}"}
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(usual), strict=True)
    difference = max(_difference(a, b) for a, b in pairs)
    if not difference < 2 * _BOUNDS["bfloat16"][1]:
        return {"entry": entry, "failed": f"{difference:.2g} away from what the usual tiles give"}
    return {"entry": entry, "seconds": seconds, "difference": difference}


def _difference(got: jax.Array, usual: jax.Array) -> float:
    """Norm of the difference, relative unless what is usual is zero."""
    a, b = np.asarray(got, np.float64), np.asarray(usual, np.float64)
    return float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1.0))


if __name__ == "__main__":
    command.run(main, _USAGE)
