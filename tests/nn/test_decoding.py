"""Reading token by token with a cache equals reading everything at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dape_jax import FIRE, Adapt, ALiBi, KerpleLog, KerplePower, Learned, RoPE, Sinusoidal, T5Bias, UserError, YaRN
from dape_jax.nn import Attention, TransformerConfig, TransformerLM
from tests.conftest import relative_error

SMALL = {"vocab_size": 31, "num_layers": 2, "num_heads": 4, "width": 16, "mlp_width": 32}
ENCODINGS = {
    "nope": {},
    "rope": {"rotary": RoPE()},
    "yarn": {"rotary": YaRN(train_length=4)},
    "randomised rope": {"rotary": RoPE(), "random_range": 90},
    "sinusoidal": {"absolute": Sinusoidal()},
    "learned": {"absolute": Learned(12)},
    "alibi": {"bias": ALiBi(), "num_kv_heads": 2},
    "kerple": {"bias": KerpleLog()},
    "kerple power": {"bias": KerplePower()},
    "t5": {"bias": T5Bias(8, 10)},
    "fire": {"bias": FIRE(init_length=4.0)},
}
CASES = [
    *((name, k) for name in ENCODINGS for k in (None, 1)),
    *((name, k) for name in ("kerple", "fire", "nope") for k in (3, 5)),
]
FAST = [("rope", None), ("randomised rope", 1), ("learned", None), ("alibi", None), ("kerple", 1), ("kerple", 3)]
CAPACITY, BATCH = 12, 2


@functools.cache
def model(name, kernel_width):
    adapt = None if kernel_width is None else Adapt(width=4, kernel_width=kernel_width)
    config = TransformerConfig(**SMALL, **ENCODINGS[name], adapt=adapt).for_length(CAPACITY)
    return TransformerLM(config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(("name", "kernel_width"), [
    pytest.param(*case, marks=() if case in FAST else pytest.mark.slow) for case in CASES
])  # fmt: skip
def test_prefill_tokens_and_chunks_equal_the_whole(name, kernel_width):
    lm, key = model(name, kernel_width), jax.random.key(7)
    tokens = jax.random.randint(jax.random.key(0), (BATCH, CAPACITY), 0, 31)
    want = nnx.jit(lambda m, t: m(t, key=key))(lm, tokens)
    extend = nnx.jit(lambda m, t, c: m.extend(t, c))
    cache, got, first = lm.init_cache(BATCH, CAPACITY, key), [], 0
    for count in (4, 1, 1, 1, 4, 1):  # a prompt, single tokens and a chunk
        hidden, cache = extend(lm, tokens[:, first : first + count], cache)
        got.append(hidden)
        first += count
    assert first == CAPACITY == int(cache.length)
    assert relative_error(jnp.concatenate(got, axis=1), want) < 2e-6
    assert np.all(np.isnan(extend(lm, tokens[:, :1], cache)[0]))


def test_bfloat16_cache():
    lm = TransformerLM(TransformerConfig(**SMALL, bias=KerpleLog(), adapt=Adapt(), dtype="bfloat16"), rngs=nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(0), (1, 6), 0, 31)
    cache = lm.init_cache(1, 8)
    assert cache.layers.k.dtype == jnp.bfloat16
    hidden, cache = lm.extend(tokens[:, :5], cache)
    last, cache = lm.extend(tokens[:, 5:], cache)
    assert relative_error(jnp.concatenate([hidden, last], 1), lm(tokens)) < 1e-2


def test_what_cannot_be_decoded_is_refused():
    with pytest.raises(UserError, match="13 tokens are more than the 12 positions of the learned table"):
        model("learned", None).init_cache(1, 13)
    with pytest.raises(UserError, match="13 tokens are more than the 12 positions of the learned table"):
        model("learned", None)(jnp.zeros((1, 13), jnp.int32))
    with pytest.raises(UserError, match="91 tokens are more than the 90 positions that are drawn from"):
        model("randomised rope", None).init_cache(1, 91, jax.random.key(0))
    with pytest.raises(UserError, match="key: randomised positions are drawn with one"):
        model("randomised rope", None)(jnp.zeros((1, 3), jnp.int32))
    attention = Attention(16, 4, causal=False, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match="causal=False"):
        attention.extend(jnp.zeros((1, 1, 16)), None, jnp.asarray(0), jnp.arange(3))


def test_randomised_positions_are_those_of_the_key():
    lm, tokens = model("randomised rope", None), jnp.arange(12)[None]
    one, other = (lm(tokens, key=jax.random.key(i)) for i in range(2))
    assert np.array_equal(one, lm(tokens, key=jax.random.key(0)))
    assert relative_error(one, other) > 1e-3
    packed = jnp.r_[jnp.arange(5), jnp.arange(7)][None]
    ids = (jnp.arange(12) >= 5).astype(jnp.int32)[None]
    got = lm(tokens, packed, ids, key=jax.random.key(0))
    assert relative_error(got[:, :5], one[:, :5]) < 1e-6  # both documents take the first of the 12 positions drawn
    assert relative_error(got[:, 5:], one[:, 5:]) > 1e-3
