"""What the backends are tested against: the whole of attention in float64 NumPy, without a line of their code."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from dape_jax import biases


def network(adapt, p, x, is_key):
    """f at every pair of one row: channels x [C, Tq, Tk], zero where not allowed, by loops over taps; is_key [Tk]
    is False on padding."""
    if adapt.per_head:
        heads = len(p["w1"])
        one = dataclasses.replace(adapt, per_head=False)
        return np.concatenate(
            [network(one, {n: w[h] for n, w in p.items()}, x[h::heads], is_key) for h in range(heads)]
        )  # fmt: skip

    def convolve(x, w, b):
        half, out = len(w) // 2, 0.0
        padded = np.pad(x, [(0, 0), (0, 0), (half, half)])
        for tap, matrix in enumerate(w):
            out = out + np.einsum("cqk,cd->dqk", padded[:, :, tap : tap + x.shape[2]], matrix)
        return out + b[:, None, None]

    hidden = convolve(x, p["w1"], p["b1"])
    act = np.where(hidden >= 0, hidden, 0.01 * hidden)
    return convolve(np.where(is_key, act, 0.0) if adapt.kernel_width > 1 else act, p["w2"], p["b2"])


def oracle(q, k, v, *, bias, bias_params, adapt, adapt_params, causal, q_positions, k_positions, q_segments=None,
           k_segments=None, k_valid=None):  # fmt: skip
    """Attention in float64 NumPy, row by row; only the bias formulas (tested by hand) are the project's."""
    f64 = lambda tree: jax.tree.map(lambda x: np.asarray(x, np.float64), tree)  # noqa: E731
    q, k, v, params = f64((q, k, v, adapt_params))
    group, heads = q.shape[2] // k.shape[2], q.shape[2]
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    rows = []
    for row in range(q.shape[0]):
        qp = np.broadcast_to(q_positions, (q.shape[0], q.shape[1]))[row]
        kp = np.broadcast_to(k_positions, (k.shape[0], k.shape[1]))[row]
        mask = np.ones((len(qp), len(kp)), bool)
        if causal:
            mask &= kp[None, :] <= qp[:, None]
        if q_segments is not None:
            mask &= np.asarray(q_segments)[row][:, None] == np.asarray(k_segments)[row][None, :]
        is_key = np.ones(len(kp), bool) if k_valid is None else np.asarray(k_valid)[row]
        mask &= is_key[None, :]
        s = np.einsum("qhd,khd->hqk", q[row], k[row]) * q.shape[3] ** -0.5
        b = 0.0 * s
        if bias is not None:
            with jax.enable_x64(True):
                positions = (jnp.asarray(x, jnp.int32) for x in (qp, kp))
                as_jax = jax.tree.map(jnp.asarray, f64(bias_params))
                b = np.asarray(biases.bias_values(bias, as_jax, heads, *positions, jnp.float64))
        a = s if adapt is not None and adapt.variant == "concat" else s + b
        if adapt is not None:
            # Entries that are not allowed matter to a convolving network alone.
            x = {"add_residual": s + b, "bias_only": b}.get(
                adapt.variant, s if bias is None else np.concatenate([s, b])
            )
            a = a + network(adapt, params, np.where(mask, x, 0.0) if adapt.kernel_width > 1 else x, is_key)
        top = np.where(mask, a, -1e300).max(-1, keepdims=True)
        weights = np.exp(np.where(mask, a - top, -np.inf))
        weights = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-300)
        rows.append(np.einsum("hqk,khd->qhd", weights, v[row]))
    return np.stack(rows)
