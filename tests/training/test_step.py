import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dape_jax import FIRE, Adapt, ALiBi, KerpleLog, RoPE, T5Bias, sharding
from dape_jax.config import OptimizerSection
from dape_jax.nn import TransformerConfig
from dape_jax.training import model as model_lib
from dape_jax.training import objective as objective_lib
from dape_jax.training import optimizer as optimizer_lib
from dape_jax.training import step as step_lib
from dape_jax.training.objective import NextToken
from tests.conftest import relative_error

MODEL = TransformerConfig(
    vocab_size=32, num_layers=2, num_heads=4, width=16, mlp_width=32, bias=KerpleLog(), adapt=Adapt(width=8)
)
OPTIMIZER = OptimizerSection(learning_rate=2e-3)


@functools.cache
def trained(mesh=(1, 1), model=MODEL, end=None, microbatches=1):
    """Six steps: losses and gradient norms [6, 2], Adam's first moment after the first, and the state at the end."""
    mesh = sharding.make_mesh(*mesh, jax.devices()[: mesh[0] * mesh[1]])
    rows = np.random.default_rng(0).integers(0, 32, (6, 16, 25)).astype(np.int32)
    optimizer = optimizer_lib.make_optimizer(OPTIMIZER, 6)
    model = dataclasses.replace(model, batch_axes=sharding.BATCH_AXES)
    with jax.set_mesh(mesh):
        init, abstract = step_lib.init_state(model, optimizer, 0, mesh)
        state, moment = init(), None
        train_step = step_lib.compile_step(model, NextToken(end), optimizer, abstract, mesh, microbatches)
        out = []
        for number, batch in enumerate(rows):
            state, metrics = train_step(state, sharding.put_rows(mesh, batch), np.int32(number))
            out.append((float(metrics["loss"]), float(metrics["grad_norm"])))
            if moment is None:
                moment = jax.device_get(state.opt_state[1][0].mu)
    return np.asarray(out), jax.tree.leaves_with_path(moment), jax.device_get(state)


@pytest.mark.parametrize("position", [
    {"bias": KerpleLog(), "adapt": Adapt(width=8)},
    pytest.param({"bias": FIRE(width=4, activation="leaky_relu"), "adapt": Adapt(per_head=True, width=4)},
                 marks=pytest.mark.slow),
    pytest.param({"bias": None, "adapt": None, "rotary": RoPE()}, marks=pytest.mark.slow),
    pytest.param({"end": 7}, marks=pytest.mark.slow),
], ids=["dape_kerple", "dape_fire_per_head", "rope", "segments"])  # fmt: skip
def test_eight_devices_give_the_losses_of_one(position):
    end = position.get("end")
    model = dataclasses.replace(MODEL, **{name: x for name, x in position.items() if name != "end"})
    (want, w_moment, _), (got, g_moment, _) = (trained(mesh, model, end) for mesh in ((1, 1), (2, 4)))
    assert relative_error(got, want) < 5e-5  # Adam scales the rounding of small gradients up
    # Adam's first moment after one update is a tenth of the clipped gradient. (Later parameters differ more where a
    # gradient is zero up to rounding, since Adam scales it up.)
    for (path, w), (_, g) in zip(w_moment, g_moment, strict=True):
        assert np.linalg.norm(w) < 1e-7 or relative_error(g, w) < 1e-4, path


def test_first_loss_is_near_uniform_and_grad_norm_is_the_gradients():
    (loss, norm), *_ = trained()[0]
    assert abs(loss - np.log(32)) < 0.2
    params = model_lib.init_params(MODEL, jax.random.key(0))
    rows = np.random.default_rng(0).integers(0, 32, (6, 16, 25)).astype(np.int32)[0]
    want, grads = jax.jit(jax.value_and_grad(lambda p: step_lib.loss_fn(MODEL, NextToken(), p, rows)))(params)
    assert np.isclose(loss, want, rtol=1e-5)
    assert np.isclose(norm, optax.tree.norm(grads), rtol=1e-5)


@pytest.mark.parametrize("position", [
    {"bias": KerpleLog(), "adapt": Adapt(width=8)},
    pytest.param({"bias": None, "adapt": None, "rotary": RoPE()}, marks=pytest.mark.slow),
], ids=["dape_kerple", "rope"])  # fmt: skip
def test_segments_give_each_document_the_loss_it_has_alone(position):
    """The packed loss and gradient are those of the documents one by one, weighted by their targets."""
    model = dataclasses.replace(MODEL, num_layers=1, **position)
    params = model_lib.init_params(model, jax.random.key(0))
    rng = np.random.default_rng(0)
    end = 31
    rows = rng.integers(0, end, (3, 13)).astype(np.int32)
    rows[0, 2::3] = rows[1, 4::5] = end  # documents of 3 in the first row, of 5 in the second, the last ones cut short

    def packed(params):
        return step_lib.loss_fn(model, NextToken(end), params, jnp.asarray(rows))

    def alone(params):
        pieces = [rows[0, :12].reshape(4, 3), rows[1, :10].reshape(2, 5), rows[1:2, 10:], rows[2:]]
        counts = [piece.shape[0] * (piece.shape[1] - 1) for piece in pieces]
        losses = [
            step_lib.loss_fn(model, NextToken(), params, piece) * n for piece, n in zip(pieces, counts, strict=True)
        ]
        return sum(losses) / sum(counts)

    (got, grads), (want, want_grads) = (jax.jit(jax.value_and_grad(f))(params) for f in (packed, alone))
    assert np.isclose(got, want, rtol=1e-6)
    for (path, g), w in zip(jax.tree.leaves_with_path(grads), jax.tree.leaves(want_grads), strict=True):
        assert np.linalg.norm(w) < 1e-7 or relative_error(g, w) < 1e-4, path
    stream = jax.jit(lambda p: step_lib.loss_fn(model, NextToken(), p, rows))(params)
    assert abs(float(stream) - float(got)) > 1e-4  # the stream's loss is another


@pytest.mark.parametrize("chunk", [7 * 3 * 11, 2**24, 1])
def test_token_nll_in_chunks(chunk, monkeypatch):
    monkeypatch.setattr(objective_lib, "LOSS_CHUNK", chunk)
    hidden = jax.random.normal(jax.random.key(0), (3, 10, 8))
    head = jax.random.normal(jax.random.key(1), (8, 11))
    targets = jax.random.randint(jax.random.key(2), (3, 10), 0, 11)
    cotangent = jax.random.normal(jax.random.key(3), (3, 10))

    def naive(hidden, head):
        log_p = jax.nn.log_softmax(jnp.einsum("btm,mv->btv", hidden, head))
        return -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]

    got, vjp = jax.vjp(lambda h, w: objective_lib.token_nll(h, w, targets), hidden, head)
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
        params = jax.eval_shape(lambda m=model: model_lib.init_params(m, jax.random.key(0)))
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
    state = trained()[2]
    assert state.params["blocks"]["attention"]["bias"]["p"].min() >= np.float32(0.01)


@pytest.mark.parametrize(("mesh", "end"), [
    pytest.param((1, 1), None, marks=pytest.mark.slow), ((2, 4), None), pytest.param((2, 4), 5, marks=pytest.mark.slow),
])  # fmt: skip
def test_a_batch_in_microbatches_gives_the_step_of_the_whole_batch(mesh, end):
    """With documents in segments too, where the microbatches have different numbers of targets."""
    (want, w_moment, _), (got, g_moment, _) = (trained(mesh, end=end, microbatches=n) for n in (1, 2))
    assert relative_error(got, want) < 5e-5  # as above
    assert not np.array_equal(got, want)  # it did take another way there
    for (path, w), (_, g) in zip(w_moment, g_moment, strict=True):
        assert np.linalg.norm(w) < 1e-7 or relative_error(g, w) < 1e-5, path


@pytest.mark.slow
def test_microbatches_agree_with_optax_multisteps():
    rows = np.random.default_rng(1).integers(0, 32, (16, 25)).astype(np.int32)
    params = model_lib.init_params(MODEL, jax.random.key(0))
    _, grads = jax.jit(lambda p: step_lib.loss_and_grads(MODEL, NextToken(), p, jnp.asarray(rows), 4))(params)
    own = jax.jit(jax.grad(lambda p, part: step_lib.loss_fn(MODEL, NextToken(), p, part)))
    optimizer = optax.MultiSteps(optax.sgd(1.0), every_k_schedule=4)
    state, after = optimizer.init(params), params
    for part in range(4):
        updates, state = optimizer.update(own(params, rows[4 * part : 4 * part + 4]), state, after)
        after = optax.apply_updates(after, updates)
    for g, before, x in zip(*(jax.tree.leaves(t) for t in (grads, params, after)), strict=True):
        assert np.allclose(x, before - g, rtol=1e-5, atol=1e-7)
    assert float(optax.tree.norm(grads)) > 0.1


def test_each_device_keeps_its_rows_in_microbatches():
    mesh = sharding.make_mesh(8, 1)
    model = dataclasses.replace(MODEL, batch_axes=sharding.BATCH_AXES)
    optimizer = optimizer_lib.make_optimizer(OPTIMIZER, 4)
    with jax.set_mesh(mesh):
        _, abstract = step_lib.init_state(model, optimizer, 0, mesh)
        rows = jax.ShapeDtypeStruct((32, 25), jnp.int32, sharding=sharding.batch_sharding(mesh))
        compiled = step_lib.compile_step(model, NextToken(), optimizer, abstract, mesh, 4).lower(
            abstract, rows, np.int32(0)
        )
        text = compiled.compile().as_text()
        parts = jax.jit(lambda x: step_lib._split_rows(sharding.BATCH_AXES, 4, x))(
            sharding.put_rows(mesh, np.arange(32, dtype=np.int32)[:, None])
        )
    assert "all-reduce" in text  # of the gradients: the text is that of a program over several devices
    assert not {"all-to-all", "collective-permute", "all-gather"} & set(text.replace("(", " ").split())
    assert sorted(np.asarray(parts).ravel().tolist()) == list(range(32))
    for shard in parts.addressable_shards:
        assert set(np.asarray(shard.data).ravel() // 4) == {shard.device.id}


def test_an_update_that_is_not_finite_is_not_applied_nor_are_those_after_it():
    model, mesh = dataclasses.replace(MODEL, num_layers=1), sharding.make_mesh(1, 1, jax.devices()[:1])
    optimizer = optimizer_lib.make_optimizer(OPTIMIZER, 4)
    rows = sharding.put_rows(mesh, np.random.default_rng(0).integers(0, 32, (16, 25)).astype(np.int32))
    with jax.set_mesh(mesh):
        init, abstract = step_lib.init_state(model, optimizer, 0, mesh)
        train_step = step_lib.compile_step(model, NextToken(), optimizer, abstract, mesh)
        state, _ = train_step(init(), rows, np.int32(0))
        good = jax.device_get(state)
        head = state.params["head"]["kernel"]
        state.params["head"]["kernel"] = head.at[0, 0].set(np.inf)
        state, measured = train_step(state, rows, np.int32(1))
        assert not np.isfinite(measured["loss"])
        state.params["head"]["kernel"] = (
            state.params["head"]["kernel"].at[0, 0].set(good.params["head"]["kernel"][0, 0])
        )
        state, measured = train_step(state, rows, np.int32(2))  # would be finite, but step 1 is missing
        assert np.isfinite(measured["loss"])
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(good), strict=True):
            assert np.array_equal(a, b)
        state, _ = train_step(state, rows, np.int32(1))
        assert int(state.step) == 2
        assert not np.array_equal(state.params["head"]["kernel"], good.params["head"]["kernel"])


def test_a_finite_gradient_whose_update_overflows_is_not_applied():
    model, mesh = dataclasses.replace(MODEL, num_layers=1), sharding.make_mesh(1, 1, jax.devices()[:1])
    config = OptimizerSection(learning_rate=3e38, warmup_fraction=0.0, weight_decay=10.0)
    optimizer = optimizer_lib.make_optimizer(config, 4)
    rows = sharding.put_rows(mesh, np.random.default_rng(0).integers(0, 32, (16, 25)).astype(np.int32))
    with jax.set_mesh(mesh):
        init, abstract = step_lib.init_state(model, optimizer, 0, mesh)
        before = jax.device_get(init())
        state, measured = step_lib.compile_step(model, NextToken(), optimizer, abstract, mesh)(
            init(), rows, np.int32(0)
        )
    assert np.isfinite([measured["loss"], measured["grad_norm"]]).all()
    assert not np.isfinite(measured["update_norm"])
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(before), strict=True):
        assert np.array_equal(a, b)


def test_a_step_projects():
    model = dataclasses.replace(MODEL, adapt=None)
    optimizer = optax.sgd(100.0)
    params = model_lib.init_params(model, jax.random.key(0))
    state = step_lib.TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))
    rows = jnp.asarray(np.random.default_rng(0).integers(0, 31, (4, 13)), jnp.int32)
    train_step = jax.jit(functools.partial(step_lib.train_step, model, NextToken(), optimizer, 1, 0))
    after, _ = train_step(state, rows, jnp.zeros((), jnp.int32))
    bias = after.params["blocks"]["attention"]["bias"]
    # The step is so large that some parameter must have been stopped by its bound.
    assert min(bias["p"].min(), bias["a"].min()) == np.float32(0.01)


def test_projection_leaves_other_parameters_alone():
    params = {"blocks": {"mlp": {"bias": {"p": jnp.asarray([-1.0])}}}}
    assert optimizer_lib.project(KerpleLog(), params)["blocks"]["mlp"]["bias"]["p"][0] == -1


def test_adams_moments_use_their_decay():
    config = OptimizerSection(
        learning_rate=0.1, warmup_fraction=0.0, b1=0.5, b2=0.7, weight_decay=0.0, final_fraction=1.0
    )
    optimizer, params = optimizer_lib.make_optimizer(config, 10), {"bias": jnp.asarray([0.0])}
    state, m, v = optimizer.init(params), 0.0, 0.0
    for t, g in enumerate((0.3, -0.1, 0.2), start=1):
        updates, state = optimizer.update({"bias": jnp.asarray([g])}, state, params)
        m, v = 0.5 * m + 0.5 * g, 0.7 * v + 0.3 * g * g
        want = -0.1 * (m / (1 - 0.5**t)) / (np.sqrt(v / (1 - 0.7**t)) + 1e-8)
        assert np.isclose(updates["bias"][0], want, rtol=1e-5)


def test_the_initial_state_depends_on_the_seed():
    mesh, optimizer = sharding.make_mesh(1, 1, jax.devices()[:1]), optax.sgd(1.0)
    a, b = (step_lib.init_state(MODEL, optimizer, seed, mesh)[0]().params["head"]["kernel"] for seed in (0, 1))
    assert not np.array_equal(a, b)


def test_randomised_positions_are_drawn_anew_at_each_step_from_the_seed():
    model = dataclasses.replace(MODEL, bias=None, adapt=None, rotary=RoPE(), random_range=100)
    optimizer = optimizer_lib.make_optimizer(OPTIMIZER, 5)
    params = model_lib.init_params(model, jax.random.key(0))
    for name in "qk":
        params["blocks"]["attention"][name]["kernel"] *= 20.0
    rows = jnp.asarray(np.random.default_rng(0).integers(0, 32, (4, 25)), jnp.int32)

    @jax.jit
    def loss(step, seed_key):
        return step_lib.loss_fn(model, NextToken(), params, rows, key=jax.random.fold_in(seed_key, step))

    @functools.partial(jax.jit, static_argnums=1)
    def stepped(step, seed):
        state = step_lib.TrainState(params, optimizer.init(params), step)
        return step_lib.train_step(model, NextToken(), optimizer, 1, seed, state, rows, step)[1]["loss"]

    want = [float(loss(step, jax.random.key(seed))) for step, seed in ((0, 0), (3, 0), (0, 7))]
    got = [float(stepped(jnp.int32(step), seed)) for step, seed in ((0, 0), (3, 0), (0, 7))]
    assert np.allclose(got, want, rtol=1e-6)
    assert len({round(x, 5) for x in got}) == 3
    parts = jax.jit(lambda p: step_lib.loss_and_grads(model, NextToken(), p, rows, 2, key=jax.random.key(3))[0])(params)
    keys = jax.random.split(jax.random.key(3), 2)
    half = jax.jit(lambda rows, key: step_lib.loss_fn(model, NextToken(), params, rows, key=key))
    halves = [half(rows[2 * i : 2 * i + 2], keys[i]) for i in range(2)]
    assert np.isclose(parts, np.mean(halves), rtol=1e-6)
