import importlib
import json
from pathlib import Path

import jax
import pytest
from flax import nnx

from configs import base
from dape_jax import config as config_lib
from dape_jax.absolute import Learned, Sinusoidal
from dape_jax.adapt import Adapt
from dape_jax.biases import FIRE, ALiBi, KerpleLog, T5Bias
from dape_jax.errors import UserError
from dape_jax.nn import TransformerLM
from dape_jax.rotary import RoPE, YaRN

CONFIGS = sorted(p.stem for p in Path("configs").glob("*.py") if p.stem != "__init__")
POSITIONS = [
    f"{dape}{drawn}{name}" for dape in ("", "dape_") for drawn in ("", "randomised_") for name in config_lib.LABELS
]


@pytest.mark.parametrize(("name", "position"), [
    *(("quickstart", position) for position in POSITIONS),
    *((name, position) for name in CONFIGS for position in ("kerple_power", "dape_fire", "randomised_rope", "learned")
      if name != "quickstart"),
])  # fmt: skip
def test_every_configuration_and_every_position_is_instantiated(name, position):
    mapping = importlib.import_module(f"configs.{name}").get_config(position)
    config = config_lib.from_mapping(mapping)
    model = config_lib.transformer(config, vocab_size=257, platform="cpu")
    shapes = nnx.eval_shape(lambda: TransformerLM(model, rngs=nnx.Rngs(0)))
    tokens, key = jax.ShapeDtypeStruct((2, 16), "int32"), jax.eval_shape(lambda: jax.random.key(0))
    hidden = jax.eval_shape(lambda m, t, k: m(t, key=k), shapes, tokens, key)
    assert hidden.shape == (2, 16, config.model.width)
    assert config_lib.from_mapping(json.loads(json.dumps(config_lib.to_dict(config)))) == config
    assert model.random_range is None or model.random_range >= max(config.evaluation.lengths)


@pytest.mark.parametrize(("name", "layers", "width", "heads", "millions"), [
    ("lm_125m", 12, 768, 12, 125), ("lm_350m", 24, 1024, 16, 350), ("lm_2_7b", 32, 2560, 32, 2700),
    ("lm_6_7b", 32, 4096, 32, 6700),
])  # fmt: skip
def test_sizes_of_the_papers_models(name, layers, width, heads, millions):
    config = config_lib.from_mapping(importlib.import_module(f"configs.{name}").get_config("kerple"))
    model = config_lib.transformer(config, vocab_size=50257, platform="tpu")
    state = nnx.state(nnx.eval_shape(lambda: TransformerLM(model, rngs=nnx.Rngs(0))), nnx.Param)
    count = sum(x.size for x in jax.tree.leaves(state))
    by_hand = 2 * 50257 * width + layers * (12 * width**2 + 13 * width + 2 * heads) + 2 * width
    assert count == by_hand
    assert 0.95 < (count - 50257 * width) / (1e6 * millions) < 1.05  # named without the untied output
    assert model.dtype == "bfloat16"


def test_base_holds_every_field():
    def names(tree, prefix=""):
        for name, value in tree.items():
            yield from names(value, f"{prefix}{name}.") if hasattr(value, "items") else [prefix + name]

    config = config_lib.from_mapping(base.get_config())
    assert sorted(names(base.get_config())) == sorted(names(config_lib.to_dict(config)))


def test_positions_become_parts():
    def parts(position, **model):
        config = base.get_config(position)
        config.model.update(model)
        model = config_lib.transformer(config_lib.from_mapping(config), 257, "cpu")
        return model.bias, model.rotary, model.adapt

    assert parts("nope") == (None, None, None)
    assert parts("rope") == (None, RoPE(), None)
    assert parts("dape_rope") == (None, RoPE(), Adapt())
    assert parts("alibi") == (ALiBi(), None, None)
    assert parts("dape_kerple", dape={"width": 8, "variant": "concat"}) == (KerpleLog(), None, Adapt("concat", 8))
    assert parts("t5", t5={"num_buckets": 8}) == (T5Bias(8), None, None)
    assert parts("fire") == (FIRE(init_length=128.0), None, None)
    assert parts("dape_fire", fire={"init_length": 99.0})[0] == FIRE(init_length=99.0, activation="leaky_relu")


BAD = [
    ("model.heads", 4, "model.heads is no field of the configuration"),
    ("model.num_head", 4, "did you mean 'num_heads'"),
    ("modle", {}, "did you mean 'model'"),
    ("model.position", "dape_kerpel", "did you mean 'dape_kerple'"),
    ("model.position", 3, "model.position=3 is a int; str is needed"),
    ("model.dape.variant", "concat-residual", "did you mean 'concat_residual'"),
    ("model.dape.width", 0, "width=0: a positive integer"),
    ("model.num_heads", 7, "width=128 is not divisible by num_heads=7"),
    ("model.num_heads", 0, "num_heads=0: 1 or more"),
    ("model.width", 8, "odd; RoPE needs an even number"),
    ("model.dtype", "float16", "model.dtype='float16'"),
    ("model.attention_backend", "pallas", "model.attention_backend='pallas': is unknown"),
    ("model.remat", "attention", "did you mean 'attention_saved'"),
    ("training.accumulate", 0, "training.accumulate=0: 1 or more"),
    ("training.tensorboard", 1, "training.tensorboard=1 is a int; bool is needed"),
    ("training.steps", 1.5, "training.steps=1.5 is a float; int is needed"),
    ("training.steps", True, "training.steps=True is a bool; int is needed"),
    ("training.steps", 0, "training.steps=0: 1 or more"),
    ("training.seed", -1, "training.seed=-1"),
    ("optimizer.learning_rate", float("nan"), "optimizer.learning_rate=nan"),
    ("optimizer.learning_rate", "fast", "optimizer.learning_rate='fast' is a str; float is needed"),
    ("optimizer.b1", 1.0, "optimizer.b1=1.0"),
    ("data.sequence_length", 0, "data.sequence_length=0"),
    ("data.packing", "segment", "data.packing='segment': is unknown; did you mean 'segments'?"),
    ("data.skip_broken", 1, "data.skip_broken=1 is a int; bool is needed"),
    ("data.test_fraction", 0.97, "data.test_fraction=0.97"),
    ("evaluation.lengths", (), "at least one length"),
    ("evaluation.lengths", (128, 0), "lengths from 1 to 2**31 - 1 are needed"),
    ("evaluation.lengths", (128, 1.5), "evaluation.lengths=(128, 1.5): a list of integers is needed"),
    ("evaluation.lengths", "128", "a list of integers is needed"),
    ("evaluation.lengths", (128, 128), "each length once"),
    ("evaluation.lengths", (10**30,), "lengths from 1 to 2**31 - 1"),
    ("evaluation.k", 500, "the shortest of evaluation.lengths or less"),
    ("optimizer.eps", float("inf"), "optimizer.eps=inf"),
    ("optimizer.weight_decay", float("inf"), "optimizer.weight_decay=inf"),
    ("model.rope_base", float("inf"), "model.rope_base=inf"),
    ("model.fire.init_length", 0.0, "model.fire.init_length=0.0"),
    ("model.dape.kernel_width", 2, "kernel_width=2: a positive odd integer"),
    ("data.cache_dir", "", "data.cache_dir=''"),
    ("evaluation.k", 0, "evaluation.k=0"),
    ("mesh.data", 0, "mesh.data=0"),
    ("model.num_kv_heads", 3, "num_kv_heads=3 does not divide num_heads=8"),
    ("model.yarn.beta_slow", 0.0, "model.yarn.beta_slow=0.0"),
    ("model.yarn.beta_fast", 1.0, "model.yarn.beta_fast=1.0: more than beta_slow"),
    ("model.position", "randomized_rope", "did you mean 'randomised_rope'"),
    ("mesh", 4, "mesh=4: a section"),
]


@pytest.mark.parametrize(("field", "value", "message"), BAD)
def test_bad_values_get_one_line(field, value, message):
    mapping = config_lib.to_dict(config_lib.from_mapping(base.get_config("rope")))
    *sections, name = field.split(".")
    section = mapping
    for part in sections:
        section = section[part]
    section[name] = value
    with pytest.raises(UserError) as error:
        config_lib.from_mapping(mapping)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_field_is_named():
    with pytest.raises(UserError, match=r"training.steps is missing"):
        config_lib.from_mapping({**base.get_config().to_dict(), "training": {"batch_size": 1}})


@pytest.mark.parametrize(
    ("position", "field"), [("learned", "learned.length"), ("randomised_rope", "randomised.range")]
)
def test_tables_and_ranges_hold_a_training_sequence_where_they_are_used(position, field):
    section, name = field.split(".")
    for used in (position, "rope"):
        mapping = base.get_config(used)
        mapping.model[section][name] = 127
        mapping.evaluation.lengths = (64,)
        if used == "rope":
            config_lib.from_mapping(mapping)
            continue
        with pytest.raises(UserError, match=f"model.{field}=127: data.sequence_length=128 or more is needed"):
            config_lib.from_mapping(mapping)


def test_randomised_positions_reach_every_length_that_is_scored():
    mapping = base.get_config("randomised_rope")
    mapping.evaluation.lengths = (128, 4096)
    with pytest.raises(UserError, match=r"evaluation.lengths=\(128, 4096\): lengths up to model.randomised.range=2048"):
        config_lib.from_mapping(mapping)
    mapping.evaluation.lengths, mapping.model.randomised.range = (128, 512), None
    assert config_lib.transformer(config_lib.from_mapping(mapping), 257, "cpu").random_range == 4 * 128


def test_labels():
    got = [config_lib.method_label(p) for p in ("dape_kerple", "randomised_rope", "dape_randomised_alibi", "t5")]
    assert got == ["DAPE-Kerple", "Randomised RoPE", "DAPE-randomised ALiBi", "T5 bias"]


def test_every_field_of_the_model_reaches_it():
    def model(position, **sections):
        mapping = base.get_config(position)
        for name, value in sections.items():
            mapping.model[name].update(value) if isinstance(value, dict) else mapping.model.update({name: value})
        return config_lib.transformer(config_lib.from_mapping(mapping), 257, "cpu")

    made = model(
        "dape_fire", attention_backend="reference", mlp_ratio=3, dtype="bfloat16", remat="full", fire={"width": 6},
        dape={"per_head": True, "width": 5, "variant": "concat", "kernel_width": 3},
    )  # fmt: skip
    assert (made.backend, made.mlp_width, made.dtype, made.remat) == ("reference", 384, "bfloat16", "full")
    assert made.adapt == Adapt("concat", 5, True, 3)
    assert made.bias == FIRE(width=6, init_length=128.0, activation="leaky_relu")
    assert model("rope", num_kv_heads=2).num_kv_heads == 2
    yarn = model("yarn", yarn={"beta_fast": 16.0, "beta_slow": 2.0}, rope_base=500.0)
    assert yarn.rotary == YaRN(500.0, 128, 1.0, 16.0, 2.0)
    assert model("learned").absolute == Learned(128)
    assert model("learned", learned={"length": 300}).absolute == Learned(300)
    assert model("randomised_learned").absolute == Learned(2048)
    assert model("sinusoidal").absolute == Sinusoidal()
    drawn = model("dape_randomised_kerple", randomised={"range": 4096})
    assert (drawn.bias, drawn.random_range, drawn.adapt) == (KerpleLog(), 4096, Adapt())
    assert model("rope", rope_base=500.0).rotary == RoPE(500.0)
    assert model("t5", t5={"max_distance": 99}).bias == T5Bias(32, 99)
