"""Data-Adaptive Positional Encoding (DAPE, arXiv 2405.14722) for JAX and Flax.

The parts are usable on their own: ``dape_attention`` and the pure functions in ``biases`` and ``adapt``; the Flax
modules in ``dape_jax.nn``; training in ``dape_jax.training`` and evaluation in ``dape_jax.evaluation``.
"""

from dape_jax.absolute import Learned, Sinusoidal, random_positions
from dape_jax.adapt import Adapt
from dape_jax.attention import BlockSizes, dape_attention
from dape_jax.biases import BIASES, FIRE, ALiBi, Bias, KerpleLog, KerplePower, T5Bias
from dape_jax.errors import UserError
from dape_jax.rotary import RoPE, YaRN, rope

__version__ = "0.1.0"

__all__ = [
    "BIASES", "FIRE", "ALiBi", "Adapt", "Bias", "BlockSizes", "KerpleLog", "KerplePower", "Learned", "RoPE",
    "Sinusoidal", "T5Bias", "UserError", "YaRN", "dape_attention", "random_positions", "rope",
]  # fmt: skip
