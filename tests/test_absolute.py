import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dape_jax.absolute import Learned, Sinusoidal, random_positions
from dape_jax.errors import UserError
from tests.conftest import relative_error


def test_sinusoidal_equals_another_librarys():
    golden = np.load("tests/golden/transformers_yarn_sinusoidal.npz")["sinusoidal"]
    got = Sinusoidal().embed({}, jnp.arange(300), 24)
    assert relative_error(got, golden) < 1e-5
    odd = Sinusoidal().embed({}, jnp.arange(300).reshape(3, 100), 23)
    assert relative_error(odd[2, 99, ::2], np.sin(299 * 10000.0 ** (-np.arange(0, 23, 2) / 23))) < 1e-5


def test_learned_reads_its_table_and_nothing_beyond_it():
    params = Learned(7).init(jax.random.key(0), 500)
    assert abs(float(params["table"].std()) / (2 / (5 * 500)) ** 0.5 - 1) < 0.05
    got = Learned(7).embed(params, jnp.asarray([[6, 0], [3, 7]]), 500)
    assert np.array_equal(got[0], params["table"][jnp.asarray([6, 0])])
    assert np.all(np.isnan(got[1, 1]))
    with pytest.raises(UserError, match="length=0: 1 or more"):
        Learned(0)


def test_random_positions_are_sorted_distinct_and_uniform():
    draws = np.asarray(jax.vmap(lambda key: random_positions(key, 5, 12))(jax.random.split(jax.random.key(0), 4000)))
    assert np.all(np.diff(draws, axis=1) > 0)
    assert draws.min() == 0
    assert draws.max() == 11
    counts = np.bincount(draws.ravel(), minlength=12)
    expected = 4000 * 5 / 12
    # 11 degrees of freedom; positions of one draw exclude each other, which makes the sum smaller still.
    assert ((counts - expected) ** 2 / expected).sum() < 31.3
    assert np.array_equal(random_positions(jax.random.key(1), 12, 12), np.arange(12))
    with pytest.raises(UserError, match="13 positions cannot be drawn from a range of 12"):
        random_positions(jax.random.key(0), 13, 12)
