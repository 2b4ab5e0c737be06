import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dape_jax import FIRE, Adapt, ALiBi, KerpleLog, T5Bias, sharding
from dape_jax.config import OptimizerSection
from dape_jax.nn import TransformerConfig
from dape_jax.training import optimizer as optimizer_lib
from dape_jax.training import step as step_lib
from tests.conftest import relative_error

MODEL = TransformerConfig(
    vocab_size=32, num_layers=2, num_heads=4, width=16, mlp_width=32, bias=KerpleLog(), adapt=Adapt(width=8)
)
OPTIMIZER = OptimizerSection(learning_rate=2e-3)


def losses(mesh, steps=6, model=MODEL, end=None):
    rows = np.random.default_rng(0).integers(0, 32, (steps, 16, 25)).astype(np.int32)
    optimizer = optimizer_lib.make_optimizer(OPTIMIZER, steps)
    model = dataclasses.replace(model, batch_axes=sharding.BATCH_AXES)
    with jax.set_mesh(mesh):
        init, abstract = step_lib.init_state(model, optimizer, 0, mesh)
        state = init()
        train_step = step_lib.compile_step(model, optimizer, abstract, mesh, end)
        out = []
        for batch in rows:
            state, metrics = train_step(state, sharding.put_rows(mesh, batch))
            out.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.asarray(out), jax.device_get(state)


@pytest.mark.parametrize("position", [
    {"bias": KerpleLog(), "adapt": Adapt(width=8)},
    {"bias": FIRE(width=4, activation="leaky_relu"), "adapt": Adapt(per_head=True, width=4)},
    {"bias": None, "adapt": None, "rope_base": 1e4},
    pytest.param({"end": 7}, marks=pytest.mark.slow),
], ids=["dape_kerple", "dape_fire_per_head", "rope", "segments"])  # fmt: skip
def test_eight_devices_give_the_losses_of_one(position):
    end = position.get("end")
    model = dataclasses.replace(MODEL, **{name: x for name, x in position.items() if name != "end"})
    one, eight = sharding.make_mesh(1, 1, jax.devices()[:1]), sharding.make_mesh(2, 4)
    want, got = losses(one, model=model, end=end)[0], losses(eight, model=model, end=end)[0]
    assert relative_error(got, want) < 1e-5
    assert want[-1, 0] < want[0, 0]
    # Adam's first moment after one update is a tenth of the clipped gradient. (Later parameters differ more where a
    # gradient is zero up to rounding, since Adam scales it up.)
    want, got = (jax.tree.leaves_with_path(losses(mesh, 1, model, end)[1].opt_state[1][0].mu) for mesh in (one, eight))
    for (path, w), (_, g) in zip(want, got, strict=True):
        assert np.linalg.norm(w) < 1e-7 or relative_error(g, w) < 1e-4, path


def test_first_loss_is_near_uniform_and_grad_norm_is_the_gradients():
    (loss, norm), *_ = losses(sharding.make_mesh(1, 1, jax.devices()[:1]), steps=1)[0]
    assert abs(loss - np.log(32)) < 0.2
    params = step_lib.init_params(MODEL, jax.random.key(0))
    rows = np.random.default_rng(0).integers(0, 32, (1, 16, 25)).astype(np.int32)[0]
    want, grads = jax.value_and_grad(lambda p: step_lib.loss_fn(MODEL, p, jnp.asarray(rows)))(params)
    assert np.isclose(loss, want, rtol=1e-5)
    assert np.isclose(norm, optax.tree.norm(grads), rtol=1e-5)


@pytest.mark.parametrize("position", [
    {"bias": KerpleLog(), "adapt": Adapt(width=8)}, {"bias": None, "adapt": None, "rope_base": 1e4},
], ids=["dape_kerple", "rope"])  # fmt: skip
def test_segments_give_each_document_the_loss_it_has_alone(position):
    """The packed loss and gradient are those of the documents one by one, weighted by their targets."""
    model = dataclasses.replace(MODEL, num_layers=1, **position)
    params = step_lib.init_params(model, jax.random.key(0))
    rng = np.random.default_rng(0)
    end = 31
    rows = rng.integers(0, end, (3, 13)).astype(np.int32)
    rows[0, 2::3] = rows[1, 4::5] = end  # documents of 3 in the first row, of 5 in the second, the last ones cut short

    def packed(params):
        return step_lib.loss_fn(model, params, jnp.asarray(rows), end)

    def alone(params):
        pieces = [rows[0, :12].reshape(4, 3), rows[1, :10].reshape(2, 5), rows[1:2, 10:], rows[2:]]
        counts = [piece.shape[0] * (piece.shape[1] - 1) for piece in pieces]
        losses = [step_lib.loss_fn(model, params, piece) * n for piece, n in zip(pieces, counts, strict=True)]
        return sum(losses) / sum(counts)

    (got, grads), (want, want_grads) = (jax.jit(jax.value_and_grad(f))(params) for f in (packed, alone))
    assert np.isclose(got, want, rtol=1e-6)
    for (path, g), w in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True):
        assert np.linalg.norm(w) < 1e-7 or relative_error(g, w) < 1e-4, path
    assert abs(float(step_lib.loss_fn(model, params, rows)) - float(got)) > 1e-4  # the stream's loss is another


@pytest.mark.parametrize("chunk", [7 * 3 * 11, 2**24, 1])
def test_token_nll_in_chunks(chunk, monkeypatch):
    monkeypatch.setattr(step_lib, "LOSS_CHUNK", chunk)
    hidden = jax.random.normal(jax.random.key(0), (3, 10, 8))
    head = jax.random.normal(jax.random.key(1), (8, 11))
    targets = jax.random.randint(jax.random.key(2), (3, 10), 0, 11)
    cotangent = jax.random.normal(jax.random.key(3), (3, 10))

    def naive(hidden, head):
        log_p = jax.nn.log_softmax(jnp.einsum("btm,mv->btv", hidden, head))
        return -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]

    got, vjp = jax.vjp(lambda h, w: step_lib.token_nll(h, w, targets), hidden, head)
    want, want_vjp = jax.vjp(naive, hidden, head)
    assert relative_error(got, want) < 1e-6
    for a, b in zip(vjp(cotangent), want_vjp(cotangent), strict=True):
        assert relative_error(a, b) < 1e-5


def test_schedule():
    rate = optimizer_lib.schedule(OptimizerSection(learning_rate=6e-4), 50_000)
    assert float(rate(0)) == 0
    assert np.isclose(rate(250), 3e-4)
    assert np.isclose(rate(500), 6e-4)
    assert np.isclose(rate(50_000), 6e-5)
    assert np.isclose(rate(25_250), (6e-4 + 6e-5) / 2, rtol=1e-3)
    constant = optimizer_lib.schedule(OptimizerSection(learning_rate=1.0, warmup_fraction=0.0), 1)
    assert float(constant(0)) == 1.0


def test_weight_decay_is_chosen_by_name():
    for bias, decayed_bias in ((KerpleLog(), set()), (T5Bias(), set()), (FIRE(), {"w1", "w2"}), (ALiBi(), set())):
        model = dataclasses.replace(MODEL, bias=bias)
        params = jax.eval_shape(lambda m=model: step_lib.init_params(m, jax.random.key(0)))
        mask = optimizer_lib.decay_mask(params)
        names = {sharding.path_string(path) for path, on in jax.tree.leaves_with_path(mask) if on}
        assert names == {
            "head/kernel", "blocks/mlp_in/kernel", "blocks/mlp_out/kernel", "blocks/attention/dape/w1",
            "blocks/attention/dape/w2", *(f"blocks/attention/{n}/kernel" for n in "qkvo"),
            *(f"blocks/attention/bias/{n}" for n in decayed_bias),
        }  # fmt: skip


def test_adamw_equals_its_formula():
    """One update of a decayed and of an undecayed parameter, clipped, by hand."""
    config = OptimizerSection(learning_rate=0.1, warmup_fraction=0.0, weight_decay=0.5, clip_norm=1.0)
    optimizer = optimizer_lib.make_optimizer(config, 10)
    params = {"x": {"kernel": jnp.asarray([2.0]), "bias": jnp.asarray([2.0])}}
    grads = {"x": {"kernel": jnp.asarray([3.0]), "bias": jnp.asarray([4.0])}}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    # Clipped by 5: 0.6 and 0.8; Adam's first step is the sign; decay adds 0.5 * 2 to the kernel alone.
    assert np.isclose(updates["x"]["kernel"][0], -0.1 * (1 + 0.5 * 2), rtol=1e-5)
    assert np.isclose(updates["x"]["bias"][0], -0.1, rtol=1e-5)


def test_kerple_is_projected_after_an_update():
    params = {"blocks": {"attention": {"bias": {"p": jnp.asarray([-1.0, 0.5])}, "q": {"bias": jnp.asarray([-1.0])}}}}
    projected = optimizer_lib.project(KerpleLog(), params)
    assert np.allclose(projected["blocks"]["attention"]["bias"]["p"], [0.01, 0.5])
    assert projected["blocks"]["attention"]["q"]["bias"][0] == -1
    assert optimizer_lib.project(ALiBi(), params) is params
    _, state = losses(sharding.make_mesh(1, 1, jax.devices()[:1]), steps=2)
    assert state.params["blocks"]["attention"]["bias"]["p"].min() >= np.float32(0.01)
