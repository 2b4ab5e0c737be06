"""The table of many runs: statistics, the paper's figures, refusals."""

import json

import pytest

from dape_jax.data.chomsky import TASKS
from dape_jax.errors import UserError
from dape_jax.evaluation import chomsky_table
from dape_jax.evaluation.chomsky_paper import METHODS, printed
from dape_jax.evaluation.report import write_json


def report(task="even_pairs", position="alibi", seed=0, score=50.0, **other):
    return {
        "format": 1, "protocol": "chomsky", "task": task, "position": position, "seed": seed, "score": score,
        "score_in_training_range": 90.0, "score_of_sequences": 40.0, "train_length": 2, "step": 7,
        "samples_of_each_length": 8, "evaluation_seed": 0, "network": None, "train_dtype": "float32",
        "lengths": [1, 2, 3], "accuracy": [99.0, 98.0, score],
        "model": {"layers": 3, "heads": 8, "width": 64}, **other,
    }  # fmt: skip


def test_cells_are_means_over_seeds_beside_the_papers(tmp_path, capsys):
    reports = [report(seed=s, score=x) for s, x in enumerate((50.0, 56.0, 53.0))]
    reports.append(report(task="missing_duplicate_string", position="dape_kerple", score=80.0))
    table = chomsky_table.make_table(reports)
    first, second = table["cells"]
    assert (first["mean"], first["standard_deviation"], first["seeds"]) == (53.0, 3.0, [0, 1, 2])
    assert (first["paper"], second["paper"], second["standard_deviation"]) == (73.52, 87.57, None)
    assert first["accuracy"] == [99.0, 98.0, 53.0]
    assert (first["above_chance"], second["above_chance"]) == (False, False)  # 24 rows and 8 rows: 20 % and 35 %
    chomsky_table.print_table(table)
    said = capsys.readouterr().out
    assert "53.0 ± 3.0° (73.5)" in said
    assert "80.0° (87.6)" in said
    assert "° no better than chance" in said
    assert "DAPE-Kerple" in said
    chomsky_table.write(table, tmp_path / "table")
    assert json.loads((tmp_path / "table.json").read_text()) == table
    assert (tmp_path / "table.png").stat().st_size > 10_000


@pytest.mark.parametrize(("task", "score", "above"), [
    ("even_pairs", 50.0, False), ("even_pairs", 52.9, False), ("even_pairs", 53.3, True),
    ("modular_arithmetic", 20.0, False), ("modular_arithmetic", 22.4, False), ("modular_arithmetic", 22.7, True),
])  # fmt: skip
def test_chance_is_left_behind_by_two_standard_errors(task, score, above):
    cells = chomsky_table.make_table([report(task, score=score, samples_of_each_length=1000)])["cells"]
    assert cells[0]["above_chance"] == above  # sqrt(p (1 - p) / 1000) is 1.58 % and 1.26 %


@pytest.mark.parametrize("what", ["step", "model", "samples_of_each_length", "evaluation_seed", "train_dtype"])
def test_runs_of_different_kinds_do_not_share_a_table(what):
    with pytest.raises(UserError, match=f"the runs cannot stand in one table: {what} is "):
        chomsky_table.make_table([report(), report(seed=1, **{what: 9})])


def test_the_report_of_a_run(tmp_path):
    """What was scored otherwise is not the report that is asked for; what is damaged or another run's is refused."""

    def find(step=7, longest=3, samples=8):
        return chomsky_table.find_report(tmp_path, "even_pairs", "alibi", 0, step, longest, samples)

    assert find() is None
    folder = tmp_path / "evaluation"
    for step in (5, 40, 7):
        write_json(report(step=step), folder / f"chomsky_even_pairs_step{step}_1to3.json")
    assert find() == report()
    assert find(step=40)["step"] == 40
    assert find(longest=4) is find(samples=9) is find(step=6) is None
    path = folder / "chomsky_even_pairs_step50_1to3.json"
    good = report(step=50)
    for broken in (
        "{",
        "[]",
        {"format": 1},
        {**good, "score": "x"},
        {**good, "score": None},
        {**good, "accuracy": [1.0]},
    ):
        path.write_text(broken if isinstance(broken, str) else json.dumps(broken))
        with pytest.raises(UserError, match="step50_1to3.json is damaged"):
            find(step=50)
    path.write_text(json.dumps({**good, "seed": 1}))
    with pytest.raises(UserError, match=r"is the report of another run: seed=1; remove it"):
        find(step=50)
    path.write_text(json.dumps({**good, "evaluation_seed": 5}))
    with pytest.raises(UserError, match=r"another run: evaluation_seed=5; remove it"):
        find(step=50)


def test_the_papers_figures_stand_beside_its_own_network_alone(capsys):
    for change, paper in (({}, 99.58), ({"width": 8}, 99.58), ({"kernel_width": 3}, None), ({"per_head": True}, None)):
        network = {"variant": "concat_residual", "width": 32, "per_head": False, "kernel_width": 1, **change}
        table = chomsky_table.make_table([report(position="dape_kerple", network=network)])
        assert table["cells"][0]["paper"] == paper
        chomsky_table.print_table(table)
        assert f"kernel_width {network['kernel_width']}" in capsys.readouterr().out
    with pytest.raises(UserError, match="the DAPE networks of dape_kerple differ"):
        chomsky_table.make_table([report(position="dape_kerple", network=n) for n in (None, {"width": 3})])


def test_the_papers_figures():
    assert printed("even_pairs", "randomised_rope") == 99.98
    assert printed("even_pairs", "rope") is None
    assert printed("bucket_sort", "dape_fire") == 99.37
    assert printed("even_pairs", "randomised_sinusoidal") == 91.27
    assert printed("binary_multiplication", "rope") is None
    assert printed("even_pairs", "dape_rope") is None
    assert sum(printed(task, METHODS[0]) is not None for task in TASKS) == 14
