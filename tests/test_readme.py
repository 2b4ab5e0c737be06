"""The recipes of the README run as they stand, and compute what they say."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dape_jax import nn
from dape_jax.nn import linen as dape_linen
from tests.conftest import relative_error

SECTION = re.search(r"## Use it in your own model\n(.*?)\n## ", Path("README.md").read_text(), re.DOTALL)
BARE, NNX, LINEN, REPLACED = re.findall(r"```python\n(.*?)```", SECTION[1], re.DOTALL)


def run(recipe):
    names = {}
    exec(recipe, names)
    return names


def test_the_bare_function():
    made = run(BARE)
    assert made["out"].shape == (2, 512, 12, 64)
    logits = jnp.einsum("bqhd,bkhd->bhqk", made["q"], made["k"], precision="highest") / 8
    distance = jnp.abs(jnp.arange(512)[:, None] - jnp.arange(512))
    bias = jnp.broadcast_to(-jnp.log1p(0.5 * distance), (12, 512, 512))
    w = made["adapt_params"]
    x = jnp.concatenate([logits, jnp.broadcast_to(bias, logits.shape)], axis=1)
    hidden = jnp.einsum("bcqk,cd->bdqk", x, w["w1"][0], precision="highest") + w["b1"][:, None, None]
    f = jnp.einsum("bdqk,dh->bhqk", jnp.where(hidden > 0, hidden, 0.01 * hidden), w["w2"][0], precision="highest")
    a = jnp.where(jnp.tril(jnp.ones((512, 512), bool)), logits + bias + f, -jnp.inf)
    want = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(a), made["v"], precision="highest")
    assert relative_error(made["out"], want) < 1e-5


def test_in_an_nnx_block():
    made = run(NNX)
    assert made["y"].shape == (2, 16, 64)
    assert made["logits"].shape == (2, 4, 16, 16)
    x = jax.random.normal(jax.random.key(0), (2, 16, 64))
    block = made["block"]
    graphdef, state = nnx.split(block)
    grads = jax.grad(lambda s: jnp.sum(nnx.merge(graphdef, s)(x) ** 2))(state)
    nonzero = {"/".join(map(str, path)): bool(np.any(g)) for path, g in nnx.to_flat_state(grads)}
    assert all(value for name, value in nonzero.items() if not name.endswith("dape/b2")), nonzero


def test_in_a_linen_block():
    made = run(LINEN)
    params = made["variables"]["params"]
    assert all(
        type(x) is type(jnp.zeros(())) for x in jax.tree.leaves(params, is_leaf=lambda x: not isinstance(x, dict))
    )
    assert set(params["attention"]) == {"q", "k", "v", "o", "bias", "dape"}
    assert set(params["attention"]["dape"]) == {"w1", "b1", "w2", "b2"}
    x = jax.random.normal(jax.random.key(0), (2, 16, 64))
    block = made["MyLinenBlock"]()
    got = block.apply({"params": params}, x)
    attention = nn.Attention(64, 4, bias=made["KerpleLog"](), adapt=made["Adapt"](), rngs=nnx.Rngs(9))
    nnx.update(attention, params["attention"])
    normed = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
    assert relative_error(got, x + attention(normed)) < 1e-5
    grads = jax.jit(jax.grad(lambda p: jnp.sum(block.apply({"params": p}, x) ** 2)))(params)
    assert np.any(grads["attention"]["q"]["kernel"])
    assert np.any(grads["attention"]["dape"]["w1"])


def test_other_linen_modules_equal_their_namesakes():
    config = nn.TransformerConfig(vocab_size=11, num_layers=2, num_heads=2, width=8, mlp_width=8)
    tokens = jnp.arange(6)[None]
    lm = dape_linen.TransformerLM(config)
    variables = lm.init(jax.random.key(0), tokens)
    own = nn.TransformerLM(config, rngs=nnx.Rngs(3))
    nnx.update(own, variables["params"])
    assert relative_error(lm.apply(variables, tokens), own(tokens)) < 1e-6


def test_in_the_place_of_flaxs_own():
    made = run(REPLACED)
    x = jax.random.normal(jax.random.key(0), (2, 16, 64))
    plain = made["PlainBlock"](64, 4, rngs=nnx.Rngs(0))
    want = plain(x)
    assert relative_error(made["model"](x), want) > 1e-3
    # Without a bias and with a network that answers zero it is the attention that was there before.
    old, new = plain.attention, made["with_dape"](plain.attention, 64, 4, rngs=nnx.Rngs(1))
    plain.attention = nn.Attention(64, 4, rngs=nnx.Rngs(2))
    for name, other in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "out")):
        assert np.array_equal(getattr(new, name).kernel[...].ravel(), getattr(old, other).kernel[...].ravel())
        setattr(plain.attention, name, getattr(new, name))
    assert relative_error(plain(x), want) < 1e-5
