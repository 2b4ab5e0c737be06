"""The float64 oracle with its gradients, written out in NumPy: no line of the backends, and no automatic derivative.

Only the bias formulas and their derivatives are the project's, tested by hand elsewhere.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dape_jax import biases


class Result(NamedTuple):
    """Output, gradients of (q, k, v, bias_params, adapt_params), and what rounding may do to them.

    Attributes:
      uncancelled: norms in the shape of ``gradients``, of the terms whose difference each gradient is.
      logits: size of the summands of the logits that a row attends to, the largest over rows.
      nearest_kink: the hidden unit nearest to zero, over the size of its summands. Within rounding of zero it may
        take the other slope of LeakyReLU, and then the gradient is another one.
    """

    out: np.ndarray
    gradients: Any
    uncancelled: Any
    logits: float
    nearest_kink: float


def attention_and_gradients(
    q, k, v, bias_params, adapt_params, cotangent, *, bias, adapt, causal, scale, q_positions, k_positions,
    q_segments=None, k_segments=None, k_valid=None,
) -> Result:  # fmt: skip
    """Attention as ``dape_attention`` defines it, and the gradients of its product with ``cotangent``."""
    q, k, v, cotangent, params = jax.tree.map(lambda x: np.asarray(x, np.float64), (q, k, v, cotangent, adapt_params))
    (batch, q_length, heads, _), k_length, kv_heads = q.shape, *k.shape[1:3]
    repeated_k, repeated_v = (np.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
    q_positions = np.broadcast_to(q_positions, (batch, q_length))
    k_positions = np.broadcast_to(k_positions, (batch, k_length))

    mask = np.ones((batch, 1, q_length, k_length), bool)
    if causal:
        mask &= (k_positions[:, None, :] <= q_positions[:, :, None])[:, None]
    if q_segments is not None:
        mask &= (np.asarray(q_segments)[:, :, None] == np.asarray(k_segments)[:, None, :])[:, None]
    is_key = np.ones((batch, 1, 1, k_length), bool) if k_valid is None else np.asarray(k_valid)[:, None, None, :]
    mask &= is_key

    s = scale * np.einsum("bqhd,bkhd->bhqk", q, repeated_k)
    b, bias_vjp = _bias(bias, bias_params, heads, q_positions, k_positions)
    base = s if adapt is not None and adapt.variant == "concat" else s + b
    f, network_vjp, kink = np.zeros_like(s), lambda _: (0.0, 0.0, {}), np.inf
    if adapt is not None:
        f, network_vjp, kink = _network(adapt, params, s, b if bias is not None else None, mask, is_key)
    a = np.where(mask, base + f, -np.inf)
    top = np.max(np.where(mask, a, -1e300), axis=-1, keepdims=True)
    p = np.exp(a - top)
    p = p / np.maximum(p.sum(-1, keepdims=True), 1e-300)
    out = np.einsum("bhqk,bkhd->bqhd", p, repeated_v)

    def summed(x):  # over the query heads of a key head
        return x.reshape(*x.shape[:2], kv_heads, -1, x.shape[3]).sum(axis=3)

    d_v = summed(np.einsum("bhqk,bqhd->bkhd", p, cotangent))

    def pull(d_a):
        d_s, d_b, d_adapt = network_vjp(d_a)
        d_s = d_s + d_a
        d_b = d_b + (0.0 if base is s else d_a)
        d_q = scale * np.einsum("bhqk,bkhd->bqhd", d_s, repeated_k)
        d_k = scale * summed(np.einsum("bhqk,bqhd->bkhd", d_s, q))
        return d_q, d_k, d_v, bias_vjp(np.broadcast_to(d_b, s.shape)), d_adapt

    def by_head(x, y):  # sum over d of x and y [B, Tq, H, d], as [B, H, Tq, 1]
        return np.einsum("bqhd,bqhd->bhq", x, y)[..., None]

    d_p = np.einsum("bqhd,bkhd->bhqk", cotangent, repeated_v)
    gradients = pull(p * (d_p - by_head(cotangent, out)))
    d_p = np.einsum("bqhd,bkhd->bhqk", np.abs(cotangent), np.abs(repeated_v))
    signs = np.random.default_rng(0)

    def rounded(d_a, shape):
        """Norms of the gradients of errors as large as d_a, their signs random over ``shape``: the largest of 4."""
        draws = [pull(d_a * signs.choice([-1.0, 1.0], shape)) for _ in range(4)]
        return jax.tree.map(lambda *x: max(map(np.linalg.norm, x)), *draws)

    # The rounding of d_p is of each entry, that of its product with the output of each row.
    of_entries = rounded(p * d_p, p.shape)
    of_rows = rounded(p * by_head(np.abs(cotangent), np.abs(out)), (*p.shape[:3], 1))
    uncancelled = jax.tree.map(np.add, of_entries, of_rows)
    summands = np.where(p > 0, np.abs(s) + np.abs(b) + np.abs(f), 0.0)
    return Result(out, gradients, uncancelled, float((p * summands).sum(-1).max()), float(kink))


def _convolve(x, w, b):
    """1 x k convolution of [B, C, Tq, Tk] along the keys, zeros beyond them, and its vjp, by loops over taps."""
    half, n = len(w) // 2, x.shape[-1]
    padded = np.pad(x, [(0, 0)] * 3 + [(half, half)])
    y = sum(np.einsum("bcqk,cd->bdqk", padded[..., t : t + n], w[t]) for t in range(len(w))) + b[:, None, None]

    def vjp(d_y):
        d_padded = np.zeros_like(padded)
        for t in range(len(w)):
            d_padded[..., t : t + n] += np.einsum("bdqk,cd->bcqk", d_y, w[t])
        d_w = np.stack([np.einsum("bcqk,bdqk->cd", padded[..., t : t + n], d_y) for t in range(len(w))])
        return d_padded[..., half : half + n], d_w, d_y.sum(axis=(0, 2, 3))

    return y, vjp


def _network(adapt, params, s, b, mask, is_key):
    """f(S, B), its vjp to (d_s, d_b, d_params), and ``Result.nearest_kink``. ``b`` None without a bias; ``is_key``
    [B, 1, 1, Tk] is False on padding."""
    if adapt.per_head:
        one = dataclasses.replace(adapt, per_head=False)
        parts = [
            _network(
                one, {n: x[h] for n, x in params.items()}, s[:, [h]], None if b is None else b[:, [h]], mask, is_key
            )
            for h in range(s.shape[1])
        ]

        def vjp_of_all(d_f):
            d_s, d_b, d_params = zip(*(vjp(d_f[:, [h]]) for h, (_, vjp, _) in enumerate(parts)), strict=True)
            d_b = 0.0 if b is None else np.concatenate(d_b, axis=1)
            return np.concatenate(d_s, axis=1), d_b, {n: np.stack([d[n] for d in d_params]) for n in params}

        return np.concatenate([f for f, _, _ in parts], axis=1), vjp_of_all, min(kink for _, _, kink in parts)

    heads = s.shape[1]
    if b is None:
        x = s
    else:
        x = {"add_residual": s + b, "bias_only": b + 0.0 * s}.get(adapt.variant, np.concatenate([s, b], axis=1))
    seen = mask if adapt.kernel_width > 1 else np.ones_like(mask)
    x = np.where(seen, x, 0.0)
    hidden, first_vjp = _convolve(x, params["w1"], params["b1"])
    kink = np.min(np.abs(hidden) / _convolve(np.abs(x), np.abs(params["w1"]), np.abs(params["b1"]))[0])
    slope = np.where(hidden >= 0, 1.0, 0.01)
    if adapt.kernel_width > 1:
        slope = np.where(is_key, slope, 0.0)
    f, second_vjp = _convolve(slope * hidden, params["w2"], params["b2"])

    def vjp(d_f):
        d_hidden, d_w2, d_b2 = second_vjp(d_f)
        d_x, d_w1, d_b1 = first_vjp(slope * d_hidden)
        d_x = np.where(seen, d_x, 0.0)
        d_params = {"w1": d_w1, "b1": d_b1, "w2": d_w2, "b2": d_b2}
        if b is None:
            return d_x, 0.0, d_params
        if adapt.variant == "add_residual":
            return d_x, d_x, d_params
        if adapt.variant == "bias_only":
            return np.zeros_like(s), d_x, d_params
        return d_x[:, :heads], d_x[:, heads:], d_params

    return f, vjp, kink


_PAIRS = 4096
"""Positions pairs of one call of the bias formula, whatever the shapes: it is compiled once a bias."""


@functools.cache
def _bias_functions(bias, heads):
    def value(params, q_positions, k_positions):
        table = biases.bias_values(bias, params, heads, q_positions[:, None], k_positions[:, None], jnp.float64)
        return table[:, :, 0, 0]

    def gradient(params, q_positions, k_positions, d_b):
        return jax.vjp(lambda p: value(p, q_positions, k_positions), params)[1](d_b)[0]

    return jax.jit(value), jax.jit(gradient)


def _bias(bias, params, heads, q_positions, k_positions):
    """B [B, H, Tq, Tk] and its vjp to the parameters."""
    shape = (len(q_positions), heads, q_positions.shape[1], k_positions.shape[1])
    if bias is None:
        return np.zeros(shape), lambda _: {}
    pairs = [
        np.broadcast_to(x, (shape[0], *shape[2:])).reshape(-1).astype(np.int32)
        for x in (q_positions[:, :, None], k_positions[:, None, :])
    ]
    count = len(pairs[0])
    padding = (0, -count % _PAIRS)
    pairs = [np.pad(x, padding).reshape(-1, _PAIRS) for x in pairs]
    value, gradient = _bias_functions(bias, heads)
    with jax.enable_x64(True):
        params = {name: jnp.asarray(x, jnp.float64) for name, x in params.items()}
        b = np.concatenate([value(params, *x) for x in zip(*pairs, strict=True)], axis=1)[:, :count]
    b = np.moveaxis(b.reshape(heads, shape[0], *shape[2:]), 0, 1)

    def vjp(d_b):
        d_b = np.pad(np.moveaxis(d_b, 1, 0).reshape(heads, -1), [(0, 0), padding]).reshape(heads, -1, _PAIRS)
        with jax.enable_x64(True):
            parts = [gradient(params, *x, jnp.asarray(d_b[:, i])) for i, x in enumerate(zip(*pairs, strict=True))]
            return {name: np.sum([part[name] for part in parts], axis=0) for name in params}

    return b, vjp
