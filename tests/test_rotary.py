import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dape_jax.errors import UserError
from dape_jax.rotary import rope
from tests.conftest import relative_error


def test_equals_another_librarys():
    golden = np.load("tests/golden/transformers_t5_rope.npz")
    got = rope(jnp.asarray(golden["rope_in"]), jnp.asarray(golden["rope_positions"]))
    # At position 4,095 float32 angles carry an error of about 2e-4, in both programs.
    assert relative_error(got[:, :6], golden["rope_out"][:, :6]) < 1e-6
    assert relative_error(got, golden["rope_out"]) < 1e-4


def test_by_hand():
    x = jnp.asarray([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    angles = np.asarray([7.0, 7.0 / 100])
    expected = [
        1 * np.cos(angles[0]) - 3 * np.sin(angles[0]),
        2 * np.cos(angles[1]) - 4 * np.sin(angles[1]),
        3 * np.cos(angles[0]) + 1 * np.sin(angles[0]),
        4 * np.cos(angles[1]) + 2 * np.sin(angles[1]),
    ]
    assert relative_error(rope(x, jnp.asarray([7])).ravel(), expected) < 1e-6


def test_logits_depend_on_the_distance_alone():
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    pairs = ((3, 1), (50, 48), (2048, 2046))
    logits = [float(jnp.vdot(rope(q, jnp.asarray([i])), rope(k, jnp.asarray([j])))) for i, j in pairs]
    assert np.allclose(logits, logits[0], atol=1e-3)
    assert not np.isclose(logits[0], float(jnp.vdot(q, k)), atol=1e-3)


def test_rows_with_positions_of_their_own():
    x = jax.random.normal(jax.random.key(0), (2, 3, 2, 4))
    positions = jnp.asarray([[0, 1, 2], [5, 9, 700]])
    got = rope(x, positions)
    for row in range(2):
        assert np.array_equal(got[row : row + 1], rope(x[row : row + 1], positions[row]))
    assert rope(x.astype(jnp.bfloat16), positions).dtype == jnp.bfloat16


def test_odd_dimension_is_refused():
    with pytest.raises(UserError, match="head dimension 3 is odd"):
        rope(jnp.zeros((1, 1, 1, 3)), jnp.asarray([0]))
