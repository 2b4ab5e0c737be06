import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dape_jax import Adapt, KerpleLog, Learned, RoPE, UserError, YaRN
from dape_jax.data.tokenizer import ByteTokenizer
from dape_jax.nn import TransformerConfig
from dape_jax.sampling import Options, TextStream, choose, generate
from dape_jax.training.model import init_params, make_model

SMALL = {"vocab_size": 31, "num_layers": 2, "num_heads": 4, "width": 16, "mlp_width": 32}
PROMPT = np.asarray([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


def sharp_params(config):
    params = init_params(config, jax.random.key(0))
    params["head"]["kernel"] *= 20.0
    for name in "qko":
        params["blocks"]["attention"][name]["kernel"] *= 10.0
    return params


@pytest.mark.parametrize("parts", [
    {"bias": KerpleLog(), "adapt": Adapt(width=4)}, {"rotary": YaRN(train_length=4)},
], ids=["dape_kerple", "yarn"])  # fmt: skip
def test_greedy_tokens_are_those_of_whole_forwards(parts):
    config = TransformerConfig(**SMALL, **parts)
    params = sharp_params(config)
    got = np.stack(list(generate(config, params, PROMPT, 6, jax.random.key(0), Options(temperature=0))), axis=1)
    model = make_model(config.for_length(11), params)  # YaRN is scaled for all that is read
    whole = np.concatenate([PROMPT, got], axis=1)
    logits = model.logits(model(jnp.asarray(whole)))
    assert np.array_equal(jnp.argmax(logits[:, 4:-1], axis=-1), got)
    assert len(np.unique(got)) > 2


def test_samples_follow_the_key():
    config = TransformerConfig(**SMALL, rotary=RoPE(), random_range=50)
    params = sharp_params(config)
    runs = [np.stack(list(generate(config, params, PROMPT, 8, jax.random.key(i)))) for i in (0, 0, 1)]
    assert np.array_equal(runs[0], runs[1])
    assert not np.array_equal(runs[0], runs[2])


def test_choices_have_the_distribution_they_are_told():
    logits = jnp.log(jnp.asarray([0.05, 0.4, 0.2, 0.3, 0.05]))

    def frequencies(**options):
        many = jnp.broadcast_to(logits, (20_000, 5))
        return np.bincount(choose(many, jax.random.key(0), Options(**options)), minlength=5) / 20_000

    def expect(probabilities):
        return pytest.approx(np.asarray(probabilities) / np.sum(probabilities), abs=0.015)  # four standard deviations

    assert frequencies() == expect([0.05, 0.4, 0.2, 0.3, 0.05])
    assert frequencies(temperature=0.5) == expect(np.asarray([0.05, 0.4, 0.2, 0.3, 0.05]) ** 2)
    assert frequencies(top_k=2) == expect([0, 0.4, 0, 0.3, 0])
    assert np.array_equal(frequencies(top_k=100), frequencies())
    assert frequencies(top_p=0.6) == expect([0, 0.4, 0, 0.3, 0])
    assert frequencies(top_p=0.71) == expect([0, 0.4, 0.2, 0.3, 0])
    assert frequencies(top_p=0.01) == expect([0, 1, 0, 0, 0])
    assert frequencies(top_k=3, top_p=0.75) == expect([0, 0.4, 0, 0.3, 0])
    assert frequencies(temperature=0) == expect([0, 1, 0, 0, 0])
    assert frequencies(temperature=1e-38) == expect([0, 1, 0, 0, 0])


@pytest.mark.parametrize(("options", "message"), [
    ({"temperature": -1.0}, "temperature=-1.0"), ({"temperature": float("nan")}, "temperature=nan"),
    ({"top_k": 0}, "top_k=0: 1 or more"), ({"top_p": 0.0}, "top_p=0.0"), ({"top_p": 1.5}, "top_p=1.5"),
])  # fmt: skip
def test_bad_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        Options(**options)


def test_what_the_model_has_no_positions_for_is_refused_before_anything_is_read():
    config = TransformerConfig(**SMALL, absolute=Learned(8))
    with pytest.raises(UserError, match="a prompt of 5 and 4 more tokens: 9 tokens are more than the 8 positions"):
        generate(config, None, PROMPT, 4, jax.random.key(0))
    with pytest.raises(UserError, match="a prompt of 0 and 4 more tokens: 1 or more of each"):
        generate(config, None, PROMPT[:, :0], 4, jax.random.key(0))


def test_text_appears_with_whole_characters():
    text = "né€𝄞\nx"
    stream = TextStream(ByteTokenizer())
    pieces = [stream.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert pieces[:4] == ["n", "", "é", ""]
    assert stream.push(0xE2) == ""
    assert stream.finish() == "\ufffd"
    broken = TextStream(ByteTokenizer())
    assert [broken.push(0xE2), broken.push(ord("a")), broken.finish()] == ["", "\ufffda", ""]
    assert TextStream(ByteTokenizer()).finish() == ""
