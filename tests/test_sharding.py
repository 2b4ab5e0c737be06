import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from dape_jax import FIRE, Adapt, ALiBi, KerpleLog, UserError, dape_attention, sharding
from dape_jax.attention import compile_for
from dape_jax.nn import TransformerConfig
from dape_jax.training import step
from tests.attention.cases import KERNELS
from tests.conftest import relative_error

MODEL = TransformerConfig(
    vocab_size=32, num_layers=2, num_heads=4, width=16, mlp_width=32, bias=KerpleLog(), adapt=Adapt(width=8)
)


def test_eight_devices_are_here():
    assert len(jax.devices()) == 8


def test_every_parameter_has_its_place():
    mesh = sharding.make_mesh(2, 4)
    shapes = jax.eval_shape(lambda: step.init_params(MODEL, jax.random.key(0)))
    tree = sharding.tree_sharding(mesh, shapes)
    specs = {sharding.path_string(path): s.spec for path, s in jax.tree.leaves_with_path(tree)}
    split = {name: spec for name, spec in specs.items() if any(spec)}
    assert split == {
        "embed/embedding": P(None, "fsdp"),
        "head/kernel": P("fsdp", None),
        **{f"blocks/attention/{n}/kernel": P(None, "fsdp", None) for n in "qkv"},
        "blocks/attention/o/kernel": P(None, None, "fsdp"),
        "blocks/mlp_in/kernel": P(None, "fsdp", None),
        "blocks/mlp_out/kernel": P(None, None, "fsdp"),
    }
    assert specs["blocks/attention/dape/w1"] == P()


@pytest.mark.parametrize(("data", "fsdp", "message"), [
    (-1, 3, "mesh.fsdp=3 does not divide the 8 devices"), (4, 4, "are 16 devices; there are 8"),
])  # fmt: skip
def test_bad_meshes_are_named(data, fsdp, message):
    with pytest.raises(UserError, match=message):
        sharding.make_mesh(data, fsdp)


def test_a_width_that_does_not_split_is_named():
    with pytest.raises(UserError, match=r"head/kernel \(12, 5\): an axis of 12 cannot be split over mesh.fsdp=8"):
        sharding.tree_sharding(sharding.make_mesh(1, 8), {"head": {"kernel": jnp.zeros((12, 5))}})


@pytest.mark.parametrize("backend", ["blockwise", "reference", *KERNELS])
def test_sharded_attention_equals_one_device(backend):
    """Outputs, and gradients of replicated parameters summed exactly once."""
    bias, adapt = KerpleLog(), Adapt(width=8)
    keys = jax.random.split(jax.random.key(0), 6)
    q, k, v, cotangent = (jax.random.normal(key, (8, 12, 4, 8)) for key in keys[:4])
    params = bias.init(keys[4], 4), adapt.init(keys[5], 4)
    k_valid = jnp.asarray(np.arange(12)[None] < np.arange(5, 13)[:, None])

    def attend(batch_axes):
        def f(q, k, v, bias_params, adapt_params):
            with compile_for("interpret") if backend.startswith("pallas") else contextlib.nullcontext():
                return dape_attention(
                    q, k, v, bias=bias, bias_params=bias_params, adapt=adapt, adapt_params=adapt_params,
                    k_valid=k_valid, backend=backend, batch_axes=batch_axes,
                )  # fmt: skip

        out, vjp = jax.vjp(f, q, k, v, *params)
        return out, vjp(cotangent)

    want = jax.jit(lambda: attend(()))()
    mesh = sharding.make_mesh(2, 4)
    with jax.set_mesh(mesh):
        got = jax.jit(lambda: attend(("data", "fsdp")))()
        with pytest.raises(UserError, match="batch of 7 rows cannot be split over 8 devices"):
            dape_attention(q[:7], k[:7], v[:7], batch_axes=("data", "fsdp"))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if np.abs(w).max() > 1e-4:  # the gradient of b2 is rounding
            assert relative_error(g, w) < 1e-6
    assert not np.any(got[1][4]["b2"]) or backend == "reference"


@pytest.mark.parametrize("backend", ["blockwise", "reference", *KERNELS])
@pytest.mark.parametrize(
    ("bias", "adapt"), [(ALiBi(), None), (FIRE(width=4), Adapt(width=3, per_head=True)), (None, None)], ids=repr
)
def test_split_heads_equal_one_device(backend, bias, adapt):
    """ALiBi's slopes depend on the place of a head among all; a part of FIRE's parameters belongs to all heads."""
    keys = jax.random.split(jax.random.key(0), 6)
    q, cotangent = (jax.random.normal(key, (2, 12, 8, 4)) for key in keys[:2])
    k, v = (jax.random.normal(key, (2, 12, 4, 4)) for key in keys[2:4])
    params = {} if bias is None else bias.init(keys[4], 8), {} if adapt is None else adapt.init(keys[5], 8)

    def attend(**axes):
        def f(q, k, v, bias_params, adapt_params):
            with compile_for("interpret") if backend.startswith("pallas") else contextlib.nullcontext():
                return dape_attention(
                    q, k, v, bias=bias, bias_params=bias_params, adapt=adapt, adapt_params=adapt_params,
                    backend=backend, **axes,
                )  # fmt: skip

        out, vjp = jax.vjp(f, q, k, v, *params)
        return out, vjp(cotangent)

    want = jax.jit(lambda: attend())()
    with jax.set_mesh(sharding.make_mesh(2, 4)):
        got = jax.jit(lambda: attend(batch_axes=("data",), head_axes=("fsdp",)))()
        only_heads = jax.jit(lambda: attend(head_axes=("fsdp",)))()
    for sharded in (got, only_heads):
        for g, w in zip(jax.tree.leaves(sharded), jax.tree.leaves(want), strict=True):
            if np.abs(w).max() > 1e-4:
                assert relative_error(g, w) < 2e-5


@pytest.mark.parametrize(("arguments", "message"), [
    ({"head_axes": ("model",)}, "head_axes: no axis 'model' in the ambient mesh"),
    ({"head_axes": ("fsdp",), "batch_axes": ("fsdp",)}, "head_axes: axis 'fsdp' is one of batch_axes"),
    ({"head_axes": ("fsdp",), "adapt": Adapt()}, "head_axes: the network mixes heads"),
    ({"head_axes": ("data", "fsdp")}, "4 heads of k cannot be split over 8 devices"),
])  # fmt: skip
def test_heads_that_do_not_split_are_named(arguments, message):
    x = jnp.zeros((4, 6, 4, 4))
    if "adapt" in arguments:
        arguments = {**arguments, "adapt_params": arguments["adapt"].init(jax.random.key(0), 4, False)}
    with jax.set_mesh(sharding.make_mesh(2, 4)), pytest.raises(UserError, match=message):
        dape_attention(x, x, x, **arguments)


def test_kernels_serve_the_heads_of_one_device():
    """256 heads are too many for VMEM, 32 are not."""
    x = jax.ShapeDtypeStruct((1, 32, 256, 64), jnp.bfloat16)

    def attend(**axes):
        with compile_for("interpret"):
            return jax.eval_shape(lambda x: dape_attention(x, x, x, backend="pallas_tpu", **axes), x)

    with pytest.raises(UserError, match="q has 256 heads of 64 in bfloat16, for which no block size fits"):
        attend()
    with jax.set_mesh(sharding.make_mesh(2, 4)):
        assert attend(head_axes=("data", "fsdp")).shape == x.shape
