"""The TPU kernels through the whole TPU compiler, ahead of time and without a TPU; skipped where libtpu is missing.

``pip install "jax[tpu]"`` brings it. What does not fit VMEM, or uses a layout that Mosaic refuses, fails here. A few
representative programs are among the fast tests; with ``-m "slow or not slow" -s`` this file prints what
results/compile_tpu.txt keeps.
"""

import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from configs import chomsky, lm_125m
from dape_jax import FIRE, Adapt, ALiBi, KerpleLog, KerplePower, T5Bias, dape_attention, sharding
from dape_jax import config as config_lib
from dape_jax.attention import compile_for
from dape_jax.data.chomsky import get_task
from dape_jax.evaluation import extrapolation
from dape_jax.training import step as step_lib
from dape_jax.training.objective import NextToken
from dape_jax.training.optimizer import make_optimizer
from dape_jax.training.problem import Chomsky
from experiments.kernel_programs import MODELS, TOPOLOGIES

pytest.importorskip("libtpu", reason="libtpu is not installed")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # no metadata server
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # no lock file


@functools.cache
def device(kind):
    return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[kind]).devices[0]


def compiled(kind, length, heads, d, bias, adapt, backward=True, dtype=jnp.bfloat16, batch=1, kv_heads=None, **kwargs):
    """The compiled attention call, or its output and all gradients."""
    on = NamedSharding(Mesh(np.array([device(kind)]), ("x",)), PartitionSpec())

    def arguments():
        key = jax.random.key(0)
        q, k = (jnp.zeros((batch, length, n, d), dtype) for n in (heads, kv_heads or heads))
        bias_params = {} if bias is None else bias.init(key, heads)
        return (q, k, k, bias_params, {} if adapt is None else adapt.init(key, heads, bias is not None)), q

    shapes = jax.eval_shape(arguments)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on), shapes)

    def attend(q, k, v, bias_params, adapt_params):
        return dape_attention(
            q, k, v, bias=bias, bias_params=bias_params, adapt=adapt, adapt_params=adapt_params,
            backend="pallas_tpu", **kwargs,
        )  # fmt: skip

    def both(arrays, cotangent):
        if not backward:
            return attend(*arrays)
        out, vjp = jax.vjp(attend, *arrays)
        return out, vjp(cotangent)

    with compile_for("tpu", device(kind).device_kind):
        program = jax.jit(both).lower(*shapes).compile()
    assert program.as_text().count('custom_call_target="tpu_custom_call"') == 1 + backward
    what = f"{kind}, {batch} x {length}, {heads} heads of {d}, {jnp.dtype(dtype).name}, {bias}, {adapt}"
    print(f"{what}, forward{' and backward' * backward}: {memory(program) / 2**20:.0f} MiB in all")  # kept with -s
    return program


def memory(program):
    """Bytes of arguments, results and what is held between, of the whole program."""
    m = program.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes


@functools.cache
def used(kind, model, length, backward):
    return memory(compiled(kind, length, *MODELS[model], KerpleLog(), Adapt(), backward))


def cases(every, representative):
    """All of them, slow but for a few."""
    return [pytest.param(*case, marks=() if case in representative else pytest.mark.slow) for case in every]


MODELS_AND_LENGTHS = cases(
    itertools.product(TOPOLOGIES, MODELS, [512, 2048, 8192, 32768], ["forward", "backward"]),
    [("v4", "125M", 512, "backward"), ("v5e", "125M", 8192, "backward"), ("v5p", "125M", 512, "forward"),
     ("v6e", "350M", 512, "backward")],
)  # fmt: skip


@pytest.mark.parametrize(("kind", "model", "length", "last"), MODELS_AND_LENGTHS)
def test_models_and_lengths(kind, model, length, last):
    if (kind, model) == ("v4", "6.7B"):
        pytest.skip("16 MiB of VMEM do not hold 32 heads of 128; refused by name")
    used(kind, model, length, last == "backward")


ADAPTS = [None, Adapt(), Adapt("concat"), Adapt("add_residual"), Adapt(per_head=True), Adapt(kernel_width=3),
          Adapt(width=4), Adapt(width=64), Adapt("bias_only")]  # fmt: skip
BIASES = [None, ALiBi(), KerpleLog(), KerplePower(), T5Bias(), FIRE()]


@pytest.mark.parametrize(
    ("bias", "adapt"),
    cases(
        [c for c in itertools.product(BIASES, ADAPTS) if c != (None, Adapt("bias_only"))],
        [(FIRE(), Adapt()), (T5Bias(), Adapt(kernel_width=3)), (KerpleLog(), None)],
    ),
    ids=repr,
)
def test_every_bias_with_every_network(bias, adapt):
    compiled("v5e", 1000, 12, 64, bias, adapt)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "d"), [(1, 64), (4, 128), (5, 96), (25, 64), (25, 80), (64, 32), (64, 128)])
def test_odd_shapes(heads, d, dtype):
    compiled("v5e", 700, heads, d, KerpleLog(), Adapt(width=16), dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "heads", "d", "adapt", "dtype"),
    [("v5e", 25, 64, Adapt(width=64, per_head=True), jnp.bfloat16),
     ("v5e", 64, 128, Adapt(width=64, per_head=True, kernel_width=3), jnp.float32),
     ("v5p", 64, 128, Adapt(), jnp.float32),
     ("v5p", 18, 64, Adapt(width=64, per_head=True), jnp.bfloat16),
     ("v4", 12, 64, Adapt(), jnp.float32),
     ("v4", 12, 128, Adapt(width=64), jnp.float32),
     ("v4", 4, 128, Adapt(width=64, per_head=True), jnp.bfloat16),
     ("v4", 12, 64, Adapt(per_head=True), jnp.float32),
     ("v4", 12, 64, Adapt(kernel_width=3), jnp.float32)],
    ids=repr,
)  # fmt: skip
def test_shapes_that_need_most_of_the_vmem(kind, heads, d, adapt, dtype):
    compiled(kind, 700, heads, d, KerpleLog(), adapt, dtype=dtype)


@pytest.mark.parametrize("adapt", [Adapt(), pytest.param(Adapt(kernel_width=3), marks=pytest.mark.slow)], ids=repr)
def test_every_argument(adapt):
    ids, positions = jnp.zeros((2, 700), jnp.int32), jnp.zeros((2, 700), jnp.int32)
    compiled(
        "v5e", 700, 12, 64, FIRE(), adapt, batch=2, kv_heads=4, q_segment_ids=ids, k_segment_ids=ids,
        k_valid=jnp.ones((2, 700), bool), q_positions=positions, k_positions=positions,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", TOPOLOGIES)
def test_memory_is_linear_in_the_length(kind):
    """At most 6 times q, k, v and the output at 125M shapes, and linear up to 131,072 tokens."""
    of = {n: used(kind, "125M", n, True) for n in (8192, 32768, 131072)}
    assert of[8192] <= 6 * 4 * 8192 * 12 * 64 * 2
    assert of[131072] - of[32768] <= 4.2 * (of[32768] - of[8192])


@pytest.mark.slow
@pytest.mark.parametrize(("length", "rows"), [(512, 32), (8192, 4)], ids=["training", "evaluation"])
def test_whole_steps_of_the_125m_model(length, rows):
    """A training step, and the scoring of an evaluation, sharded over four chips, with the kernels inside."""
    config = config_lib.from_mapping(lm_125m.get_config("dape_kerple"))
    model = config_lib.transformer(config, 50257, "tpu", sharding.BATCH_AXES)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES["v5e"]).devices
    mesh = sharding.make_mesh(2, 2, devices=devices)
    optimizer = make_optimizer(config.optimizer, config.training.steps)
    with (
        compile_for("tpu", devices[0].device_kind),
        jax.numpy_dtype_promotion("standard"),  # Flax's own layers promote
        jax.numpy_rank_promotion("allow"),
        jax.set_mesh(mesh),
    ):
        assert model.attention_backend(length) == "pallas_tpu"
        _, abstract = step_lib.init_state(model, optimizer, 0, mesh)
        tokens = jax.ShapeDtypeStruct((rows, length + 1), jnp.int32, sharding=sharding.batch_sharding(mesh))
        if length == 512:
            step = step_lib.compile_step(model, NextToken(None), optimizer, abstract, mesh, 1, 0)
            program = step.lower(abstract, tokens, jax.ShapeDtypeStruct((), jnp.int32)).compile()
        else:
            key = jax.eval_shape(lambda: jax.random.key(0))
            program = extrapolation._scorer(model, 256, mesh).lower(abstract.params, tokens, key).compile()
    text = program.as_text()
    assert "dape_attention_forward" in text
    assert ("dape_attention_backward" in text) == (length == 512)
    print(f"{length}: {program.memory_analysis().temp_size_in_bytes / 2**20:.0f} MiB a chip besides the arguments")


@pytest.mark.slow
@pytest.mark.parametrize("position", ["dape_kerple", "randomised_rope"])
def test_a_training_step_of_the_chomsky_model_at_the_papers_size(position):
    """5 layers of 256, 8 heads, 128 rows of even_pairs, on one chip."""
    config = chomsky.get_config(position)
    config.mesh.data = 1
    config = config_lib.from_mapping(config)
    problem = Chomsky(config, get_task("even_pairs"))
    model = config_lib.encoder(config, 3, 2, problem.row_length, "tpu", sharding.BATCH_AXES)
    mesh = sharding.make_mesh(1, 1, devices=[device("v5e")])
    optimizer = make_optimizer(config.optimizer, config.training.steps)
    with (
        compile_for("tpu", device("v5e").device_kind),
        jax.numpy_dtype_promotion("standard"),  # Flax's own layers promote
        jax.numpy_rank_promotion("allow"),
        jax.set_mesh(mesh),
    ):
        assert model.attention_backend(problem.row_length) == "pallas_tpu"
        _, abstract = step_lib.init_state(model, optimizer, 0, mesh)
        batch = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding.batch_sharding(mesh))
            for name, x in next(problem.batches(0, 0, 1)).items()
        }
        step = step_lib.compile_step(model, problem.objective, optimizer, abstract, mesh, 1, 0)
        program = step.lower(abstract, batch, jax.ShapeDtypeStruct((), jnp.int32)).compile()
    assert "dape_attention_backward" in program.as_text()
    print(f"{position}: {program.memory_analysis().temp_size_in_bytes / 2**20:.0f} MiB besides the arguments")
