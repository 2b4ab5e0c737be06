"""What an evaluation does for encodings that depend on the length or on a draw."""

import dataclasses

import jax
import numpy as np
import pytest

from dape_jax.evaluation import extrapolation, report, table
from dape_jax.evaluation.protocols import make_plan
from dape_jax.rotary import RoPE, YaRN
from dape_jax.training import model as model_lib


def scored(run, draws=1, seed=0, **model):
    run = dataclasses.replace(run, model=dataclasses.replace(run.model, bias=None, adapt=None, **model))
    params = model_lib.init_params(run.model, jax.random.key(0))
    params["head"]["kernel"] *= 8.0
    for name in "qko":
        params["blocks"]["attention"][name]["kernel"] *= 10.0
    plan = make_plan("last_k", run.tokens, "test", [16, 64], 8, 5)
    scores = extrapolation.score(run, params, plan.windows, False, draws=draws, draw_seed=seed)
    return run, params, plan, scores


def by_hand(run, params, plan, length, rotary, key=None):
    """Summed negative log-likelihoods of the windows, from a model with the encoding ``rotary``."""
    model = model_lib.make_model(dataclasses.replace(run.model, rotary=rotary, batch_axes=()), params)
    rows = np.stack([run.tokens.tokens[e - length : e + 1] for e in plan.targets.end]).astype(np.int32)
    logits = model.logits(model(rows[:, :-1], key=key))[:, -8:]
    nll = -np.take_along_axis(jax.nn.log_softmax(logits), rows[:, -8:, None], axis=-1)
    return nll.sum(axis=(1, 2))


def test_yarn_is_scaled_for_each_length(run):
    run, params, plan, scores = scored(run, rotary=YaRN(train_length=16))
    for length, rotary in ((16, RoPE()), (64, YaRN(train_length=16, scale=4.0))):
        assert np.allclose(scores[length].nll_sums, by_hand(run, params, plan, length, rotary), rtol=1e-5)
    assert not np.allclose(scores[64].nll_sums, by_hand(run, params, plan, 64, RoPE()), rtol=1e-3)
    made = report.make_report(run, plan, scores, 0)
    assert [r["yarn_scale"] for r in made["results"]] == [1.0, 4.0]


def test_randomised_positions_are_scored_in_draws_of_a_seed(run, capsys):
    run, params, plan, scores = scored(run, draws=2, seed=5, rotary=RoPE(), random_range=200)
    for length in (16, 64):
        key = jax.random.fold_in(jax.random.key(5), length)
        draws = [by_hand(run, params, plan, length, RoPE(), jax.random.fold_in(key, i)) for i in range(2)]
        assert np.allclose(scores[length].nll_sums, np.mean(draws, axis=0), rtol=1e-5)
        assert np.allclose(scores[length].nll_draws, np.sum(draws, axis=1), rtol=1e-5)
        assert not np.allclose(*scores[length].nll_draws, rtol=1e-4)
    made = report.make_report(run, plan, scores, 0, draw_seed=5)
    assert made["randomised_positions"] == {"range": 200, "draws": 2, "seed": 5}
    result = made["results"][1]
    perplexities = np.exp(scores[64].nll_draws / result["scored_tokens"])
    assert result["perplexity_of_draws"] == pytest.approx(perplexities)
    assert result["perplexity_deviation_over_draws"] == pytest.approx(abs(np.diff(perplexities)[0]) / 2**0.5)
    table.print_table([made])
    said = " ".join(capsys.readouterr().out.split())
    assert "2 draws of positions below 200: standard deviation of the perplexity over them" in said
    single = report.make_report(run, plan, {n: s._replace(nll_draws=s.nll_draws[:1]) for n, s in scores.items()}, 0)
    table.print_table([single])
    assert "1 draw of positions below 200." in capsys.readouterr().out
