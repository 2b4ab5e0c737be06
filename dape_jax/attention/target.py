"""Which machine the kernels are traced for: the one JAX runs on, unless said otherwise."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

import jax

from dape_jax.errors import UserError, nearest

MIB = 2**20
_SMALL_VMEM = ("TPU v2", "TPU v3", "TPU v4", "TPU v4 lite")
_LARGE_VMEM = ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e")
_WIDE_MXU = ("TPU v6 lite", "TPU v6e", "TPU7x")


class Vmem(NamedTuple):
    """Bytes that block sizes are chosen for, from an estimate, and bytes that the compiler may then use."""

    budget: int
    limit: int


@dataclasses.dataclass(frozen=True)
class Target:
    """``platform``: "tpu", "gpu", "cpu", or "interpret", Pallas kernels as JAX operations, on any platform;
    ``device_kind`` as JAX names it."""

    platform: str
    device_kind: str

    @property
    def interpret(self) -> bool:
        return self.platform == "interpret"

    @property
    def vmem(self) -> tuple[Vmem, ...]:
        """What TPU kernels may take: the later ones only where nothing fits the first, so that XLA keeps VMEM for its
        own use. Older chips have 16 MiB, v5p 64 and v5e and v6e 128."""
        if self.device_kind in _SMALL_VMEM:  # a few MiB go to spilled registers, which the estimate does not know
            return Vmem(11 * MIB, 16 * MIB), Vmem(13 * MIB + MIB // 8, 16 * MIB)
        last = Vmem(104 * MIB, 126 * MIB) if self.device_kind in _LARGE_VMEM else Vmem(56 * MIB, 64 * MIB)
        return Vmem(48 * MIB, 64 * MIB), last

    @property
    def mxu(self) -> int:
        """Numbers that one row of the matrix unit takes in, and gives out."""
        return 256 if self.device_kind in _WIDE_MXU else 128


_chosen: contextvars.ContextVar[Target | None] = contextvars.ContextVar("dape_jax_target", default=None)


def current() -> Target:
    """The target of ``compile_for`` if inside one, else JAX's default device."""
    chosen = _chosen.get()
    if chosen is not None:
        return chosen
    return Target(jax.default_backend(), jax.devices()[0].device_kind)


@contextlib.contextmanager
def compile_for(platform: str, device_kind: str = "") -> Iterator[None]:
    """Within the context ``dape_attention`` is traced for another machine than this one.

    Args:
      platform: "tpu" or "gpu", to compile ahead of time on a machine without one; or "interpret", to run the Pallas
        kernels of either as ordinary JAX operations, slowly, for tests. What was traced and cached outside the context
        is not traced again.
      device_kind: such as "TPU v5 lite", as ``jax.Device.device_kind`` has it; decides how much fits on a TPU.
    """
    platforms = ("tpu", "gpu", "interpret")
    if platform not in platforms:
        raise UserError(f"compile_for platform={platform!r} is unknown{nearest(platform, platforms)}")
    is_name = isinstance(device_kind, str) and (platform != "tpu" or device_kind.startswith("TPU") or not device_kind)
    if not is_name:
        raise UserError(
            f"compile_for device_kind={device_kind!r}: a name as JAX has it is needed, such as 'TPU v5 lite'"
        )
    token = _chosen.set(Target(platform, device_kind))
    try:
        yield
    finally:
        _chosen.reset(token)
