"""Which machine the kernels are traced for: the one JAX runs on, unless said otherwise."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator

import jax

from dape_jax.errors import UserError, nearest

MIB = 2**20
_SMALL_VMEM = ("TPU v2", "TPU v3", "TPU v4", "TPU v4 lite")
_WIDE_MXU = ("TPU v6 lite", "TPU v6e", "TPU7x")


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
    def vmem_limit(self) -> int:
        """Bytes of VMEM that one TPU kernel may take: 16 MiB is all that older chips have."""
        return 16 * MIB if self.device_kind in _SMALL_VMEM else 64 * MIB

    @property
    def vmem_budget(self) -> int:
        """Bytes that block sizes are chosen for, from an estimate."""
        return 15 * MIB if self.device_kind in _SMALL_VMEM else 48 * MIB

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
    token = _chosen.set(Target(platform, device_kind))
    try:
        yield
    finally:
        _chosen.reset(token)
