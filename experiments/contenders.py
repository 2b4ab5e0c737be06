"""What experiments.bench_attention runs, one contender a process: python -m experiments.contenders '{JSON}'.

Only the contender's own libraries are imported, so that PyTorch's interpreter needs PyTorch and NumPy alone. One JSON
line of figures is printed at the end.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

HEADS, HEAD_DIM, WIDTH = 12, 64, 32


def main(order: dict[str, Any]) -> None:
    contender = {"dape_jax": _dape_jax, "torch": _torch, "training_step": _training_step}[order["contender"]]
    print(json.dumps(contender(order)))


def _dape_jax(order: dict[str, Any]) -> dict[str, Any]:
    """Blockwise attention of this project under ``jax.jit``."""
    import jax
    import numpy as np

    from dape_jax import Adapt, KerpleLog, dape_attention

    base = _peak()

    def attend(inputs: dict[str, jax.Array]) -> jax.Array:
        return dape_attention(
            *(inputs[name] for name in "qkv"), bias=KerpleLog(), bias_params={name: inputs[name] for name in "pa"},
            adapt=Adapt(width=WIDTH), adapt_params={name: inputs[name] for name in ("w1", "b1", "w2", "b2")},
            backend="blockwise",
        )  # fmt: skip

    def with_gradients(inputs: dict[str, jax.Array], cotangent: jax.Array) -> dict[str, jax.Array]:
        out, vjp = jax.vjp(attend, inputs)
        return {"out": out, **vjp(cotangent)[0]}

    arrays = inputs(order["length"])
    arrays |= {"w1": arrays["w1"][None], "w2": arrays["w2"][None]}
    arrays = jax.tree.map(jax.numpy.asarray, arrays)
    cotangent = arrays.pop("cotangent")
    forward, both = jax.jit(attend), jax.jit(with_gradients)

    def call() -> dict[str, jax.Array]:
        return jax.block_until_ready(both(arrays, cotangent) if order["backward"] else {"out": forward(arrays)})

    times, results = _timed(call, order["calls"])
    peak = _peak()
    results = {name: np.asarray(x).reshape(x.shape[-2:] if name in ("w1", "w2") else x.shape)
               for name, x in results.items()}  # fmt: skip
    return _figures(order, times, base, peak, results) | {"version": f"JAX {jax.__version__}"}


def _torch(order: dict[str, Any]) -> dict[str, Any]:
    """The paper's formula in eager PyTorch, every intermediate an array of its own."""
    import numpy as np
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(order["threads"])
    base = _peak()
    arrays = {name: torch.from_numpy(x) for name, x in inputs(order["length"]).items()}
    cotangent = arrays.pop("cotangent")
    length = order["length"]

    def attend() -> Any:
        q, k, v = (arrays[name].transpose(1, 2) for name in "qkv")
        scores = q @ k.transpose(-1, -2) * HEAD_DIM**-0.5
        positions = torch.arange(length)
        distance = (positions[:, None] - positions[None, :]).abs().float()
        bias = -arrays["p"][:, None, None] * torch.log1p(arrays["a"][:, None, None] * distance)
        bias = bias.expand_as(scores)
        x = torch.cat([scores, bias], dim=1).permute(0, 2, 3, 1)
        x = torch.nn.functional.leaky_relu(x @ arrays["w1"] + arrays["b1"], 0.01) @ arrays["w2"] + arrays["b2"]
        logits = scores + bias + x.permute(0, 3, 1, 2)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        return (torch.softmax(logits.masked_fill(future, float("-inf")), dim=-1) @ v).transpose(1, 2)

    def forward() -> dict[str, Any]:
        with torch.no_grad():
            return {"out": attend()}

    def with_gradients() -> dict[str, Any]:
        for x in arrays.values():
            x.requires_grad_(True).grad = None
        out = attend()
        out.backward(cotangent)
        return {"out": out.detach(), **{name: x.grad for name, x in arrays.items()}}

    times, results = _timed(with_gradients if order["backward"] else forward, order["calls"])
    peak = _peak()
    results = {name: np.asarray(x) for name, x in results.items()}
    return _figures(order, times, base, peak, results) | {"version": f"PyTorch {torch.__version__}"}


def _training_step(order: dict[str, Any]) -> dict[str, Any]:
    """Whole training steps of the quickstart's model, DAPE-Kerple and Kerple in turn: seconds of each."""
    import jax
    import numpy as np

    from configs import quickstart
    from dape_jax import config as config_lib
    from dape_jax import sharding
    from dape_jax.training.objective import NextToken
    from dape_jax.training.optimizer import make_optimizer
    from dape_jax.training.step import compile_step, init_state

    vocab_size = 257
    rng = np.random.default_rng(0)
    mesh = sharding.make_mesh(1, 1, jax.devices()[:1])
    steps, states, times = {}, {}, {"dape_kerple": [], "kerple": []}
    for position in times:
        raw: Any = quickstart.get_config(position)
        raw.data.sequence_length = order["length"]
        raw.training.batch_size = order["batch"]
        config = config_lib.from_mapping(raw)
        model = config_lib.transformer(config, vocab_size, "cpu", sharding.BATCH_AXES)
        optimizer = make_optimizer(config.optimizer, config.training.steps)
        with jax.set_mesh(mesh):
            init, abstract = init_state(model, optimizer, 0, mesh)
            states[position], steps[position] = init(), compile_step(model, NextToken(), optimizer, abstract, mesh)
    tokens = rng.integers(0, vocab_size, (order["batch"], order["length"] + 1)).astype(np.int32)
    rows = jax.device_put(tokens, sharding.batch_sharding(mesh))
    for i in range(order["calls"] + 1):
        for position, step in steps.items():
            started = time.perf_counter()
            with jax.set_mesh(mesh):
                states[position], metrics = jax.block_until_ready(step(states[position], rows, np.int32(i)))
            times[position].append(time.perf_counter() - started)
            assert np.isfinite(metrics["loss"])
    first = {position: seconds.pop(0) for position, seconds in times.items()}
    return {"first_call_s": first, "times_s": times}


def inputs(length: int) -> dict[str, Any]:
    """The same numbers for every contender: q, k, v and cotangent [1, T, H, d], Kerple's p and a [H], the network."""
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (1, length, HEADS, HEAD_DIM)
    arrays = {name: rng.standard_normal(shape, np.float32) for name in ("q", "k", "v", "cotangent")}
    arrays |= {"p": rng.uniform(0.01, 2, HEADS), "a": rng.uniform(0.01, 1, HEADS)}
    shapes = {"w1": (2 * HEADS, WIDTH), "b1": (WIDTH,), "w2": (WIDTH, HEADS), "b2": (HEADS,)}
    for name, shape in shapes.items():
        bound = (2 * HEADS if name.endswith("1") else WIDTH) ** -0.5
        arrays[name] = rng.uniform(-bound, bound, shape)
    return {name: x.astype(np.float32) for name, x in arrays.items()}


def _timed(call: Callable[[], dict[str, Any]], calls: int) -> tuple[list[float], dict[str, Any]]:
    """Seconds of a first call and of ``calls`` more, and the last result."""
    times, results = [], {}
    for _ in range(calls + 1):
        results = {}  # the one before is not held while the next is computed
        started = time.perf_counter()
        results = call()
        times.append(time.perf_counter() - started)
    return times, results


def _peak() -> int:
    """Bytes: the most that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _figures(
    order: dict[str, Any], times: list[float], base: int, peak: int, results: dict[str, Any]
) -> dict[str, Any]:
    if order["save"]:
        import numpy as np

        np.savez(order["save"], **results)
    return {"first_call_s": times[0], "times_s": times[1:], "base_bytes": base, "above_base_bytes": peak - base}


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
