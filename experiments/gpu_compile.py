"""The GPU kernels through XLA's compiler and ptxas for an H100, without a GPU and without a driver.

What that needs besides JAX, of JAX's version: ``pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt
nvidia-cuda-nvcc-cu12``, in an environment of its own.
"""

import functools
import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dape_jax import Adapt, BlockSizes, dape_attention
from dape_jax.attention import compile_for
from dape_jax.biases import Bias
from dape_jax.errors import UserError

_TARGET = Path(__file__).with_name("h100.textproto")
_NEEDED = "pip install --no-deps jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12, of JAX's version"


def missing() -> str | None:
    """Which of the packages is not here; None if all are."""
    for package in ("jax_cuda12_plugin", "jax_plugins.xla_cuda12", "nvidia.cuda_nvcc"):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"{package} is not installed ({_NEEDED})"
    return None


@functools.cache
def device() -> Any:
    """An H100 to compile for."""
    why = missing()
    if why is not None:
        raise UserError(why)
    target = _TARGET.read_text()
    return topologies.get_topology_desc("", "cuda", target_config=target, topology="1x1x1").devices[0]


def compiled(
    length: int,
    heads: int,
    head_dim: int,
    bias: Bias | None,
    adapt: Adapt | None,
    *,
    backward: bool = True,
    dtype: Any = jnp.bfloat16,
    batch: int = 1,
    kv_heads: int | None = None,
    block_sizes: BlockSizes | None = None,
    folder: Path | None = None,
    **kwargs: Any,
) -> Any:
    """The compiled attention call, or its output and all gradients; PTX goes to ``folder``."""
    on = NamedSharding(Mesh(np.array([device()]), ("x",)), PartitionSpec())

    def arguments() -> tuple:
        key = jax.random.key(0)
        q, k = (jnp.zeros((batch, length, n, head_dim), dtype) for n in (heads, kv_heads or heads))
        bias_params = {} if bias is None else bias.init(key, heads)
        return (q, k, k, bias_params, {} if adapt is None else adapt.init(key, heads, bias is not None)), q

    shapes = jax.eval_shape(arguments)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), shapes)

    def attend(q: Any, k: Any, v: Any, bias_params: Any, adapt_params: Any) -> jax.Array:
        return dape_attention(
            q, k, v, bias=bias, bias_params=bias_params, adapt=adapt, adapt_params=adapt_params,
            backend="pallas_gpu", block_sizes=block_sizes, **kwargs,
        )  # fmt: skip

    def both(arrays: tuple, cotangent: Any) -> Any:
        if not backward:
            return attend(*arrays)
        out, vjp = jax.vjp(attend, *arrays)
        return out, vjp(cotangent)

    kind = device().device_kind
    # JAX 0.12 asks for the GPU's generation when it lowers, and finds it here.
    abstract = jax.sharding.AbstractDevice(device_kind=kind, num_cores=device().core_count, platform="gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), (jax.sharding.AxisType.Auto,), abstract_device=abstract)
    with compile_for("gpu", kind), jax.sharding.use_abstract_mesh(mesh):
        lowered = jax.jit(both).lower(*shapes)
    return lowered.compile(compiler_options=None if folder is None else {"xla_dump_to": str(folder)})


def registers(folder: Path) -> list[dict[str, Any]]:
    """What ptxas -v says of each attention kernel whose PTX is in ``folder``."""
    found = importlib.util.find_spec("nvidia.cuda_nvcc")
    if found is None or not found.submodule_search_locations:
        raise UserError(f"nvidia.cuda_nvcc is not installed ({_NEEDED})")
    ptxas = Path(found.submodule_search_locations[0]) / "bin" / "ptxas"
    kernels = []
    for path in sorted(folder.glob("*.ptx")):
        text = path.read_text()
        entry = re.search(r"\.entry (dape_attention_\w+)\(.*?\.reqntid (\d+)", text, re.DOTALL)
        if entry is None:
            continue
        line = [str(ptxas), "-v", "-arch=sm_90a", str(path), "-o", str(path.with_suffix(".cubin"))]
        said = subprocess.run(line, capture_output=True, text=True, check=True).stderr
        found = [re.search(f"(\\d+) bytes spill {what}", said) for what in ("stores", "loads")]
        found.append(re.search(r"Used (\d+) registers", said))
        stores, loads, used = (int(number[1]) for number in found if number)
        kernels.append({
            "kernel": entry[1], "warps": int(entry[2]) // 32, "registers": used,
            "spill_stores": stores, "spill_loads": loads,
        })  # fmt: skip
    return kernels
