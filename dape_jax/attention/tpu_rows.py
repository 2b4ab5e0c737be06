"""The logits of a few query rows inside a TPU kernel: bias and DAPE network as products with block-diagonal weights.

A tile's logits are rows ordered (query, head), keys along the lanes: ``R = G H`` rows for a group of G queries, so
that no head is padded and the network, which mixes heads, is two plain matrix products for the whole group:

    hidden [G D, keys] = W1 [G D, inputs G H] @ x [inputs G H, keys],      f [G H, keys] = W2 [G H, G D] @ act

with each query's own weights on the diagonal. ``pack`` makes these operands from the parameters, outside the kernel;
the kernel returns a gradient for every operand, and the transpose of ``pack`` carries it on to the parameters.
``logits`` is differentiated by ``jax.vjp`` inside the kernel.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from dape_jax import adapt as adapt_lib
from dape_jax import biases
from dape_jax.attention.arguments import Spec

LANES = 128
ELEMENTWISE = (biases.ALiBi, biases.KerpleLog, biases.KerplePower)
"""Biases whose formula has one number a head for each parameter: evaluated as it stands, on rows (query, head)."""
FEATURES = (biases.T5Bias, biases.FIRE)
"""Biases that are a product of a [H, features] matrix with features of the two positions that all heads share."""
_HIGHEST = jax.lax.Precision.HIGHEST


@dataclasses.dataclass(frozen=True)
class Rows:
    """Static half: G queries of all heads against ``keys`` keys; ``exact`` for products in full float32."""

    spec: Spec
    group: int
    keys: int
    exact: bool

    @property
    def count(self) -> int:
        return self.group * self.spec.num_heads

    @property
    def taps(self) -> int:
        return 1 if self.spec.adapt is None else self.spec.adapt.kernel_width


class Geometry(NamedTuple):
    """Where a group of rows stands.

    Attributes:
      q_positions: int32 [R, 128], each row's position in every lane.
      q_each: int32 [1, 128] for each of the G queries, its position in every lane.
      k_positions: int32 [1, keys].
      allowed: bool [R, keys], or None; entries of a convolving network that are not allowed are zero.
      is_key: bool [1, keys], or None; False beyond the first and last key and on padding.
    """

    q_positions: jax.Array | None
    q_each: tuple[jax.Array, ...]
    k_positions: jax.Array
    allowed: jax.Array | None
    is_key: jax.Array | None


class Operands(NamedTuple):
    """What the kernel reads besides q, k, v: float32 arrays with gradients, and int32 constants."""

    bias: dict[str, jax.Array]
    adapt: dict[str, jax.Array]
    constants: dict[str, jax.Array]


# Operands from parameters ---------------------------------------------------------------------------------------------


def pack(rows: Rows, bias_params: biases.Params, adapt_params: adapt_lib.Params) -> Operands:
    """Block-diagonal weights and columns repeated along the lanes. Differentiable in the parameters."""
    f32 = functools.partial(jnp.asarray, dtype=jnp.float32)
    bias_params = {name: f32(x) for name, x in bias_params.items()}
    adapt_params = {name: f32(x) for name, x in adapt_params.items()}
    bias, constants = _pack_bias(rows, bias_params)
    return Operands(bias, _pack_adapt(rows, adapt_params), constants)


def _column(x: jax.Array) -> jax.Array:
    """[..., n] to [..., n, 128], the same in every lane."""
    return jnp.broadcast_to(x[..., None], (*x.shape, LANES))


def _per_row(rows: Rows, x: jax.Array) -> jax.Array:
    """[..., H] to [..., G H, 128]."""
    return _column(jnp.concatenate([x] * rows.group, axis=-1))


def diagonal(rows: Rows, x: jax.Array) -> jax.Array:
    """[m, s, n] to [G m, s G n]: block (g, g) of every s is x[:, s], the others are zero."""
    g, (m, s, n) = rows.group, x.shape
    eye = jnp.eye(g, dtype=x.dtype).reshape(g, 1, 1, g, 1)
    return (jnp.broadcast_to(x.reshape(1, m, s, 1, n), (g, m, s, g, n)) * eye).reshape(g * m, s * g * n)


def _pack_bias(rows: Rows, params: dict[str, jax.Array]) -> tuple[dict, dict]:
    bias, heads = rows.spec.bias, rows.spec.num_heads
    if bias is None:
        return {}, {}
    if isinstance(bias, biases.T5Bias):
        buckets = biases.t5_bucket(jnp.arange(bias.max_distance + 1), bias.num_buckets, bias.max_distance)
        first = jnp.searchsorted(buckets, jnp.arange(whole(bias.num_buckets) + 1)).astype(jnp.int32)
        # The last bucket has no end, and those that pad the rows to a multiple of 8 are never reached.
        end = jnp.where(jnp.arange(len(first)) >= bias.num_buckets, jnp.iinfo(jnp.int32).max, first)
        weights = diagonal(rows, _pad_last(params["table"], whole(bias.num_buckets))[:, None])
        return {"weights": weights}, {"first": _column(end[:-1]), "end": _column(end[1:])}
    if isinstance(bias, biases.FIRE):
        # A further hidden unit that is always 1 carries b2.
        size = whole(bias.width + 1)
        one = jnp.ones(1, jnp.float32)
        weights = jnp.concatenate([params["w2"], params["b2"][:, None]], axis=1)
        return {
            "weights": diagonal(rows, _pad_last(weights, size)[:, None]),
            "w1": _column(_pad_last(params["w1"], size)),
            "b1": _column(_pad_last(jnp.concatenate([params["b1"], one]), size)),
            "c": _column(jnp.abs(params["c"])[None]),
            "threshold": _column(jnp.abs(params["L_multiplier"] * bias.init_length)[None]),
        }, {}
    constants = {name: jnp.asarray(x, jnp.float32) for name, x in bias.constants(heads).items()}
    return {name: _per_row(rows, x) for name, x in {**constants, **params}.items()}, {}


def whole(n: int) -> int:
    """Rounded up to rows of a float32 tile."""
    return -(-n // 8) * 8


def _pad_last(x: jax.Array, n: int) -> jax.Array:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, n - x.shape[-1])])


def _pack_adapt(rows: Rows, params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    adapt, heads = rows.spec.adapt, rows.spec.num_heads
    if adapt is None:
        return {}
    w1, b1, w2 = params["w1"], params["b1"], params["w2"]  # b2 is a constant along a row, which the softmax cancels
    if adapt.per_head:  # [H, k, inputs, D], [H, D], [H, k, D, 1]
        return {
            "w1": _per_row(rows, jnp.transpose(w1, (3, 1, 2, 0)).reshape(adapt.width, -1, heads)),
            "b1": _per_row(rows, b1.T),
            "w2": _per_row(rows, jnp.transpose(w2[..., 0], (2, 1, 0))),
        }
    # [k, inputs, D] with the inputs (S and B, or one) by heads; [D]; [k, D, H].
    return {
        "w1": diagonal(rows, jnp.transpose(w1, (2, 0, 1)).reshape(adapt.width, -1, heads)),
        "b1": _column(jnp.concatenate([b1] * rows.group)),
        "w2": jnp.concatenate([diagonal(rows, w.T[:, None]) for w in w2]),
    }


# Logits ---------------------------------------------------------------------------------------------------------------


def logits(rows: Rows, operands: Operands, s: jax.Array, geometry: Geometry) -> jax.Array:
    """A [R, keys] from S [R, keys], both float32 and unmasked. Only the inner keys count where there is a halo."""
    spec = rows.spec
    b = None if spec.bias is None else _bias(rows, operands, geometry)
    if spec.adapt is None:
        return s if b is None else s + b
    residual = s if b is None or spec.adapt.variant == "concat" else s + b
    if rows.taps > 1:
        assert geometry.allowed is not None
        s = jnp.where(geometry.allowed, s, 0.0)
        b = None if b is None else jnp.where(geometry.allowed, b, 0.0)
    if b is None:
        inputs = [s]
    elif spec.adapt.variant == "add_residual":
        inputs = [s + b]
    else:
        inputs = [b] if spec.adapt.variant == "bias_only" else [s, b]
    p = rows.taps // 2
    shifted = [shift(p - t, x) for t in range(rows.taps) for x in inputs]
    network = _per_head if spec.adapt.per_head else _joint
    return residual + network(rows, operands.adapt, shifted, geometry.is_key)


def _joint(rows: Rows, p: dict[str, jax.Array], inputs: Sequence[jax.Array], is_key: jax.Array | None) -> jax.Array:
    x = inputs[0] if len(inputs) == 1 else jnp.concatenate(inputs, axis=0)
    full = rows.spec.steep
    act = _leaky(mix(full, rows.exact, p["w1"], x) + lanes(p["b1"], rows.keys), is_key)
    y = mix(full, rows.exact, p["w2"], act)
    n, half = rows.count, rows.taps // 2
    return functools.reduce(jnp.add, [shift(half - t, y[t * n : (t + 1) * n]) for t in range(rows.taps)])


def _per_head(rows: Rows, p: dict[str, jax.Array], inputs: Sequence[jax.Array], is_key: jax.Array | None) -> jax.Array:
    outputs = [jnp.zeros_like(inputs[0])] * rows.taps
    for u in range(p["w1"].shape[0]):
        hidden = lanes(p["b1"][u], rows.keys)
        for c, x in enumerate(inputs):
            hidden = hidden + lanes(p["w1"][u, c], rows.keys) * x
        act = _leaky(hidden, is_key)
        outputs = [y + lanes(p["w2"][u, t], rows.keys) * act for t, y in enumerate(outputs)]
    half = rows.taps // 2
    return functools.reduce(jnp.add, [shift(half - t, y) for t, y in enumerate(outputs)])


def _leaky(hidden: jax.Array, is_key: jax.Array | None) -> jax.Array:
    act = jnp.where(hidden >= 0.0, hidden, adapt_lib.SLOPE * hidden)
    # The second convolution pads with zeros, not with what the first one makes of them.
    return act if is_key is None else jnp.where(jnp.broadcast_to(is_key, act.shape), act, 0.0)


def _bias(rows: Rows, operands: Operands, geometry: Geometry) -> jax.Array:
    bias, p, keys = rows.spec.bias, operands.bias, rows.keys
    assert bias is not None
    if isinstance(bias, ELEMENTWISE):
        q = geometry.q_positions
        assert q is not None
        slabs = [geometry.k_positions[:, n : n + LANES] for n in range(0, keys, LANES)]
        return jnp.concatenate([bias.value(p, q, jnp.broadcast_to(k, q.shape)) for k in slabs], axis=1)
    features = []
    for q in geometry.q_each:
        q = lanes(q, keys)
        distance = jnp.abs(q - geometry.k_positions)
        if isinstance(bias, biases.T5Bias):
            first, end = (lanes(operands.constants[name], keys) for name in ("first", "end"))
            distance = jnp.broadcast_to(distance, first.shape)
            features.append(jnp.where((distance >= first) & (distance < end), 1.0, 0.0))
        else:
            features.append(_fire_features(bias, p, q, geometry.k_positions, distance))
    return mix(True, rows.exact, p["weights"], jnp.concatenate(features, axis=0))


def _fire_features(bias: Any, p: dict, q: jax.Array, k: jax.Array, distance: jax.Array) -> jax.Array:
    """The hidden layer of FIRE's network for one query, [width + 1 and padding, keys]."""
    keys = k.shape[1]
    c, threshold = lanes(p["c"], keys), lanes(p["threshold"], keys)
    farthest = jnp.maximum(q, k).astype(jnp.float32)
    top = jnp.log1p(c * distance.astype(jnp.float32))
    u = top / (jnp.log1p(c * jnp.maximum(threshold, farthest)) + 1e-6)
    w1, b1 = lanes(p["w1"], keys), lanes(p["b1"], keys)
    hidden = w1 * jnp.broadcast_to(u, w1.shape) + b1
    if bias.activation == "leaky_relu":
        return jnp.where(hidden >= 0.0, hidden, 0.01 * hidden)
    return jnp.where(hidden > 0.0, hidden, 0.0)


# Primitives with gradients that stay in the layout --------------------------------------------------------------------


def lanes(x: jax.Array, n: int) -> jax.Array:
    """[r, 128], repeated or cut along the lanes to [r, n]."""
    return x[:, :n] if n <= LANES else jnp.concatenate([x] * (n // LANES), axis=1)


def shift(by: int, x: jax.Array) -> jax.Array:
    """Entry j of every row moves to j + by, around the ends."""
    return cast(jax.Array, _shift(by, x)) if by else x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _shift(by: int, x: jax.Array) -> jax.Array:
    return pltpu.roll(x, by % x.shape[1], axis=1)


_shift.defvjp(lambda by, x: (shift(by, x), None), lambda by, _, d_y: (shift(-by, d_y),))


def product(a: jax.Array, b: jax.Array, contract: tuple[int, int], exact: bool) -> jax.Array:
    dims = (((contract[0],), (contract[1],)), ((), ()))
    precision = _HIGHEST if exact else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)


def _high(x: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16)


def _low(x: jax.Array) -> jax.Array:
    return (x - x.astype(jnp.bfloat16).astype(jnp.float32)).astype(jnp.bfloat16)


def mix(full: bool, exact: bool, w: jax.Array, x: jax.Array) -> jax.Array:
    """``w @ x``, [m, c] and [c, keys], in float32.

    Unless ``exact``, in bfloat16 passes with float32 sums. w and x are then each a high and a low part, since rounding
    S and B once costs up to 42 % of the gradient of W1; with ``full`` the gradient that arrives is two parts as well.
    """
    return cast(jax.Array, _mix(full, exact, w, x))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _mix(full: bool, exact: bool, w: jax.Array, x: jax.Array) -> jax.Array:
    if exact:
        return product(w, x, (1, 0), exact=True)
    return _parts(w, x, (1, 0), a_low=True, b_low=True)


def _parts(a: jax.Array, b: jax.Array, contract: tuple[int, int], a_low: bool, b_low: bool) -> jax.Array:
    y = product(_high(a), _high(b), contract, exact=False)
    if b_low:
        y = y + product(_high(a), _low(b), contract, exact=False)
    return y + product(_low(a), _high(b), contract, exact=False) if a_low else y


def _mix_fwd(full: bool, exact: bool, w: jax.Array, x: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return mix(full, exact, w, x), (w, x)


def _mix_bwd(full: bool, exact: bool, saved: tuple[jax.Array, jax.Array], d_y: jax.Array) -> tuple:
    w, x = saved
    if exact:
        return product(d_y, x, (1, 1), exact=True), product(w, d_y, (0, 0), exact=True)
    return _parts(d_y, x, (1, 1), a_low=full, b_low=True), _parts(w, d_y, (0, 0), a_low=full, b_low=full)


_mix.defvjp(_mix_fwd, _mix_bwd)
