import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dape_jax import (
    FIRE,
    Adapt,
    ALiBi,
    KerpleLog,
    Learned,
    RoPE,
    Sinusoidal,
    T5Bias,
    UserError,
    adapt,
    biases,
    dape_attention,
    rope,
)  # fmt: skip
from dape_jax.nn import DAPE, Attention, PositionBias, TransformerConfig, TransformerLM
from dape_jax.nn import attention as attention_module
from tests.conftest import relative_error

SMALL = {"vocab_size": 31, "num_layers": 2, "num_heads": 4, "width": 16, "mlp_width": 32}
POSITIONS = [
    {}, {"rotary": RoPE()}, {"bias": ALiBi(), "num_kv_heads": 2}, {"bias": KerpleLog(), "adapt": Adapt()},
    {"bias": T5Bias()},
    {"bias": FIRE(activation="leaky_relu"), "adapt": Adapt(per_head=True)}, {"rotary": RoPE(), "adapt": Adapt()},
    {"absolute": Learned(13)}, {"absolute": Sinusoidal()},
]  # fmt: skip


def model(**kwargs):
    return TransformerLM(TransformerConfig(**{**SMALL, **kwargs}), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("kwargs", POSITIONS, ids=str)
def test_later_tokens_do_not_reach_earlier_ones(kwargs):
    lm = model(**kwargs)
    tokens = jax.random.randint(jax.random.key(0), (2, 13), 0, 31)
    changed = tokens.at[:, 8:].set((tokens[:, 8:] + 1) % 31)
    before, after = lm(tokens), lm(changed)
    assert np.array_equal(before[:, :8], after[:, :8])
    assert not np.any(np.all(np.isclose(before[:, 8:], after[:, 8:]), axis=-1))


@pytest.mark.parametrize("kwargs", POSITIONS, ids=str)
def test_every_parameter_gets_a_gradient(kwargs):
    lm = model(**kwargs)
    tokens = jax.random.randint(jax.random.key(0), (2, 13), 0, 31)
    cotangent = jax.random.normal(jax.random.key(1), (2, 13, 31))
    grads = nnx.grad(lambda m: jnp.vdot(m.logits(m(tokens)), cotangent))(lm)
    for path, g in jax.tree.leaves_with_path(nnx.to_pure_dict(grads)):
        name = jax.tree_util.keystr(path)
        assert np.all(np.isfinite(g)), name
        # b2 of the DAPE network, and the key bias, add a constant to a row of logits: the softmax cancels them.
        assert np.any(np.asarray(g) != 0) or name.endswith("['dape']['b2']"), name


def test_scanned_blocks_equal_blocks_one_by_one():
    lm = model(bias=KerpleLog(), adapt=Adapt())
    tokens = jnp.arange(9, dtype=jnp.int32)[None]
    graphdef, state = nnx.split(lm.blocks)
    x = lm.embed(tokens)
    for layer in range(2):
        x = nnx.merge(graphdef, jax.tree.map(lambda a, layer=layer: a[layer], state))(x)
    assert relative_error(lm(tokens), lm.final_norm(x)) < 1e-6
    first, second = lm.blocks.attention.q.kernel[...]
    assert not np.allclose(first, second)


def test_attention_by_hand():
    attention = Attention(16, 4, bias=KerpleLog(), adapt=Adapt(width=8), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (2, 7, 16))
    q, k, v = (f(x).reshape(2, 7, 4, 4) for f in (attention.q, attention.k, attention.v))
    bias = attention.bias(jnp.arange(7), jnp.arange(7))
    logits = attention.dape(jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") / 2, bias)
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((7, 7), bool)), logits, -jnp.inf))
    out = jnp.einsum("bhqk,bkhd->bqhd", weights, v, precision="highest").reshape(2, 7, 16)
    assert relative_error(attention(x), attention.o(out)) < 1e-6


def test_rotary_attention_by_hand():
    attention = Attention(16, 4, rotary=RoPE(100.0), rngs=nnx.Rngs(0))
    x, positions = jax.random.normal(jax.random.key(0), (1, 5, 16)), jnp.asarray([3, 4, 5, 6, 900])
    q, k, v = (f(x).reshape(1, 5, 4, 4) for f in (attention.q, attention.k, attention.v))
    out = dape_attention(rope(q, positions, RoPE(100.0)), rope(k, positions, RoPE(100.0)), v, backend="reference")
    assert relative_error(attention(x, positions), attention.o(out.reshape(1, 5, 16))) < 1e-6


def test_modules_are_thin():
    bias, dape = PositionBias(T5Bias(), 3, rngs=nnx.Rngs(0)), DAPE(Adapt(), 3, rngs=nnx.Rngs(1))
    positions = jnp.arange(5)
    values = bias(positions, positions)
    assert np.array_equal(values, biases.bias_values(T5Bias(), bias.params(), 3, positions, positions))
    s = jax.random.normal(jax.random.key(0), (2, 3, 5, 5))
    params = dape.params()
    want = adapt.adapt_logits(Adapt(), params, s.swapaxes(0, 1), adapt.bias_terms(Adapt(), params, values))
    assert np.array_equal(dape(s, values), want.swapaxes(0, 1))
    with pytest.raises(UserError, match="called without a bias"):
        dape(s)


def test_the_parameter_tree():
    state = nnx.to_pure_dict(nnx.state(model(bias=KerpleLog(), adapt=Adapt(width=8))))
    shapes = {"/".join(k.key for k in path): x.shape for path, x in jax.tree.leaves_with_path(state)}
    assert shapes == {
        "embed/embedding": (31, 16), "head/kernel": (16, 31), "final_norm/scale": (16,), "final_norm/bias": (16,),
        **{f"blocks/attention/{n}/kernel": (2, 16, 16) for n in "qkvo"},
        **{f"blocks/attention/{n}/bias": (2, 16) for n in "qkvo"},
        "blocks/attention/bias/p": (2, 4), "blocks/attention/bias/a": (2, 4),
        "blocks/attention/dape/w1": (2, 1, 8, 8), "blocks/attention/dape/b1": (2, 8),
        "blocks/attention/dape/w2": (2, 1, 8, 4), "blocks/attention/dape/b2": (2, 4),
        **{f"blocks/{n}_norm/{p}": (2, 16) for n in ("attention", "mlp") for p in ("scale", "bias")},
        "blocks/mlp_in/kernel": (2, 16, 32), "blocks/mlp_in/bias": (2, 32),
        "blocks/mlp_out/kernel": (2, 32, 16), "blocks/mlp_out/bias": (2, 16),
    }  # fmt: skip
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(state))


def test_initial_scales_are_the_papers():
    big = model(vocab_size=500, num_layers=3, width=128, mlp_width=512)
    small, wang = (2 / (5 * 128)) ** 0.5, 2 / (3 * 128**0.5)
    for kernel, std in (
        (big.embed.embedding, small), (big.head.kernel, small), (big.blocks.attention.q.kernel, small),
        (big.blocks.mlp_in.kernel, small), (big.blocks.attention.o.kernel, wang), (big.blocks.mlp_out.kernel, wang),
    ):  # fmt: skip
        assert abs(float(kernel[...].std()) / std - 1) < 0.02
    assert not np.any(big.blocks.mlp_in.bias[...])


def test_bfloat16_activations_and_float32_parameters():
    lm, exact = model(bias=KerpleLog(), adapt=Adapt(), dtype="bfloat16"), model(bias=KerpleLog(), adapt=Adapt())
    tokens = jax.random.randint(jax.random.key(0), (2, 9), 0, 31)
    hidden = lm(tokens)
    assert hidden.dtype == jnp.bfloat16
    assert lm.logits(hidden).dtype == jnp.float32
    assert relative_error(hidden, exact(tokens)) < 2e-2


@pytest.mark.parametrize(("kwargs", "message"), [
    ({"num_heads": 3}, "width=16 is not divisible by num_heads=3"),
    ({"num_layers": 0}, "num_layers=0"),
    ({"num_heads": 16, "rotary": RoPE()}, "RoPE needs an even number"),
    ({"num_kv_heads": 3}, "num_kv_heads=3"),
    ({"absolute": Learned(20), "random_range": 30}, "random_range=30: .* the learned table has 20"),
])  # fmt: skip
def test_bad_shapes_are_refused(kwargs, message):
    with pytest.raises(UserError, match=message):
        TransformerConfig(**{**SMALL, **kwargs})
    if kwargs.keys() == {"num_heads"}:
        with pytest.raises(UserError, match=message):
            Attention(16, kwargs["num_heads"], rngs=nnx.Rngs(0))


def test_packed_rows_equal_their_parts():
    lm = model(bias=KerpleLog(), adapt=Adapt(width=4))
    a, b = jnp.arange(5)[None], 7 + jnp.arange(6)[None]
    positions, ids = jnp.r_[jnp.arange(5), jnp.arange(6)], jnp.asarray([[0] * 5 + [1] * 6], jnp.int32)
    packed = lm(jnp.concatenate([a, b], 1), positions, ids)
    assert relative_error(packed, jnp.concatenate([lm(a), lm(b)], 1)) < 1e-5


def test_grouped_heads_equal_repeated_ones():
    grouped, full = (Attention(16, 4, num_kv_heads=n, bias=KerpleLog(), rngs=nnx.Rngs(0)) for n in (2, 4))
    full.q, full.o, full.bias = grouped.q, grouped.o, grouped.bias
    for name in ("k", "v"):
        own, wide = getattr(grouped, name), getattr(full, name)
        wide.kernel[...] = jnp.repeat(own.kernel[...].reshape(16, 2, 4), 2, axis=1).reshape(16, 16)
        wide.bias[...] = jnp.repeat(own.bias[...].reshape(2, 4), 2, axis=0).ravel()
    x = jax.random.normal(jax.random.key(0), (2, 7, 16))
    assert relative_error(grouped(x), full(x)) < 1e-6
    assert grouped.k.kernel.shape == (16, 8)


def test_attention_passes_on_causal_and_backend(monkeypatch):
    seen = {}
    monkeypatch.setattr(attention_module, "dape_attention", lambda q, k, v, **kwargs: seen.update(kwargs) or v)
    Attention(16, 4, causal=False, backend="reference", rngs=nnx.Rngs(0))(jnp.zeros((1, 3, 16)))
    assert (seen["causal"], seen["backend"]) == (False, "reference")


def test_block_by_hand():
    graphdef, state = nnx.split(model(bias=KerpleLog()).blocks)
    block = nnx.merge(graphdef, jax.tree.map(lambda x: x[0], state))
    x = 3 * jax.random.normal(jax.random.key(0), (1, 5, 16)) + 1

    def norm(x):
        return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)

    y = x + block.attention(norm(x))
    m = norm(y) @ block.mlp_in.kernel[...]
    gelu = 0.5 * m * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (m + 0.044715 * m**3)))
    assert relative_error(block(x), y + gelu @ block.mlp_out.kernel[...]) < 1e-5
