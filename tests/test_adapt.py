import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dape_jax.adapt import VARIANTS, Adapt, adapt_logits, bias_terms, mix
from dape_jax.errors import UserError
from tests.conftest import relative_error

H, B, TQ, TK = 3, 2, 4, 5


def formula(adapt, params, s, b):
    """The printed formulas, in float64 NumPy, one pair of positions at a time."""
    p = {name: np.asarray(x, np.float64) for name, x in params.items()}
    s = np.asarray(s, np.float64)
    b = np.zeros((H, TQ, TK)) if b is None else np.asarray(b, np.float64)
    out = np.empty_like(s)

    def network(w1, b1, w2, b2, x):
        hidden = w1[0].T @ x + b1
        return w2[0].T @ np.where(hidden >= 0, hidden, 0.01 * hidden) + b2

    for n, i, j in np.ndindex(B, TQ, TK):
        sij, bij = s[:, n, i, j], b[:, i, j]
        heads = [slice(h, h + 1) for h in range(H)] if adapt.per_head else [slice(None)]
        for h, sl in enumerate(heads):
            weights = [p[name][h] if adapt.per_head else p[name] for name in ("w1", "b1", "w2", "b2")]
            if adapt.variant == "add_residual":
                f = network(*weights, sij[sl] + bij[sl])
            elif weights[0].shape[1] == len(sij[sl]):
                f = network(*weights, sij[sl])
            else:
                f = network(*weights, np.concatenate([sij[sl], bij[sl]]))
            residual = 0 if adapt.variant == "concat" else bij[sl]
            out[sl, n, i, j] = sij[sl] + residual + f
    return out


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "bias_only"])
def test_every_variant_equals_its_formula(variant, per_head, has_bias):
    adapt = Adapt(variant, width=6, per_head=per_head)
    keys = jax.random.split(jax.random.key(0), 3)
    params = adapt.init(keys[0], H, has_bias)
    s = jax.random.normal(keys[1], (H, B, TQ, TK))
    b = jax.random.normal(keys[2], (H, TQ, TK)) if has_bias else None
    got = adapt_logits(adapt, params, s, bias_terms(adapt, params, b))
    assert relative_error(got, formula(adapt, params, s, b)) < 1e-6
    assert {name: x.shape for name, x in params.items()} == adapt.shapes(H, has_bias)


def test_network_mixes_heads_unless_per_head():
    s = jax.random.normal(jax.random.key(1), (H, B, TQ, TK))
    for per_head in (False, True):
        adapt = Adapt(per_head=per_head)
        params = adapt.init(jax.random.key(0), H, has_bias=False)

        def head0(s, adapt=adapt, params=params):
            return adapt_logits(adapt, params, s, bias_terms(adapt, params, None))[0].sum()

        others = np.abs(np.asarray(jax.grad(head0)(s))[1:]).max()
        assert (others == 0) == per_head


def test_without_a_network_it_is_the_sum():
    s, b = jnp.ones((H, B, TQ, TK)), jnp.full((H, TQ, TK), 2.0)
    assert np.array_equal(adapt_logits(None, None, s, bias_terms(None, None, b)), 3 * s)
    assert np.array_equal(adapt_logits(None, None, s, bias_terms(None, None, None)), s)


def test_gradient_of_mix_equals_the_derived_one():
    x = jax.random.normal(jax.random.key(0), (5, B, TQ, TK))
    w = jax.random.normal(jax.random.key(1), (5, 7))
    d_y = jax.random.normal(jax.random.key(2), (7, B, TQ, TK))
    y, vjp = jax.vjp(mix, x, w)
    expected, expected_vjp = jax.vjp(lambda x, w: jnp.einsum("cbqk,cd->dbqk", x, w, precision="highest"), x, w)
    assert relative_error(y, expected) < 1e-6
    for got, want in zip(vjp(d_y), expected_vjp(d_y), strict=True):
        assert relative_error(got, want) < 1e-6


def test_initial_range_is_the_official_default():
    params = Adapt(width=50).init(jax.random.key(0), 50, has_bias=True)
    assert 0.099 < float(jnp.abs(params["w1"]).max()) <= 0.1  # 1 / sqrt(100)
    assert 0.13 < float(jnp.abs(params["w2"]).max()) <= 50**-0.5


@pytest.mark.parametrize(
    ("field", "kwargs"),
    [("variant", {"variant": "concatresidual"}), ("width", {"width": 0}), ("kernel_width", {"kernel_width": 2})],
)
def test_bad_values_are_refused(field, kwargs):
    with pytest.raises(UserError, match=field):
        Adapt(**kwargs)


def test_bias_only_by_hand_and_refused_without_a_bias():
    adapt = Adapt("bias_only", width=4)
    params = adapt.init(jax.random.key(0), H)
    s, b = jax.random.normal(jax.random.key(1), (H, B, TQ, TK)), jax.random.normal(jax.random.key(2), (H, TQ, TK))
    hidden = jnp.einsum("hqk,hd->dqk", b, params["w1"][0]) + params["b1"][:, None, None]
    f = jnp.einsum("dqk,dh->hqk", jnp.where(hidden >= 0, hidden, 0.01 * hidden), params["w2"][0])
    want = s + (b + f + params["b2"][:, None, None])[:, None]
    assert relative_error(adapt_logits(adapt, params, s, bias_terms(adapt, params, b)), want) < 1e-6
    with pytest.raises(UserError, match="bias_only' needs a position bias"):
        adapt.init(jax.random.key(0), H, has_bias=False)


def test_convolution_needs_its_neighbours():
    adapt = Adapt(kernel_width=3)
    params = adapt.init(jax.random.key(0), H, has_bias=False)
    with pytest.raises(UserError, match="kernel_width=3: the mask must be given"):
        adapt_logits(adapt, params, jnp.zeros((H, B, TQ, TK)), bias_terms(adapt, params, None))
