import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dape_jax.errors import UserError
from dape_jax.rotary import RoPE, YaRN, rope
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


@pytest.mark.parametrize("case", ["a", "b", "c"])
def test_yarn_equals_another_librarys(case):
    golden = np.load("tests/golden/transformers_yarn_sinusoidal.npz")
    d, base, train_length, scale = golden[f"{case}_args"]
    yarn = YaRN(base, int(train_length), scale)
    assert relative_error(yarn.frequencies(int(d)), golden[f"{case}_frequencies"]) < 1e-6
    assert abs(yarn.magnitude - golden[f"{case}_magnitude"]) < 1e-12
    x = jax.random.normal(jax.random.key(0), (1, 3, 2, int(d)))
    assert (
        relative_error(
            jnp.linalg.norm(rope(x, jnp.arange(3), yarn), axis=-1), yarn.magnitude * jnp.linalg.norm(x, axis=-1)
        )
        < 1e-6
    )


def test_yarn_is_rope_up_to_the_training_length_and_scales_with_the_length_beyond():
    yarn = YaRN(train_length=128)
    assert np.allclose(yarn.for_length(100).frequencies(64), RoPE().frequencies(64), rtol=1e-15, atol=0)
    assert yarn.for_length(128).magnitude == 1.0
    assert yarn.for_length(1024) == YaRN(train_length=128, scale=8.0)
    assert RoPE().for_length(1024) == RoPE()
    fast, slow = YaRN(train_length=128, scale=8.0).frequencies(64)[[0, -1]]
    assert (fast, slow * 8) == (1.0, pytest.approx(RoPE().frequencies(64)[-1]))


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"scale": 0.5}, "scale=0.5"), ({"scale": float("nan")}, "scale=nan"), ({"train_length": 0}, "train_length=0"),
    ({"beta_fast": 1.0}, "slow below fast"), ({"base": -1.0}, "base=-1.0"),
])  # fmt: skip
def test_bad_yarn_is_refused(kwargs, message):
    with pytest.raises(UserError, match=message):
        YaRN(**kwargs)
