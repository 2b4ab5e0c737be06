import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dape_jax.data.packing import segments

E = 9


@pytest.mark.parametrize(("tokens", "ids", "positions", "weights"), [
    ([1, 2, E, 3, E, 4], [0, 0, 0, 1, 1, 2], [0, 1, 2, 0, 1, 0], [1, 1, 0, 1, 0, 1]),
    ([E, 1, 2, 3, 4, 5], [0, 1, 1, 1, 1, 1], [0, 0, 1, 2, 3, 4], [0, 1, 1, 1, 1, 1]),
    ([1, 2, 3, 4, 5, E], [0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5], [1, 1, 1, 1, 1, 0]),
    ([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 5], [1, 1, 1, 1, 1, 1]),
    ([1, E, E, 2, E, E], [0, 0, 1, 2, 2, 3], [0, 1, 0, 0, 1, 0], [1, 0, 0, 1, 0, 0]),
])  # fmt: skip
def test_by_hand(tokens, ids, positions, weights):
    got = jax.jit(segments, static_argnums=1)(jnp.asarray([tokens, [1] * 6], jnp.int32), E)
    assert [x[0].tolist() for x in got] == [ids, positions, weights]
    assert [x[1].tolist() for x in got] == [[0] * 6, list(range(6)), [1] * 6]
    assert [x.dtype for x in got] == [jnp.int32, jnp.int32, jnp.float32]


def test_each_document_of_a_long_window_counts_from_zero():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 30, 50)
    tokens = np.concatenate([[*rng.integers(0, 9, n), E] for n in lengths])
    ids, positions, weights = segments(jnp.asarray(tokens, jnp.int32), E)
    assert np.array_equal(ids, np.repeat(np.arange(50), lengths + 1))
    assert np.array_equal(positions, np.concatenate([np.arange(n + 1) for n in lengths]))
    assert float(weights.sum()) == lengths.sum()
