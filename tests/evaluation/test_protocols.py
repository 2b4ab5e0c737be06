"""The three protocols against the same windows cut by hand and run in float64, and what their reports say."""

import json

import jax
import matplotlib.figure
import numpy as np
import pytest

from dape_jax.errors import UserError
from dape_jax.evaluation import extrapolation, plots, protocols, report, table, windows
from dape_jax.evaluation.protocols import make_plan
from dape_jax.training import model as model_lib
from tests.evaluation import naive


@pytest.fixture
def params(run):
    """Parameters whose predictions depend on what precedes: fresh ones of a small model say almost the same always."""
    params = model_lib.init_params(run.model, jax.random.key(0))
    params["head"]["kernel"] *= 8.0
    params["blocks"]["attention"]["q"]["kernel"] *= 10.0
    params["blocks"]["attention"]["o"]["kernel"] *= 10.0
    return params


def cut(run, plan, length, k):
    """The windows of one length as (inputs, scored targets), cut from the text without the project's planning."""
    tokens = np.asarray(run.tokens.tokens, np.int64)
    _, documents = run.tokens.split_documents("test")
    first, last = documents[0, 0], documents[-1, 1]
    if plan.protocol == "last_k":
        return [(tokens[e - length : e], tokens[e - k + 1 : e + 1]) for e in plan.targets.end]
    if plan.protocol == "official":
        pieces = [tokens[at : at + length + 1] for at in range(first, last - length, length)]
        return [(piece[:-1], piece[1:][-k:]) for piece in pieces]
    stream = tokens[first:last]
    before = np.r_[run.tokens.manifest["tokenizer"]["end_of_document"]["id"], stream[:-1]]
    return [(before[at : at + length], stream[at : at + length]) for at in range(0, len(stream), length)]


ARGUMENTS = {
    "last_k": {"k": 5, "max_windows": 19},
    "official": {"k": 40, "max_windows": 10**6},
    "non_overlapping": {},
}


@pytest.mark.parametrize("protocol", ARGUMENTS)
def test_scores_equal_the_formula_in_float64(protocol, run, params, monkeypatch):
    """Several batches, of which the last has fewer rows than devices; a shorter and a longer length than K."""
    monkeypatch.setattr(extrapolation, "TOKENS_PER_DEVICE", 2**10)
    plan = make_plan(protocol, run.tokens, "test", [24, 150], **ARGUMENTS[protocol])
    scores = extrapolation.score(run, params, plan.windows, show_progress=False)
    for length in (24, 150):
        wanted = cut(run, plan, length, plan.k)
        got = scores[length]
        assert len(wanted) == len(got.nll_sums)
        assert len(wanted) % run.mesh.size
        assert got.targets.tolist() == [len(targets) for _, targets in wanted]
        for window in sorted({0, 1, 7, 8, len(wanted) - 2, len(wanted) - 1}):
            inputs, targets = wanted[window]
            nll = naive.nll(run.model, params, inputs, np.r_[inputs[1:], targets[-1:]])[-len(targets) :]
            assert np.isclose(got.nll_sums[window], nll.sum(), rtol=2e-6)
    assert np.std(scores[24].nll_sums / scores[24].targets) > 0.05  # windows differ, so that a wrong one would show


def test_padding_and_batches_change_nothing(run, params, monkeypatch):
    plan = make_plan("non_overlapping", run.tokens, "test", [100], max_tokens=1234)
    whole = extrapolation.score(run, params, plan.windows, show_progress=False)[100]
    monkeypatch.setattr(extrapolation, "TOKENS_PER_DEVICE", 100)
    parts = extrapolation.score(run, params, plan.windows, show_progress=False)[100]
    assert (whole.rows, parts.rows) == (16, 8)
    assert whole.targets.tolist() == [100] * 12 + [34]
    assert np.allclose(whole.nll_sums, parts.nll_sums, rtol=1e-6)


@pytest.mark.parametrize(("tokens", "length"), [(1, 1), (10, 1), (10, 10), (10, 9), (1000, 7), (1024, 128)])
def test_every_token_is_a_target_once(tokens, length):
    plan = windows.segments(50, 50 + tokens, length)
    stream = np.arange(2000)
    targets = []
    for row, inputs in zip(plan.rows(stream, 0, len(plan), before=-7), plan.inputs, strict=True):
        assert row[inputs + 1 :].tolist() == [0] * (length - inputs)
        targets += row[1 : inputs + 1].tolist()
        assert row[0] == row[1] - 1
    assert targets == list(range(50, 50 + tokens))
    assert plan.targets().sum() == tokens == plan.weights(0, len(plan)).sum()


def test_padding_has_no_weight():
    plan = windows.Windows(length=5, scored=3, start=np.zeros(4, int), inputs=np.asarray([5, 4, 3, 2]), available=4)
    assert plan.weights(0, 4).tolist() == [[True] * 3, [True, True, False], [True, False, False], [False] * 3]
    assert plan.weights(1, 3).tolist() == plan.weights(0, 4)[1:3].tolist()
    assert plan.targets().tolist() == [3, 2, 1, 0]


def test_the_end_of_a_document_stands_before_the_first_token():
    plan = windows.segments(0, 5, 3)
    assert plan.rows(np.arange(10, 20), 0, 3, before=99).tolist() == [[99, 10, 11, 12], [12, 13, 14, 0], [0, 0, 0, 0]]


def test_official_windows_are_cut_anew_at_each_length():
    def targets(length, k, most):
        plan = windows.stream_windows(100, 1101, length, k, most)
        return [end - j for end in plan.start + length for j in reversed(range(plan.scored))], plan

    every, plan = targets(10, 10, 10**6)
    assert every == list(range(101, 1101))  # K = length: all but the stream's first token
    assert plan.available == 100
    assert targets(10, 1, 10**6)[0] == list(range(110, 1101, 10))
    assert targets(10, 50, 10**6)[0] == every  # shorter than K: scored whole
    spread, plan = targets(10, 2, 3)
    assert spread == [109, 110, 609, 610, 1099, 1100]
    assert plan.available == 100
    texts = {length: set(targets(length, 4, 5)[0]) for length in (8, 50, 333)}
    assert [len(text) for text in texts.values()] == [20, 20, 12]
    for a, b in ((8, 50), (8, 333), (50, 333)):
        assert len(texts[a] & texts[b]) <= len(texts[b]) / 2  # where windows happen to end near each other
    assert targets(1000, 4, 5)[1].start.tolist() == [100]  # the longest that fits
    with pytest.raises(UserError, match="lengths: 1001 is too long for one window of the 1001 tokens"):
        targets(1001, 4, 5)


def test_the_longest_lengths_run_in_small_batches():
    for length in (128, 8192, 16384):
        assert extrapolation.rows_at_once(length, 10**9, 8) * length <= 8 * extrapolation.TOKENS_PER_DEVICE


def test_reports_say_what_was_measured(run, params, tmp_path, capsys):
    first, last = run.tokens.split_bounds("test")
    made = {}
    for protocol, arguments, name in (
        ("official", {"k": 16, "max_windows": 11}, "official_test_step3_k16_8to100"),
        ("non_overlapping", {}, "non_overlapping_test_step3_8to100"),
        ("non_overlapping", {"max_tokens": 999}, "non_overlapping_test_step3_first999_8to100"),
        ("last_k", {"k": 8, "max_windows": 9}, "last_k_test_step3_k8_8to100"),
    ):
        plan = make_plan(protocol, run.tokens, "test", [100, 8], **arguments)
        scores = extrapolation.score(run, params, plan.windows, show_progress=False)
        path = report.write_report(report.make_report(run, plan, scores, 3), tmp_path / "evaluation")
        assert path.stem == name
        assert path.with_suffix(".png").exists()
        made[name] = json.loads(path.read_text())
        for r in made[name]["results"]:
            s = scores[r["length"]]
            assert np.isclose(r["nll"], s.nll_sums.sum() / s.targets.sum(), rtol=1e-12)
            assert r["perplexity_standard_error"] > 0
    official, whole, part, last_k = made.values()
    assert [r["scored_tokens"] for r in official["results"]] == [11 * 8, 11 * 16]
    assert [(r["windows"], r["scored_of_a_window"]) for r in official["results"]] == [(11, 8), (11, 16)]
    assert official["results"][1]["windows_available"] == (last - first - 1) // 100
    assert (official["max_windows"], official["standard_error_over"]) == (11, "windows")
    assert [r["scored_tokens"] for r in whole["results"]] == [whole["tokens_in_split"]] * 2 == [last - first] * 2
    assert whole["k"] is None
    assert (whole["max_tokens"], part["max_tokens"]) == (None, 999)
    assert [r["scored_tokens"] for r in part["results"]] == [999, 999]
    # Each inner end of a document lies within a segment, unless the segment ends there as well.
    ends = run.tokens.split_documents("test")[1][:-1, 1] - first
    across = [len({end // n for end in ends if end % n}) for n in (8, 100)]
    assert [r["windows_of_several_documents"] for r in whole["results"]] == across
    for r in (official, whole, part):
        assert r["windows_cross_documents"]
        assert r["lengths"] == [8, 100]

    # The latest of a protocol is found by its name, and only like is compared with like.
    assert report.latest_report(tmp_path, protocol="official") == official
    assert report.latest_report(tmp_path) == last_k
    with pytest.raises(UserError, match="b and a cannot be compared: protocol is non_overlapping and official"):
        report.check_comparable([official, whole], ["a", "b"])
    with pytest.raises(UserError, match="b and a cannot be compared: targets_sha256 at length 8 is"):
        report.check_comparable([whole, part], ["a", "b"])
    report.check_comparable([whole, {**whole, "results": whole["results"][:1]}], ["a", "b"])

    capsys.readouterr()
    table.print_table([official])
    printed = " ".join(capsys.readouterr().out.split())
    assert "Perplexity of the last 16 tokens by window length (± standard error over windows)" in printed
    assert "protocol official: other text at each length" in printed
    available = official["results"][0]["windows_available"]
    assert f"88 tokens in 11 of {available:,} windows at 8, 176 tokens in 11 of" in printed
    table.print_table([{**part, "train_packing": "segments"}])
    printed = " ".join(capsys.readouterr().out.split())
    assert "Perplexity of all tokens by segment length (± standard error over segments)" in printed
    assert "Scored, of its first 999 tokens alone: 999 tokens in 125 of 125 segments at 8, 999 tokens in 10" in printed
    assert "attention stayed within a document; here it does not" in printed


@pytest.mark.parametrize("protocol", protocols.PROTOCOLS)
def test_plots_name_their_protocol(protocol, tmp_path, monkeypatch):
    seen = []
    save = matplotlib.figure.Figure.savefig
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda f, *a, **k: (seen.append(f), save(f, *a, **k)))
    results = [{"length": n, "perplexity": 9.0, "perplexity_standard_error": 0.5} for n in (8, 16)]
    made = {"protocol": protocol, "k": 4, "method": "ALiBi", "train_length": 8, "lengths": [8, 16], "results": results,
            "text": {"source": "books", "split": "test"}}  # fmt: skip
    plots.perplexity_by_length([made], tmp_path / "plot.png")
    (axes,) = seen[0].axes
    assert f"protocol {protocol}" in axes.get_title()
    of, by = {"last_k": ("the last 4 tokens", "context"), "official": ("the last 4 tokens", "window"),
              "non_overlapping": ("all tokens", "segment")}[protocol]  # fmt: skip
    assert axes.get_ylabel() == f"perplexity of {of}"
    assert axes.get_xlabel() == f"{by} length (tokens)"


def test_a_missing_or_renamed_report_is_named(run, tmp_path):
    folder = tmp_path / "evaluation"
    folder.mkdir()
    (folder / "official_test_step3_k16_8to100.json").write_text(json.dumps({
        "format": 1, "protocol": "last_k", "k": 1, "text": {}, "tokenizer": "", "results": [], "method": "",
        "train_length": 1, "lengths": [], "step": 3,
    }))  # fmt: skip
    with pytest.raises(UserError, match=r"no evaluation of the test split; .*=last_k first; what there is is by offi"):
        report.latest_report(tmp_path)
    with pytest.raises(UserError, match="is damaged: it is a report of the protocol last_k"):
        report.latest_report(tmp_path, protocol="official")


@pytest.mark.parametrize(("protocol", "arguments", "message"), [
    ("offical", {}, "--protocol=offical is unknown; did you mean 'official'"),
    ("official", {"k": 0, "max_windows": 3}, "k=0: the last k predictions of each window"),
    ("official", {"k": 8, "max_windows": 0}, "max_windows=0: 1 or more"),
    ("official", {"k": 8, "max_windows": 3, "max_tokens": 9}, "max_tokens=9: only non_overlapping takes it"),
    ("last_k", {"k": 8, "max_windows": 3, "max_tokens": 9}, "max_tokens=9: only non_overlapping takes it"),
    ("last_k", {"k": 9, "max_windows": 3}, "k=9: the last k predictions are scored"),
    ("non_overlapping", {"k": 8}, "k=8: non_overlapping scores every token once"),
    ("non_overlapping", {"max_windows": 8}, "max_windows=8: non_overlapping scores all text"),
    ("non_overlapping", {"max_tokens": 0}, "max_tokens=0: 1 or more"),
    ("non_overlapping", {"max_tokens": 99}, "lengths: 100 is longer than the 99 tokens to score"),
])  # fmt: skip
def test_arguments_that_a_protocol_does_not_take_are_named(protocol, arguments, message, run):
    with pytest.raises(UserError, match=message):
        make_plan(protocol, run.tokens, "test", [8, 100], **arguments)


def test_official_k_is_256_and_may_exceed_a_length():
    assert protocols.check_lengths([64, 512], None, "official") == ([64, 512], 256)
    assert protocols.check_lengths([64], 1000, "official") == ([64], 1000)
    assert protocols.check_lengths([512, 64], None, "non_overlapping") == ([64, 512], None)
