"""The model and its negative log-likelihoods in float64 NumPy, a window at a time, without padding or batches."""

import math

import jax
import numpy as np

from tests.attention.oracle import oracle


def nll(config, params, inputs, targets):
    """Negative log-likelihood in nats of each of ``targets`` after ``inputs`` up to it: float64 [T]."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = p["embed"]["embedding"][inputs]
    for layer in range(config.num_layers):
        block = jax.tree.map(lambda w: w[layer], p["blocks"])  # noqa: B023
        x = x + attention(config, block["attention"], norm(block["attention_norm"], x))
        hidden = linear(block["mlp_in"], norm(block["mlp_norm"], x))
        gelu = 0.5 * hidden * (1 + np.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + linear(block["mlp_out"], gelu)
    logits = norm(p["final_norm"], x) @ p["head"]["kernel"]
    top = logits.max(axis=1, keepdims=True)
    normaliser = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
    return normaliser - logits[np.arange(len(targets)), targets]


def attention(config, p, x):
    q, k, v = (linear(p[name], x).reshape(1, len(x), config.num_heads, -1) for name in "qkv")
    at = np.arange(len(x))
    out = oracle(q, k, v, bias=config.bias, bias_params=p["bias"], adapt=config.adapt, adapt_params=p["dape"],
                 causal=True, q_positions=at, k_positions=at)  # fmt: skip
    return linear(p["o"], out.reshape(len(x), -1))


def linear(p, x):
    return x @ p["kernel"] + p["bias"]


def norm(p, x):
    centred = x - x.mean(axis=-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]
