"""The GPU kernels through the whole compiler for an H100, ptxas included, without a GPU.

What exceeds shared memory, or uses what Triton refuses, fails here. Skipped without the packages that
``experiments/gpu_compile.py`` names.
"""

import jax.numpy as jnp
import pytest

from dape_jax import FIRE, Adapt, ALiBi, BlockSizes, KerpleLog, KerplePower, T5Bias
from experiments import gpu_compile

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(gpu_compile.missing() is not None, reason=str(gpu_compile.missing())),
]
MODELS = {"125M": (12, 64), "350M": (16, 64)}
KERNELS = {f"dape_attention_{name}" for name in ("forward", "queries", "keys")}
LARGEST = {"forward": 200, "queries": 1500, "keys": 600}  # bytes spilled by each thread
LARGEST_CONVOLVING = {"forward": 2600, "queries": 6600, "keys": 7700}


def compiled(*args, backward=True, **kwargs):
    program = gpu_compile.compiled(*args, backward=backward, **kwargs)
    text = program.as_text()
    assert {name for name in KERNELS if name in text} == (KERNELS if backward else {"dape_attention_forward"})
    return program


@pytest.mark.parametrize("length", [512, 2048])
@pytest.mark.parametrize("model", MODELS)
def test_models_with_few_registers_spilled(model, length, tmp_path):
    compiled(length, *MODELS[model], KerpleLog(), Adapt(), folder=tmp_path)
    found = gpu_compile.registers(tmp_path)
    assert {row["kernel"] for row in found} == KERNELS
    for row in found:
        assert row["spill_stores"] <= LARGEST[row["kernel"].removeprefix("dape_attention_")], row


@pytest.mark.parametrize("model", MODELS)
def test_models_whose_networks_convolve(model, tmp_path):
    compiled(2048, *MODELS[model], KerpleLog(), Adapt(kernel_width=3), folder=tmp_path)
    found = gpu_compile.registers(tmp_path)
    assert {row["kernel"] for row in found} == KERNELS
    for row in found:
        assert row["spill_stores"] <= LARGEST_CONVOLVING[row["kernel"].removeprefix("dape_attention_")], row


@pytest.mark.parametrize("length", [512, 2048])
@pytest.mark.parametrize("model", MODELS)
def test_forward_alone(model, length):
    compiled(length, *MODELS[model], KerpleLog(), Adapt(), backward=False)


@pytest.mark.parametrize("bias", [None, ALiBi(), KerpleLog(), KerplePower(), T5Bias(), FIRE()], ids=repr)
@pytest.mark.parametrize("adapt", [None, Adapt(), Adapt(per_head=True)], ids=repr)
def test_every_bias(bias, adapt):
    compiled(1000, 12, 64, bias, adapt)


@pytest.mark.parametrize(
    "adapt",
    [Adapt("concat"), Adapt("add_residual"), Adapt("bias_only"), Adapt(width=4), Adapt(width=64),
     Adapt("bias_only", per_head=True), Adapt(width=64, per_head=True)], ids=repr,
)  # fmt: skip
def test_every_network(adapt):
    compiled(1000, 12, 64, KerpleLog(), adapt)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("heads", "d"), [(1, 64), (8, 80), (5, 96), (8, 128), (16, 32)])
@pytest.mark.parametrize("adapt", [None, Adapt()], ids=["plain", "dape"])
def test_odd_shapes(heads, d, dtype, adapt):
    compiled(700, heads, d, KerpleLog(), adapt, dtype=dtype)


@pytest.mark.parametrize(
    ("adapt", "q", "k", "dtype"),
    [(None, 128, 128, jnp.bfloat16), (None, 64, 64, jnp.float32), (Adapt(per_head=True), 16, 32, jnp.float32),
     (Adapt(per_head=True), 16, 32, jnp.bfloat16)], ids=repr,
)  # fmt: skip
def test_largest_block_sizes(adapt, q, k, dtype):
    compiled(700, 8, 128, KerpleLog(), adapt, dtype=dtype, block_sizes=BlockSizes(q, k, 1))


@pytest.mark.parametrize("adapt", [Adapt(), None, Adapt(per_head=True)], ids=repr)
def test_every_argument(adapt):
    ids, positions = jnp.zeros((2, 700), jnp.int32), jnp.zeros((2, 700), jnp.int32)
    compiled(
        700, 12, 64, FIRE(), adapt, batch=2, kv_heads=4, q_segment_ids=ids, k_segment_ids=ids,
        k_valid=jnp.ones((2, 700), bool), q_positions=positions, k_positions=positions,
    )  # fmt: skip


def test_memory_is_linear_in_the_length():
    """At most 6 times q, k, v and the output at 125M shapes, and linear up to 131,072 tokens."""

    def memory(length):
        m = compiled(length, 12, 64, KerpleLog(), Adapt()).memory_analysis()
        return m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes

    used = {n: memory(n) for n in (8192, 32768, 131072)}
    assert used[8192] <= 6 * 4 * 8192 * 12 * 64 * 2
    assert used[131072] - used[32768] <= 4.2 * (used[32768] - used[8192])
