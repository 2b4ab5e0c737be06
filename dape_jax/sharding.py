"""The device mesh, and the one table from parameter paths to mesh axes.

Parameters themselves carry no sharding. The mesh has the axes ``data`` (replicas) and ``fsdp`` (shards of the
parameters and of the optimiser's moments); the batch is split over both. One device is the mesh 1 x 1.
"""

import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dape_jax.errors import UserError

BATCH_AXES = ("data", "fsdp")

LOGICAL_TO_MESH: dict[str, str | None] = {"embed": "fsdp", "heads": None, "mlp": None, "vocab": None, "layers": None}
"""Which mesh axis splits each logical axis."""

PARAMETER_AXES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"embed/embedding", ("vocab", "embed")),
    (r"blocks/attention/[qkv]/kernel", ("layers", "embed", "heads")),
    (r"blocks/attention/o/kernel", ("layers", "heads", "embed")),
    (r"blocks/mlp_in/kernel", ("layers", "embed", "mlp")),
    (r"blocks/mlp_out/kernel", ("layers", "mlp", "embed")),
    (r"head/kernel", ("embed", "vocab")),
)
"""Logical axes of parameters by path, the first match counts; what matches nothing is replicated."""


def make_mesh(data: int, fsdp: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axes data and fsdp over all devices; ``data`` -1 takes what ``fsdp`` leaves."""
    devices = jax.devices() if devices is None else devices
    if len(devices) % fsdp:
        raise UserError(f"mesh.fsdp={fsdp} does not divide the {len(devices)} devices")
    data = len(devices) // fsdp if data == -1 else data
    if data * fsdp != len(devices):
        raise UserError(f"mesh.data={data} x mesh.fsdp={fsdp} are {data * fsdp} devices; there are {len(devices)}")
    return jax.make_mesh((data, fsdp), BATCH_AXES, axis_types=(AxisType.Auto,) * 2, devices=devices)


def path_string(path: tuple[Any, ...]) -> str:
    """``blocks/attention/q/kernel`` from a pytree key path."""
    return "/".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", key)))) for key in path)


def parameter_sharding(mesh: Mesh, path: tuple[Any, ...], shape: tuple[int, ...]) -> NamedSharding:
    """The sharding of the parameter at ``path``. The optimiser's moments end in the same paths and follow them."""
    name = path_string(path)
    for pattern, logical in PARAMETER_AXES:
        if re.search(rf"(^|/){pattern}$", name):
            axes = [LOGICAL_TO_MESH[axis] for axis in logical]
            for size, axis in zip(shape, axes, strict=True):
                if axis is not None and size % mesh.shape[axis]:
                    raise UserError(
                        f"{name} {shape}: an axis of {size} cannot be split over mesh.{axis}={mesh.shape[axis]}"
                    )
            return NamedSharding(mesh, PartitionSpec(*axes))
    return NamedSharding(mesh, PartitionSpec())


def tree_sharding(mesh: Mesh, tree: Any) -> Any:
    """A tree of shardings for a tree of arrays or shapes that contains parameters."""
    return jax.tree.map_with_path(lambda path, x: parameter_sharding(mesh, path, x.shape), tree)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over all devices."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def put_rows(mesh: Mesh, rows: Any) -> Any:
    """Global arrays, split by rows over all devices, from a tree of this process's rows; processes in any order."""
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(batch_sharding(mesh), x), rows)


def put_batch(mesh: Mesh, batch: Any) -> Any:
    """Global arrays, split by rows over all devices, from a tree of whole batches, which every process holds."""

    def put(x: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(x.shape, batch_sharding(mesh), lambda index: x[index])

    return jax.tree.map(put, batch)
