import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dape_jax import biases
from dape_jax.biases import BIASES, FIRE, ALiBi, KerpleLog, KerplePower, T5Bias, bias_table, bias_values
from dape_jax.errors import UserError
from tests.conftest import relative_error

ALL = [cls() for cls in BIASES.values()] + [FIRE(activation="leaky_relu", init_length=16.0), T5Bias(8, 20)]


def test_alibi_slopes_are_the_published_ones():
    assert np.allclose(biases.alibi_slopes(8), [1 / 2**k for k in range(1, 9)])
    # With 12 heads: those of 8, then the odd ones of 16, which jump up again.
    expected = [1 / 2**k for k in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5]
    assert np.allclose(biases.alibi_slopes(12), expected)
    assert biases.alibi_slopes(1).tolist() == [2.0**-8]
    assert len(biases.alibi_slopes(25)) == 25


def test_kerple_by_hand():
    params = {"p": jnp.asarray([2.0, 0.5]), "a": jnp.asarray([1.0, 0.25])}
    got = bias_values(KerpleLog(), params, 2, jnp.asarray([5]), jnp.asarray([5, 4, 1]))
    expected = [[[0.0, -2 * np.log(2), -2 * np.log(5)]], [[0.0, -0.5 * np.log(1.25), -0.5 * np.log(2.0)]]]
    assert relative_error(got, expected) < 1e-6


def test_kerple_stays_above_its_bound_and_can_leave_it():
    at_bound = {"p": jnp.asarray([0.01, -3.0]), "a": jnp.asarray([-1.0, 0.01])}
    positions = jnp.arange(4)
    got = bias_values(KerpleLog(), at_bound, 2, positions, positions)
    floor = bias_values(KerpleLog(), {"p": jnp.full(2, 0.01), "a": jnp.full(2, 0.01)}, 2, positions, positions)
    assert np.allclose(got, floor, rtol=1e-5)
    grads = jax.grad(lambda p: bias_values(KerpleLog(), p, 2, positions, positions).sum())(at_bound)
    assert all(np.all(np.asarray(g) != 0) for g in grads.values())


def test_fire_against_float64_formula():
    bias = FIRE(width=4, init_length=8.0)
    params = bias.init(jax.random.key(1), 3)
    q, k = np.arange(20), np.arange(20)
    p = {name: np.asarray(x, np.float64) for name, x in params.items()}

    def psi(x):
        return np.log(abs(p["c"]) * x + 1)

    distance = np.abs(q[:, None] - k[None, :])
    u = psi(distance) / (psi(np.maximum(abs(p["L_multiplier"] * 8.0), np.maximum(q[:, None], k[None, :]))) + 1e-6)
    hidden = np.maximum(p["w1"] * u[..., None] + p["b1"], 0)
    expected = np.moveaxis(hidden @ p["w2"].T + p["b2"], -1, 0)
    got = bias_values(bias, params, 3, jnp.asarray(q), jnp.asarray(k))
    assert relative_error(got, expected) < 1e-6


@pytest.mark.parametrize(("name", "buckets", "maximum"), [("t5_32_128", 32, 128), ("t5_64_500", 64, 500)])
def test_t5_buckets_equal_another_librarys(name, buckets, maximum):
    expected = np.load("tests/golden/transformers_t5_rope.npz")[name]
    got = biases.t5_bucket(jnp.arange(len(expected)), buckets, maximum)
    assert np.array_equal(got, expected)


def test_t5_by_hand():
    table = jnp.arange(64, dtype=jnp.float32).reshape(2, 32)
    got = bias_values(T5Bias(), {"table": table}, 2, jnp.asarray([1000]), jnp.asarray([1000, 999, 985, 984, 872, 0]))
    # Distances 0, 1, 15 are exact; 16 opens the logarithmic range; 128 and beyond share the last bucket.
    assert got[:, 0].tolist() == [[0, 1, 15, 16, 31, 31], [32, 33, 47, 48, 63, 63]]


@pytest.mark.parametrize("bias", ALL, ids=repr)
def test_bidirectional_symmetry_and_shapes(bias):
    params = bias.init(jax.random.key(0), 4)
    positions = jnp.asarray([[0, 3, 7], [2, 9, 100_000]])
    values = bias_values(bias, params, 4, positions, positions)
    assert values.shape == (4, 2, 3, 3)
    assert values.dtype == jnp.float32
    assert np.array_equal(values, np.swapaxes(values, 2, 3))
    assert np.all(np.isfinite(values))


@pytest.mark.parametrize("bias", [b for b in ALL if b.distance_only], ids=repr)
def test_table_is_the_value_at_a_distance(bias):
    params = bias.init(jax.random.key(0), 3)
    distances = jnp.asarray([0, 1, 5, 127, 128, 90_000])
    values = bias_values(bias, params, 3, jnp.asarray([100_000]), 100_000 - distances)
    assert np.array_equal(bias_table(bias, params, 3, distances), values[:, 0])


def test_table_refuses_fire():
    with pytest.raises(UserError, match="FIRE is not a function of distance alone"):
        bias_table(FIRE(), FIRE().init(jax.random.key(0), 2), 2, jnp.arange(3))


@pytest.mark.parametrize("bias", [ALiBi(), KerpleLog()], ids=repr)
def test_far_distances_do_not_alias(bias):
    """Positions beyond 256 (bfloat16) and 2,048 (float16) stay distinct, and agree with float64."""
    params = bias.init(jax.random.key(0), 12)
    q = jnp.asarray([1_000_000])
    k = jnp.asarray([1_000_000 - d for d in (8190, 8191, 8192)])
    values = np.asarray(bias_values(bias, params, 12, q, k), np.float64)[:, 0]
    assert np.all(np.diff(values, axis=1) < 0)
    constants = {name: np.asarray(x, np.float64) for name, x in {**bias.constants(12), **params}.items()}
    d = np.asarray([8190.0, 8191.0, 8192.0])
    if isinstance(bias, ALiBi):
        expected = -constants["slope"][:, None] * d
    else:
        expected = -constants["p"][:, None] * np.log1p(constants["a"][:, None] * d)
    assert relative_error(values, expected) < 1e-6


def test_initial_ranges():
    params = KerpleLog().init(jax.random.key(0), 1000)
    assert 1.8 < float(params["p"].max()) <= 2
    assert 0.9 < float(params["a"].max()) <= 1
    assert params["p"].min() >= np.float32(0.01)
    fire = FIRE(width=100).init(jax.random.key(0), 100)
    assert (float(fire["c"]), float(fire["L_multiplier"])) == (np.float32(0.1), 1.0)
    assert 0.95 < float(jnp.abs(fire["w1"]).max()) <= 1
    assert 0.095 < float(jnp.abs(fire["w2"]).max()) <= 0.1


def test_fire_refuses_an_unknown_activation():
    with pytest.raises(UserError, match="activation='gelu'"):
        FIRE(activation="gelu")


def test_kerple_power_by_hand():
    params = {"p": jnp.asarray([0.5, 2.0, 1.0]), "a": jnp.asarray([1.0, 0.5, 3.0])}  # the last a is read as 2
    got = bias_values(KerplePower(), params, 3, jnp.asarray([9]), jnp.asarray([9, 8, 0]))[:, 0]
    assert np.allclose(got, [[0, -0.5, -4.5], [0, -2, -6], [0, -1, -81]], rtol=1e-6)
    positions = jnp.arange(5)
    grads = jax.grad(lambda p: bias_values(KerplePower(), p, 3, positions, positions).sum())(params)
    # d/dp = -sum d^a, d/da = -p sum d^a log d, over the 2 (5 - d) pairs at distance d
    d = np.arange(1, 5)
    assert np.isclose(grads["p"][0], -(2 * (5 - d) * d).sum(), rtol=1e-5)
    assert np.isclose(grads["a"][1], -2 * (2 * (5 - d) * d**0.5 * np.log(d)).sum(), rtol=1e-5)
