import dataclasses
import itertools
import json
import math

import jax
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from dape_jax.errors import UserError
from dape_jax.evaluation import extrapolation, plots, protocols, report, table, windows
from dape_jax.evaluation.protocols import make_plan
from dape_jax.evaluation.statistics import perplexity
from dape_jax.training import model as model_lib


def test_windows_score_the_same_targets_at_every_length(run):
    plan = windows.choose_targets(run.tokens, "test", longest=2000, k=100, max_windows=30)
    names, bounds = run.tokens.split_documents("test")
    lengths = dict(zip(names, bounds[:, 1] - bounds[:, 0], strict=True))
    assert set(plan.names) == {name for name in names if lengths[name] > 2000}
    assert plan.too_short == sum(length <= 2000 for length in lengths.values())
    assert len(plan.end) == len(plan.document) <= 30
    ends = {}
    for document, end in zip(plan.document, plan.end, strict=True):
        first, last = bounds[names.index(plan.names[document])]
        assert first <= end - 2000
        assert end < last
        ends.setdefault(document, []).append(end)
    for values in ends.values():  # targets do not overlap, and the document's very last token is one of them
        assert all(a - b >= 100 for a, b in itertools.pairwise(values))
        assert max(values) == bounds[names.index(plan.names[plan.document[list(plan.end).index(values[0])]])][1] - 1
    counts = [len(v) for v in ends.values()]
    assert sum(counts) == 30


def test_few_windows_are_spread_over_documents(run):
    plan = windows.choose_targets(run.tokens, "test", longest=500, k=50, max_windows=3)
    assert plan.document.tolist() == [0, 1, 2]


def test_scores_equal_a_model_run_by_hand(run):
    params = model_lib.init_params(run.model, jax.random.key(0))
    with jax.set_mesh(run.mesh):
        plan = make_plan("last_k", run.tokens, "test", [40, 300], k=20, max_windows=11)
        scores = extrapolation.score(run, params, plan.windows, show_progress=False)
    end = plan.targets.end
    model = model_lib.make_model(dataclasses.replace(run.model, batch_axes=()), params)
    assert isinstance(model, nnx.Module)
    for length in (40, 300):
        assert scores[length].targets.tolist() == [20] * len(end)
        for window in (0, 5, len(end) - 1):
            tokens = np.asarray(run.tokens.tokens[end[window] - length : end[window] + 1], np.int32)
            log_p = jax.nn.log_softmax(model.logits(model(tokens[None, :-1])))[0]
            want = -np.asarray(log_p)[np.arange(length), tokens[1:]][-20:]
            assert np.isclose(scores[length].nll_sums[window], want.sum(dtype=np.float64), atol=2e-5)


def test_partial_batches_count_exactly(run, monkeypatch):
    params = model_lib.init_params(run.model, jax.random.key(0))
    plan = make_plan("last_k", run.tokens, "test", [100], k=10, max_windows=19)
    whole = extrapolation.score(run, params, plan.windows, show_progress=False)[100]
    monkeypatch.setattr(extrapolation, "TOKENS_PER_DEVICE", 100)
    parts = extrapolation.score(run, params, plan.windows, show_progress=False)[100]
    assert (whole.rows, parts.rows) == (24, 8)
    assert whole.targets.tolist() == parts.targets.tolist() == [10] * 19
    assert np.allclose(whole.nll_sums, parts.nll_sums, atol=1e-5)


def test_statistics_by_hand():
    sums, counts = np.asarray([10.0, 30.0, 8.0]), np.asarray([10.0, 20.0, 10.0])
    got = perplexity(sums, counts)
    assert np.isclose(got.nll, 48 / 40)
    residuals = sums - 1.2 * counts
    assert np.isclose(got.nll_standard_error, math.sqrt(3 / 2 * (residuals**2).sum()) / 40)
    assert np.isclose(got.perplexity, math.exp(1.2))
    assert np.isclose(got.perplexity_standard_error, math.exp(1.2) * got.nll_standard_error)
    # With equal counts it is the textbook standard error of a mean.
    equal = perplexity(np.asarray([1.0, 2.0, 4.0]), np.ones(3))
    assert np.isclose(equal.nll_standard_error, np.std([1, 2, 4], ddof=1) / math.sqrt(3))
    assert math.isnan(perplexity(np.ones(1), np.ones(1)).nll_standard_error)


@pytest.mark.parametrize(("lengths", "k", "message"), [
    ([0, 64], None, "0 is no length"), ([-5], None, "-5 is no length"), ([], None, "at least one"),
    ([64, 64], None, "names one twice"), ([64, 128], 65, "k=65"), ([64], 0, "k=0"),
])  # fmt: skip
def test_bad_lengths_are_named(lengths, k, message):
    with pytest.raises(UserError, match=message):
        protocols.check_lengths(lengths, k)


def test_k_is_the_smaller_of_256_and_the_shortest_length():
    assert protocols.check_lengths([2048, 64], None) == ([64, 2048], 64)
    assert protocols.check_lengths([512, 8192], None) == ([512, 8192], 256)
    assert protocols.check_lengths([1], None) == ([1], 1)


def test_lengths_beyond_every_document_are_named(run):
    with pytest.raises(UserError, match=r"lengths: 1000000 is longer than every test document; the longest admits \d+"):
        windows.choose_targets(run.tokens, "test", longest=10**6, k=10, max_windows=3)


def test_report_says_what_was_measured(run, tmp_path, capsys):
    params = model_lib.init_params(run.model, jax.random.key(0))
    plan = make_plan("last_k", run.tokens, "test", [10, 100], k=10, max_windows=19)
    scores = extrapolation.score(run, params, plan.windows, show_progress=False)
    made = report.make_report(run, plan, scores, 7)
    path = report.write_report(made, tmp_path / "evaluation")
    read = json.loads(path.read_text())
    assert path.name == "last_k_test_step7_k10_10to100.json"
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    for name in ("protocol", "lengths", "k", "text", "seed", "step", "backend", "dtype", "device", "method"):
        assert name in read
    assert read["lengths"] == [10, 100]
    assert [r["scored_tokens"] for r in read["results"]] == [190, 190]
    assert sum(d["scored_tokens"] for d in read["documents"]) == 190
    for r in read["results"]:
        mean = scores[r["length"]].nll_sums.sum() / 190
        assert np.isclose(r["nll"], mean, rtol=1e-6)
        assert np.isclose(r["perplexity"], math.exp(mean), rtol=1e-6)
    # An untrained model predicts bytes about uniformly.
    assert 200 < read["results"][0]["perplexity"] < 400
    assert report.latest_report(tmp_path)["step"] == 7

    other = {**read, "method": "Kerple", "position": "kerple"}
    report.check_comparable([read, other], ["a", "b"])
    with pytest.raises(UserError, match="b and a cannot be compared: k is 9 and 10"):
        report.check_comparable([read, {**other, "k": 9}], ["a", "b"])
    # A longer longest length moves the windows: other targets, though every count is the same.
    moved = make_plan("last_k", run.tokens, "test", [10, 900], k=10, max_windows=19)
    moved = report.make_report(run, moved, {10: scores[10], 900: scores[100]}, 7)
    assert (moved["windows"], moved["documents_used"]) == (read["windows"], read["documents_used"])
    with pytest.raises(UserError, match="cannot be compared: targets_sha256"):
        report.check_comparable([read, moved], ["a", "b"])
    assert [r["label"] for r in report.with_labels([read, read, other], ["a", "b", "c"])] == [
        "DAPE-Kerple (a)", "DAPE-Kerple (b)", "Kerple",
    ]  # fmt: skip
    table.print_table([read, other])
    printed = capsys.readouterr().out
    assert f"{read['results'][1]['perplexity']:.2f}" in printed
    plots.perplexity_by_length([read, other], tmp_path / "both.png")
    assert (tmp_path / "both.png").stat().st_size > 10_000


def test_one_document_has_no_standard_error(run, tmp_path):
    params = model_lib.init_params(run.model, jax.random.key(0))
    plan = make_plan("last_k", run.tokens, "test", [100], k=10, max_windows=1)
    scores = extrapolation.score(run, params, plan.windows, show_progress=False)
    path = report.write_report(report.make_report(run, plan, scores, 1), tmp_path)
    assert json.loads(path.read_text())["results"][0]["perplexity_standard_error"] is None


def test_damaged_and_missing_reports_are_named(tmp_path):
    with pytest.raises(UserError, match="holds no evaluation of the test split; run experiments.evaluate"):
        report.latest_report(tmp_path)
    (tmp_path / "evaluation").mkdir()
    (tmp_path / "evaluation" / "last_k_test_step3_backup.json").write_text("mine")
    path = tmp_path / "evaluation" / "last_k_test_step3_k1_1to2.json"
    for text, message in {
        "{": "is damaged",
        "[]": "is damaged",
        '{"format": 9}': "has format 9; this version reads 1",
        '{"format": 1}': "there is no protocol in it",
    }.items():
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            report.latest_report(tmp_path)


@pytest.mark.parametrize("width", [60, 80, 200])
def test_the_table_fits_the_terminal(width, monkeypatch, capsys):
    """No number and no name is cut, whatever the width: a line a method or a line a length."""
    lengths = [64, 128, 256, 512, 1024, 2048]
    results = [
        {"length": n, "perplexity": 10.0 + n, "perplexity_standard_error": float("nan") if n == 64 else 0.25}
        for n in lengths
    ]
    common = {
        "protocol": "last_k", "k": 64, "train_length": 64, "step": 5, "lengths": lengths, "results": results,
        "windows": 9, "documents_used": 3, "documents_too_short": 1, "documents_in_split": 7,
        "text": {"source": "a text", "split": "test"},
    }  # fmt: skip
    terminal = Console(width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(table, "_terminal", lambda: terminal)
    table.print_table([{**common, "method": "DAPE-Kerple"}, {**common, "method": "RoPE"}])
    printed = capsys.readouterr().out
    assert "DAPE-Kerple" in printed
    for n in lengths:
        assert str(n) in printed
        assert f"{10 + n:.2f}" + (" ± 0.25" if n > 64 else "") in printed
    assert "nan" not in printed


class Documents:
    """A split of documents of given lengths, end to end."""

    def __init__(self, lengths):
        ends = np.cumsum(lengths)
        self.bounds = np.stack([np.r_[0, ends[:-1]], ends], axis=1)

    def split_documents(self, split):
        return [str(i) for i in range(len(self.bounds))], self.bounds


def test_windows_are_spread_over_documents_and_within_them():
    plan = windows.choose_targets(Documents([1001] * 9), "test", longest=100, k=10, max_windows=3)
    assert plan.names == ["0", "4", "8"]
    plan = windows.choose_targets(Documents([1001]), "test", longest=100, k=10, max_windows=3)
    assert plan.end.tolist() == [1000, 550, 100]  # slots 0, 45 and 90 of 91


def test_the_standard_error_is_over_documents(run):
    targets = windows.Targets(["a", "b"], np.asarray([0, 0, 0, 1]), np.arange(4), 0)
    eight = windows.windows_before(targets.end, 8, 1)
    plan = protocols.Plan("last_k", "test", 1, {"max_windows": 4}, [eight], targets)
    scores = extrapolation.LengthScores(np.asarray([1.0, 1.0, 1.0, 3.0]), np.asarray([6.0]), eight.targets(), 4, 1.0)
    made = report.make_report(run, plan, {8: scores}, 7)
    # The mean is 1.5; the residuals of the documents are 3 - 4.5 and 3 - 1.5.
    assert np.isclose(made["results"][0]["nll_standard_error"], np.sqrt(2 * (1.5**2 + 1.5**2)) / 4)
    for what in ("protocol", "k", "text", "tokenizer", "windows", "documents_used", "targets_sha256"):
        with pytest.raises(UserError, match=f"cannot be compared: {what}"):
            report.check_comparable([made, {**made, what: "other"}], ["a", "b"])
