"""Additive position biases B[h, i, j], as pure functions of one head's parameters and two positions.

Each bias is a small frozen dataclass: its fields are the hyper-parameters, its ``value`` is the formula for one
head, elementwise in the positions. ``bias_values`` and ``bias_table`` map it over heads. There is no cache and no
length: what is asked for at distance 100,000 is computed at distance 100,000.

Positions are int32 and differences are taken before any conversion to floating point, so that nothing aliases.
The distance is |i - j|: causal attention only uses i >= j, and bidirectional attention treats both sides alike
(this project's choice, T5 included).

Sources: ALiBi arXiv 2108.12409; Kerple arXiv 2205.09921; T5 arXiv 1910.10683; FIRE arXiv 2310.04418.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from dape_jax.errors import UserError, nearest

Params = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Bias:
    """Base of all biases. Instances are hashable and carry hyper-parameters only, never arrays.

    Attributes:
      distance_only: whether the value depends on |i - j| alone, so that ``bias_table`` exists.
      steep: whether values grow with the distance or with a power of it. Gradients of parameters are then small
        differences of very large terms, which allow of no rounding to bfloat16 on the way.
      shared: names of parameters that all heads of a layer share; every other one has a leading head axis.
      bounds: smallest and largest permitted value of a parameter. ``value`` never reads one beyond, and the training
        loop projects parameters onto the bounds after each update.
    """

    distance_only: ClassVar[bool] = True
    steep: ClassVar[bool] = False
    shared: ClassVar[frozenset[str]] = frozenset()
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}

    def init(self, key: jax.Array, num_heads: int) -> dict[str, jax.Array]:
        """Returns fresh float32 trainable parameters for ``num_heads`` heads."""
        del key, num_heads
        return {}

    def constants(self, num_heads: int) -> dict[str, np.ndarray]:
        """Returns what ``value`` reads besides the trainable parameters, with a leading head axis."""
        del num_heads
        return {}

    def value(self, params: Params, q_position: jax.Array, k_position: jax.Array) -> jax.Array:
        """B at one head: ``params`` without a head axis, int32 positions of one broadcastable shape."""
        raise NotImplementedError


def _distance(q_position: jax.Array, k_position: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return jnp.abs(q_position - k_position).astype(dtype)


def _within(x: jax.Array, bounds: tuple[float, float]) -> jax.Array:
    """x moved into its bounds, with the gradient of x, so that a parameter at a bound can still leave it."""
    return x + jax.lax.stop_gradient(jnp.clip(x, *bounds) - x)


def alibi_slopes(num_heads: int) -> np.ndarray:
    """The published ALiBi slopes, float64 [num_heads].

    2^(-8k/n) for a power of two; otherwise those of the largest power of two m below, followed by the 1st, 3rd,
    5th ... slopes of the list for 2m, in that order: with 12 heads they jump up again at the ninth. DAPE's network
    is indexed by head, so the order matters.
    """

    def power_of_two(n: int) -> list[float]:
        return [2.0 ** (-8.0 * k / n) for k in range(1, n + 1)]

    m = 2 ** int(math.log2(num_heads))
    return np.asarray(power_of_two(m) + power_of_two(2 * m)[::2][: num_heads - m])


@dataclasses.dataclass(frozen=True)
class ALiBi(Bias):
    """``-slope_h |i - j|``, the true distance. Without parameters; pass ``{"slope": [H]}`` to override the slopes.

    The usual shortcut ``slope * j`` is not used: the DAPE network is not invariant to a constant along a row.
    """

    steep: ClassVar[bool] = True

    def constants(self, num_heads: int) -> dict[str, np.ndarray]:
        return {"slope": alibi_slopes(num_heads)}

    def value(self, params: Params, q_position: jax.Array, k_position: jax.Array) -> jax.Array:
        slope = params["slope"]
        return -slope * _distance(q_position, k_position, slope.dtype)


@dataclasses.dataclass(frozen=True)
class KerpleLog(Bias):
    """``-p log(1 + a |i - j|)``, p ~ U(0, 2) and a ~ U(0, 1) for each head, both kept at 0.01 or more."""

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"p": (0.01, math.inf), "a": (0.01, math.inf)}

    def init(self, key: jax.Array, num_heads: int) -> dict[str, jax.Array]:
        p_key, a_key = jax.random.split(key)
        p = jax.random.uniform(p_key, (num_heads,), jnp.float32, 0.0, 2.0)
        a = jax.random.uniform(a_key, (num_heads,), jnp.float32, 0.0, 1.0)
        return {"p": jnp.maximum(p, 0.01), "a": jnp.maximum(a, 0.01)}

    def value(self, params: Params, q_position: jax.Array, k_position: jax.Array) -> jax.Array:
        p, a = (_within(params[name], self.bounds[name]) for name in ("p", "a"))
        return -p * jnp.log1p(a * _distance(q_position, k_position, p.dtype))


@dataclasses.dataclass(frozen=True)
class KerplePower(Bias):
    """``-p |i - j|^a``, p ~ U(0, 1) and a ~ U(0, 2) for each head, both kept at 0.01 or more and a at 2 or less.

    The ranges are those of the official Kerple code, which calls this p bias_a and this a bias_p.
    """

    steep: ClassVar[bool] = True

    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {"p": (0.01, math.inf), "a": (0.01, 2.0)}

    def init(self, key: jax.Array, num_heads: int) -> dict[str, jax.Array]:
        p_key, a_key = jax.random.split(key)
        p = jax.random.uniform(p_key, (num_heads,), jnp.float32, 0.0, 1.0)
        a = jax.random.uniform(a_key, (num_heads,), jnp.float32, 0.0, 2.0)
        return {"p": jnp.maximum(p, 0.01), "a": jnp.maximum(a, 0.01)}

    def value(self, params: Params, q_position: jax.Array, k_position: jax.Array) -> jax.Array:
        p, a = (_within(params[name], self.bounds[name]) for name in ("p", "a"))
        distance = _distance(q_position, k_position, p.dtype)
        # At distance 0 the derivative with respect to a would be 0 log 0.
        power = jnp.exp(a * jnp.log(jnp.maximum(distance, 1.0)))
        return jnp.where(distance == 0.0, 0.0, -p * power)


def t5_bucket(distance: jax.Array, num_buckets: int = 32, max_distance: int = 128) -> jax.Array:
    """T5's bucket of an int32 distance >= 0: exact below num_buckets / 2, then logarithmic up to max_distance."""
    exact = num_buckets // 2
    # The logarithm of 0 is never taken; distances below `exact` use the first branch.
    ratio = jnp.log(jnp.maximum(distance, exact).astype(jnp.float32) / exact) / math.log(max_distance / exact)
    far = exact + (ratio * (num_buckets - exact)).astype(jnp.int32)
    return jnp.where(distance < exact, distance, jnp.minimum(far, num_buckets - 1))


@dataclasses.dataclass(frozen=True)
class T5Bias(Bias):
    """A learned number for each head and distance bucket, initialised N(0, 0.02). Parameter ``table`` [H, buckets]."""

    num_buckets: int = 32
    max_distance: int = 128

    def init(self, key: jax.Array, num_heads: int) -> dict[str, jax.Array]:
        return {"table": 0.02 * jax.random.normal(key, (num_heads, self.num_buckets), jnp.float32)}

    def value(self, params: Params, q_position: jax.Array, k_position: jax.Array) -> jax.Array:
        table = params["table"]
        bucket = t5_bucket(jnp.abs(q_position - k_position), self.num_buckets, self.max_distance)
        # A product with one-hot columns instead of a gather: its gradient is a product too, not a scatter.
        one_hot = jax.nn.one_hot(bucket, self.num_buckets, dtype=table.dtype, axis=0)
        return jnp.tensordot(table, one_hot, axes=1, precision=jax.lax.Precision.HIGHEST)


@dataclasses.dataclass(frozen=True)
class FIRE(Bias):
    """``f(psi(|i - j|) / (psi(max(L, i, j)) + 1e-6))`` with psi(x) = log(|c| x + 1), L = |L_multiplier init_length|.

    f is a network 1 -> width -> heads; its hidden layer, c and L_multiplier are shared by the heads of a layer.
    max(L, i, j) is the paper's max(L, i) under a causal mask, and symmetric without one (this project's choice).

    Fields:
      width: hidden units of f.
      init_length: L at initialisation, in tokens (usually the training length).
      activation: "relu" (FIRE's own), or "leaky_relu" with slope 0.01 as the official DAPE code uses under DAPE.

    Parameters: c, L_multiplier [], w1, b1 [width], w2 [H, width], b2 [H].
    """

    width: int = 32
    init_length: float = 512.0
    activation: str = "relu"
    distance_only: ClassVar[bool] = False
    shared: ClassVar[frozenset[str]] = frozenset({"c", "L_multiplier", "w1", "b1"})

    def __post_init__(self):
        if self.activation not in ("relu", "leaky_relu"):
            raise UserError(f"FIRE activation={self.activation!r}{nearest(self.activation, ('relu', 'leaky_relu'))}")

    def init(self, key: jax.Array, num_heads: int) -> dict[str, jax.Array]:
        keys = jax.random.split(key, 4)

        def uniform(key: jax.Array, shape: tuple[int, ...], fan_in: int) -> jax.Array:
            bound = fan_in**-0.5
            return jax.random.uniform(key, shape, jnp.float32, -bound, bound)

        return {
            "c": jnp.asarray(0.1, jnp.float32),
            "L_multiplier": jnp.asarray(1.0, jnp.float32),
            "w1": uniform(keys[0], (self.width,), 1),
            "b1": uniform(keys[1], (self.width,), 1),
            "w2": uniform(keys[2], (num_heads, self.width), self.width),
            "b2": uniform(keys[3], (num_heads,), self.width),
        }

    def value(self, params: Params, q_position: jax.Array, k_position: jax.Array) -> jax.Array:
        c = jnp.abs(params["c"])
        dtype = c.dtype
        threshold = jnp.abs(params["L_multiplier"] * self.init_length)
        farthest = jnp.maximum(q_position, k_position).astype(dtype)
        distance = _distance(q_position, k_position, dtype)
        u = jnp.log1p(c * distance) / (jnp.log1p(c * jnp.maximum(threshold, farthest)) + 1e-6)
        over = (...,) + (None,) * u.ndim
        hidden = params["w1"][over] * u[None] + params["b1"][over]
        hidden = jax.nn.relu(hidden) if self.activation == "relu" else jax.nn.leaky_relu(hidden, 0.01)
        return jnp.tensordot(params["w2"], hidden, axes=1, precision=jax.lax.Precision.HIGHEST) + params["b2"]


BIASES: dict[str, type[Bias]] = {
    "alibi": ALiBi,
    "kerple": KerpleLog,
    "kerple_power": KerplePower,
    "t5": T5Bias,
    "fire": FIRE,
}
"""Every additive bias by its configuration name. NoPE is the absence of one: ``None`` wherever a bias is taken."""


def bias_values(
    bias: Bias,
    params: Params,
    num_heads: int,
    q_positions: jax.Array,
    k_positions: jax.Array,
    dtype: jnp.dtype = jnp.float32,
) -> jax.Array:
    """The bias of every head for every pair of positions.

    Args:
      bias: the formula.
      params: its parameters for all heads, as ``bias.init`` returns them.
      num_heads: H.
      q_positions: int32 [..., Tq].
      k_positions: int32 [..., Tk], the same leading shape.
      dtype: of the arithmetic and of the result.

    Returns:
      [H, ..., Tq, Tk]
    """
    return _over_heads(bias, params, num_heads, q_positions[..., :, None], k_positions[..., None, :], dtype)


def bias_table(
    bias: Bias, params: Params, num_heads: int, distances: jax.Array, dtype: jnp.dtype = jnp.float32
) -> jax.Array:
    """The bias of every head at int32 ``distances`` [n] >= 0, as [H, n]. Refuses a bias that needs both positions."""
    if not bias.distance_only:
        raise UserError(f"bias {type(bias).__name__} is not a function of distance alone; use bias_values")
    return _over_heads(bias, params, num_heads, distances, jnp.zeros_like(distances), dtype)


def _over_heads(
    bias: Bias, params: Params, num_heads: int, q_positions: jax.Array, k_positions: jax.Array, dtype: jnp.dtype
) -> jax.Array:
    params = {name: jnp.asarray(x, dtype) for name, x in {**bias.constants(num_heads), **params}.items()}
    axes = {name: None if name in bias.shared else 0 for name in params}
    return jax.vmap(bias.value, in_axes=(axes, None, None))(params, q_positions, k_positions)
