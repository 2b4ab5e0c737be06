"""The programs that ``kernel_cost`` compiles for a TPU, each in a process of its own: its compiler reads where to dump
its schedule once, when it loads.

python -m experiments.kernel_programs ORDER, a JSON object, prints one JSON object about the kernels compiled.
"""

import json
import math
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dape_jax import Adapt, KerpleLog, UserError, dape_attention
from dape_jax.attention import BlockSizes, compile_for, target, tpu_blocks
from dape_jax.attention.api import check

TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
MODELS = {"125M": (12, 64), "350M": (16, 64), "2.7B": (32, 80), "6.7B": (32, 128)}
"""Heads and head dimension."""

NAMES = {"forward": "dape_attention_forward", "backward": "dape_attention_backward"}
"""Of the kernels, in the dump."""

DENSE = (1024, 1024, 1024)
"""Rows, contraction and columns of the dense product for calibration, in one unrolled step."""


def dape(order: dict[str, Any], device: Any) -> dict[str, Any]:
    """DAPE-Kerple, causal, bfloat16, one sequence; with ``order["backward"]`` all gradients too."""
    heads, head_dim = MODELS[order["model"]]
    bias, adapt = KerpleLog(), Adapt(width=order["width"])
    key = jax.random.key(0)

    def arguments() -> tuple:
        q = jnp.zeros((1, order["length"], heads, head_dim), jnp.bfloat16)
        return (q, q, q, bias.init(key, heads), adapt.init(key, heads, True)), q

    shapes = jax.eval_shape(arguments)
    blocks = None
    if order["block_q"] is not None:
        own = None if order.get("backward_q") is None else BlockSizes(q=order["backward_q"], k=order["backward_k"])
        blocks = BlockSizes(q=order["block_q"], k=order["block_k"], backward=own)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, bias_params: Any, adapt_params: Any) -> jax.Array:
        return dape_attention(
            q, k, v, bias=bias, bias_params=bias_params, adapt=adapt, adapt_params=adapt_params, block_sizes=blocks,
            backend="pallas_tpu",
        )  # fmt: skip

    def both(arrays: tuple, cotangent: jax.Array) -> Any:
        if not order["backward"]:
            return attend(*arrays)
        out, vjp = jax.vjp(attend, *arrays)
        return out, vjp(cotangent)

    with compile_for("tpu", device.device_kind):
        kernels = _compile(both, shapes, device)
        spec, arrays = _checked(shapes[0], bias, adapt)
        plans = tpu_blocks.make_plans(spec, arrays, blocks, target.current())
    plan_of = {
        NAMES["forward"]: plans.saving if order["backward"] else plans.forward,
        NAMES["backward"]: plans.backward,
    }
    tiles, notes = {}, []
    for name, grid in kernels.items():
        if name in plan_of:
            plan = plan_of[name]
            tiles[name] = _tile(plan.block_q, plan.block_k, plan.group)
            steps = plan.q_blocks * plan.k_blocks
            if math.prod(grid) != steps:
                tile = f"tiles of {plan.block_q} x {plan.block_k} make {steps} steps"
                notes.append(f"{name} has a grid of {grid}, where {tile}: is a step one tile?")
    return {"tiles": tiles, "notes": notes}


def _tile(block_q: int | None, block_k: int | None, group: int | None = None) -> dict[str, Any]:
    return {"block_q": block_q, "block_k": block_k, "group": group}


def _checked(arrays: tuple, bias: Any, adapt: Any) -> tuple:
    q, k, v, bias_params, adapt_params = arrays
    held = []

    def trace(*x: Any) -> None:
        held.append(check(*x[:3], bias=bias, bias_params=x[3], adapt=adapt, adapt_params=x[4]))

    jax.eval_shape(trace, q, k, v, bias_params, adapt_params)
    return held[0]


def splash(order: dict[str, Any], device: Any) -> dict[str, Any]:
    """JAX's splash attention, forward, causal: the floor, attention without DAPE. One head a step."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    heads, head_dim = MODELS[order["model"]]
    length = order["length"]
    sizes = kernel.BlockSizes(block_q=order["block_q"], block_kv=order["block_k"])
    mask = masks.MultiHeadMask([masks.CausalMask((length, length)) for _ in range(heads)])
    attend = kernel.make_splash_mha_single_device(mask=mask, block_sizes=sizes)
    x = jax.ShapeDtypeStruct((heads, length, head_dim), jnp.bfloat16)
    kernels = _compile(attend, (x, x, x), device)
    return {"tiles": {name: _tile(order["block_q"], order["block_k"]) for name in kernels}, "notes": []}


def dense(order: dict[str, Any], device: Any) -> dict[str, Any]:
    """A dense bfloat16 product, float32 out, in one step."""
    m, k, n = DENSE

    def kernel(a: Any, b: Any, out: Any) -> None:
        out[...] = jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    product = pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((m, n), jnp.float32), name="dense_product")
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((m, k), (k, n)))
    return {"tiles": {name: _tile(None, None) for name in _compile(product, (a, b), device)}, "notes": []}


def _compile(function: Any, shapes: tuple, device: Any) -> dict[str, tuple[int, ...]]:
    """The names of the Pallas kernels in a compiled program, with their grids."""
    on = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), shapes)
    traced = jax.jit(function).trace(*placed)
    traced.lower().compile()
    return dict(_kernels(traced.jaxpr.jaxpr))


def _kernels(jaxpr: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation.params["name"], tuple(equation.params["grid_mapping"].grid)
            continue
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from _kernels(inner)


PROGRAMS = {"dape": dape, "splash": splash, "dense": dense}


def main() -> None:
    order = json.loads(sys.argv[1])
    device = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[order["target"]]).devices[0]
    try:
        made = PROGRAMS[order["program"]](order, device)
    except UserError as e:
        made = {"refused": str(e)}
    print(json.dumps(made))


if __name__ == "__main__":
    main()
