"""Parity with the official modules on every backend: outputs, logits, and the gradient of every parameter."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from dape_jax import FIRE, Adapt, ALiBi, BlockSizes, KerpleLog
from dape_jax.attention import BACKENDS, api, reference
from tests.attention.cases import OPTIMISED, run
from tests.conftest import relative_error

FILES = sorted(p for p in pathlib.Path("tests/golden").glob("*_[01].npz"))
# Where the golden gradient is rounding of zero, the absolute size counts.
ZERO = 1e-7


def ours(w):
    """[outputs, inputs] of a linear layer, or [outputs, inputs, 1, k] of a convolution, to [k, inputs, outputs]."""
    return w.reshape(*w.shape[:2], -1).transpose(2, 1, 0)


def load(path):
    z = dict(np.load(path))
    name = path.stem
    bias, bias_params, adapt, adapt_params = None, {}, None, {}
    if "alibi" in name:
        bias = ALiBi()
        assert np.allclose(z["alibi_slopes"], bias.constants(len(z["alibi_slopes"]))["slope"])
    if "kerple" in name:
        bias, bias_params = KerpleLog(), {"p": z["kerple_p"], "a": z["kerple_a"]}
    if "fire" in name:
        activation = "leaky_relu" if "dape" in name else "relu"
        bias = FIRE(width=len(z["fire_b1"]), init_length=float(z["fire_init_L"]), activation=activation)
        bias_params = {n: z[f"fire_{n}"] for n in ("c", "L_multiplier", "b1", "w2", "b2")} | {"w1": z["fire_w1"][:, 0]}
    if "dape" in name:
        adapt = Adapt(width=len(z["dape_b1"]), kernel_width=3 if "v2" in name else 1)
        adapt_params = {n: z[f"dape_{n}"] for n in ("b1", "b2")} | {n: ours(z[f"dape_{n}"]) for n in ("w1", "w2")}
    as_arrays = [{n: jnp.asarray(x) for n, x in p.items()} for p in (bias_params, adapt_params)]
    qkv = [jnp.asarray(z[n]).transpose(0, 2, 1, 3) for n in "qkv"]
    return z, qkv, bias, as_arrays[0], adapt, as_arrays[1]


SMALL = BlockSizes(q=8, k=16, rows=1)
CASES = [
    pytest.param(path, backend, blocks, id=f"{path.stem}-{backend}-{'small' if blocks else 'default'}",
                 marks=pytest.mark.slow if backend.startswith("pallas") else ())
    for path in FILES
    for backend in BACKENDS
    for blocks in (None, SMALL)
    # The reference has no blocks.
    if backend == "blockwise" or blocks is None
]  # fmt: skip


@pytest.mark.parametrize(("path", "backend", "blocks"), CASES)
def test_parity(path, backend, blocks):
    z, qkv, bias, bias_params, adapt, adapt_params = load(path)
    cotangent = jnp.asarray(z["cotangent"]).transpose(0, 2, 1, 3)
    out, (*d_qkv, d_bias, d_adapt) = run(
        backend, (*qkv, bias_params, adapt_params), cotangent, bias, adapt, blocks, OPTIMISED
    )
    assert relative_error(out.transpose(0, 2, 1, 3), z["out"]) < 2e-6
    for name, got in zip("qkv", d_qkv, strict=True):
        assert relative_error(got.transpose(0, 2, 1, 3), z[f"d{name}"]) < 2e-5, name
    assert sorted({**d_bias, **d_adapt}) == sorted({**bias_params, **adapt_params})
    for which, grads in (("bias", d_bias), ("dape", d_adapt)):
        for name, got in grads.items():
            prefix = "dape_" if which == "dape" else "fire_" if "fire" in path.stem else "kerple_"
            want = z[f"d_{prefix}{name}"]
            if which == "dape" and name in ("w1", "w2"):
                want = ours(want)
            if np.abs(want).max() < ZERO:
                assert np.abs(got).max() < 1e-5, name
            else:
                tolerance = 1e-4 if prefix + name == "fire_c" else 2e-5
                assert relative_error(got.reshape(want.shape), want) < tolerance, name


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_logits(path):
    z, qkv, bias, bias_params, adapt, adapt_params = load(path)
    spec, arrays = api.check(*qkv, bias=bias, bias_params=bias_params, adapt=adapt, adapt_params=adapt_params)
    logits = np.asarray(reference.logits(spec, arrays)).swapaxes(0, 1)
    assert relative_error(np.tril(logits), z["logits_causal"]) < 2e-6


def test_every_file_is_here():
    assert len(FILES) == 20
