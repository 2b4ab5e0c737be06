"""The commands as a user types them, each in a process of its own."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import zstandard

from dape_jax.training.metrics import read_metrics
from experiments.command import visible_devices

SMALL = ["--config=configs/quickstart.py:dape_kerple", "--config.model.num_layers=1", "--config.model.width=16",
         "--config.model.num_heads=2", "--config.training.batch_size=8", "--config.training.steps=30",
         "--config.training.checkpoint_every=5", "--config.training.log_every=1"]  # fmt: skip


@pytest.fixture
def command(tmp_path):
    base = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    base |= {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(tmp_path / "xdg")}

    def command(name, *arguments, start=False, environment=()):
        line = [sys.executable, "-m", f"experiments.{name}", *map(str, arguments)]
        if start:
            return subprocess.Popen(
                line, env={**base, **dict(environment)}, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )
        environment = {**base, **dict(environment)}
        return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=300, check=False)

    return command


def test_a_reader_that_goes_away():
    """`sample | head` ends without a traceback."""
    code = "from experiments import command; command.run(lambda _: [print('x' * 99) for _ in range(99999)], 'usage')"
    line = [sys.executable, "-c", code]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        writer.stdout.close()
        assert writer.stderr.read() == ""
    assert writer.returncode == 1


def data(folder):
    return ["--config.data.source=folder", f"--config.data.path={folder}"]


def losses(workdir):
    return [(line["step"], line["loss"], line["grad_norm"]) for line in read_metrics(workdir / "metrics.jsonl")]


def test_train_evaluate_compare(command, text_folder, tmp_path):
    for position in ("rope", "dape_kerple"):
        config = [SMALL[0].replace("dape_kerple", position), *SMALL[1:]]
        trained = command("train", *config, *data(text_folder), f"--workdir={tmp_path / position}")
        assert trained.returncode == 0, trained.stderr
        assert "trained to step 30" in trained.stdout
        assert "tokens/s" in trained.stderr
        evaluated = command("evaluate", f"--workdir={tmp_path / position}", "--lengths=64,16,128")
        assert evaluated.returncode == 0, evaluated.stderr
    compared = command("compare", tmp_path / "rope", tmp_path / "dape_kerple")
    assert compared.returncode == 0, compared.stderr
    assert "DAPE-Kerple" in compared.stdout
    assert "Perplexity of the last 16 tokens" in compared.stdout
    both = json.loads((tmp_path / "comparison.json").read_text())["reports"]
    assert [r["method"] for r in both] == ["RoPE", "DAPE-Kerple"]
    assert both[0]["lengths"] == [16, 64, 128]
    assert (tmp_path / "comparison.png").exists()


@pytest.mark.slow
def test_reports_of_another_protocol_are_compared_among_themselves(command, text_folder, tmp_path):
    runs = [tmp_path / "rope", tmp_path / "kerple"]
    for run in runs:
        config = [SMALL[0].replace("dape_kerple", run.name), *SMALL[1:], "--config.training.steps=5"]
        assert command("train", *config, *data(text_folder), f"--workdir={run}").returncode == 0
    official = ("--protocol=official", "--max_windows=5")
    evaluated = command("evaluate", f"--workdir={runs[0]}", "--lengths=16,400", *official)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "official_test_step5_k256_16to400.json" in evaluated.stdout
    compared = command("compare", runs[0], official[0], f"--output={tmp_path / 'official'}")
    assert "80 tokens in 5 of" in " ".join(compared.stdout.split()), compared.stderr
    assert command("evaluate", f"--workdir={runs[1]}", "--lengths=16").returncode == 0
    refused = command("compare", *runs, official[0])
    check_refusal(refused, "run experiments.evaluate --protocol=official first; what there is is by last_k")


def test_sample(command, text_folder, tmp_path):
    config = [SMALL[0].replace("dape_kerple", "learned"), *SMALL[1:], "--config.training.steps=10"]
    run = f"--workdir={tmp_path / 'run'}"
    assert command("train", *config, *data(text_folder), run).returncode == 0
    sampled = command("sample", run, "--prompt=abc", "--length=20", "--temperature=0.7", "--top_k=50", "--samples=2")
    assert sampled.returncode == 0, sampled.stderr
    assert sampled.stdout.count("abc") >= 2
    assert "tokens/s]" in sampled.stderr
    again = command("sample", run, "--prompt=abc", "--length=20", "--temperature=0.7", "--top_k=50", "--samples=2")
    assert again.stdout == sampled.stdout
    check_refusal(command("sample", run, "--length=0"), "--length=0: 1 or more is needed")


@pytest.mark.slow
def test_wrong_sampling_input_gets_one_line(command, text_folder, tmp_path):
    config = [SMALL[0].replace("dape_kerple", "learned"), *SMALL[1:], "--config.training.steps=10"]
    run = f"--workdir={tmp_path / 'run'}"
    assert command("train", *config, *data(text_folder), run).returncode == 0
    (tmp_path / "prompt").write_text("x" * 60)
    for flags, message in (
        (
            [f"--prompt_file={tmp_path / 'prompt'}", "--length=9"],
            "a prompt of 60 and 9 more tokens: 69 tokens",
        ),
        (["--prompt=a", f"--prompt_file={tmp_path / 'prompt'}"], "--prompt and --prompt_file: give one of them"),
        ([f"--prompt_file={tmp_path / 'none'}"], "cannot be read: No such file"),
        (["--temperature=hot"], "--temperature"),
        ([f"--tokenizer={text_folder}"], "holds neither tokenizer.json nor"),
    ):
        check_refusal(command("sample", run, *flags), message)
    check_refusal(command("evaluate", run, "--lengths=64,65"), "--lengths: 65 tokens are more than the 64 positions")


@pytest.mark.slow
def test_a_table_of_tasks_goes_on_where_it_stopped(command, tmp_path):
    table = ["--config=configs/chomsky_small.py", f"--workdir={tmp_path}", "--tasks=even_pairs", "--seeds=0,1"]
    small = ["--config.training.steps=4", "--config.model.num_layers=1", "--config.model.width=16",
             "--config.evaluation.lengths=(42,)", "--config.evaluation.max_windows=2"]  # fmt: skip
    made = command("chomsky_table", *table, "--methods=kerple", *small)
    assert made.returncode == 0, made.stderr
    assert "(57.5)" in made.stdout
    first = tmp_path / "even_pairs" / "kerple" / "seed0" / "evaluation"
    written = {path: path.stat().st_mtime_ns for path in first.iterdir()}
    again = command("chomsky_table", *table, "--methods=kerple,rope", "--jobs=2", *small)
    assert again.returncode == 0, again.stderr
    assert written == {path: path.stat().st_mtime_ns for path in first.iterdir()}
    cells = json.loads((tmp_path / "table.json").read_text())["cells"]
    assert [(cell["position"], cell["seeds"]) for cell in cells] == [("kerple", [0, 1]), ("rope", [0, 1])]
    for flags, message in (
        (["--tasks=even_pair"], "did you mean 'even_pairs'"), (["--methods=kerpel"], "did you mean 'kerple'"),
        (["--seeds=a"], "--seeds=a: 'a' is not an integer"), (["--config=nowhere.py"], "is no file"),
        (["--jobs=0"], "--jobs=0: 1 or more"),
    ):  # fmt: skip
        check_refusal(command("chomsky_table", *table, *flags), message)
    for flags, message in (
        (["--config.model.fire.width=0"], "model.fire.width=0"), (["--config.training.seed=3"], "--tasks, --seeds and"),
        (["--config.model.widht=3"], "did you mean 'width'?"), (["--seeds=0,0"], "names 0 twice"),
        (["--config.training.steps=5"], "holds another run: training.steps is 4 there and 5 here"),
        (["--methods=randomised_rope", "--config.evaluation.lengths=(42,2048)"], "at length 2048, 2049"),
    ):  # fmt: skip
        check_refusal(command("chomsky_table", *table, "--methods=kerple", *small, *flags), message)
    run = tmp_path / "even_pairs" / "kerple" / "seed0"
    check_refusal(command("sample", f"--workdir={run}"), "is a run on the task even_pairs; sampling needs one on text")
    check_refusal(command("compare", run), "is a run on a task; experiments.chomsky_table makes tables of those")
    check_refusal(command("evaluate", f"--workdir={run}", "--draw_seed=4294967296"), "0 to 2^32 - 1 is needed")
    longer = command("chomsky_table", *table, "--methods=kerple", *small, "--config.evaluation.lengths=43")
    assert longer.returncode == 0, longer.stderr
    assert "lengths 41 to 43" in longer.stdout


@pytest.mark.slow
def test_a_table_that_is_stopped_stops_its_runs(command, tmp_path):
    process = command(
        "chomsky_table", "--config=configs/chomsky_small.py", f"--workdir={tmp_path}", "--tasks=even_pairs",
        "--seeds=0", "--methods=kerple", "--config.training.steps=1000000", "--config.training.log_every=1", start=True,
    )  # fmt: skip
    metrics = tmp_path / "even_pairs" / "kerple" / "seed0" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and read_metrics(metrics)) and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=100) == 143
    written = len(read_metrics(metrics))
    time.sleep(3)
    assert len(read_metrics(metrics)) == written > 0


@pytest.mark.slow
def test_a_run_of_four_devices_is_evaluated_on_one_and_after_its_text_has_moved(command, text_folder, tmp_path):
    four = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    workdir = f"--workdir={tmp_path / 'run'}"
    trained = command("train", *SMALL, "--config.mesh.fsdp=4", *data(text_folder), workdir, environment=four)
    assert trained.returncode == 0, trained.stderr
    check_refusal(command("evaluate", workdir, "--lengths=64"), "mesh.fsdp=4 does not divide the 1 devices")
    text_folder.rename(tmp_path / "moved")
    assert command("evaluate", workdir, "--lengths=64", "--fsdp=1").returncode == 2
    moved = command("evaluate", workdir, "--lengths=64", "--fsdp=1", f"--data_path={tmp_path / 'moved'}")
    assert moved.returncode == 0, moved.stderr


def test_flag_files_and_help(command, tmp_path):
    (tmp_path / "flags").write_text(f"{SMALL[0]}\n--config.training.steps=0\n--workdir={tmp_path / 'run'}\n")
    check_refusal(command("train", f"--flagfile={tmp_path / 'flags'}"), "training.steps=0: 1 or more is needed")
    shown = command("evaluate", "--help")
    assert shown.returncode == 0
    assert "usage: python -m experiments.evaluate" in shown.stdout
    assert "--lengths" in shown.stdout


@pytest.mark.slow
def test_kill_9_and_resume(command, text_folder, tmp_path):
    """Killed at several moments, the run computes the losses of an unbroken one, bit for bit."""
    arguments = [*SMALL, *data(text_folder)]
    assert command("train", *arguments, f"--workdir={tmp_path / 'straight'}").returncode == 0
    broken = tmp_path / "broken"
    for lines_before_kill in (3, 11, 12, 24):
        process = command("train", *arguments, f"--workdir={broken}", start=True)
        deadline = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < deadline:
            if len(read_metrics(broken / "metrics.jsonl")) >= lines_before_kill:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.002)
        process.wait()
    finished = command("train", *arguments, f"--workdir={broken}")
    assert finished.returncode == 0, finished.stderr
    assert losses(broken) == losses(tmp_path / "straight")
    assert len(losses(broken)) == 30


@pytest.mark.slow
def test_own_vocabulary_on_json_lines(command, text_folder, tmp_path):
    """A vocabulary of the user's own text, training with it on compressed JSON lines in segments, and its refusals."""
    lines = [json.dumps({"content": path.read_text()}) for path in sorted(text_folder.glob("*"))]
    pile, coder = tmp_path / "pile.jsonl.zst", tmp_path / "bpe.json"
    pile.write_bytes(zstandard.ZstdCompressor().compress("\n".join([*lines, '{"content": "cut']).encode()))
    text = ["--config.data.source=jsonl", f"--config.data.path={pile}", "--config.data.text_field=content"]
    skip = "--config.data.skip_broken=True"
    make = ["train_tokenizer", SMALL[0], *text, f"--output={coder}"]
    check_refusal(command(*make, "--vocab_size=300"), "pile.jsonl.zst, line 13: it is no whole JSON object")
    check_refusal(command(*make, skip, "--vocab_size=100"), "vocab_size=100: 257 or more is needed")
    check_refusal(command(*make, skip), "--vocab_size is missing")
    check_refusal(command("train_tokenizer", SMALL[0], "--vocab_size=300"), "--output is missing")
    check_refusal(command(*make[:-1], skip, "--vocab_size=300", f"--output={tmp_path}/no/x.json"), "cannot be written")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pile.jsonl.zst", "text"]
    made = command(*make, skip, "--vocab_size=300")
    assert made.returncode == 0, made.stderr
    assert "300 ids from the train documents of" in made.stdout
    assert "reading" in made.stderr
    check_refusal(command(*make, skip, "--vocab_size=300"), "bpe.json exists")

    arguments = [*SMALL, *text, skip, f"--config.data.tokenizer={coder}", "--config.data.packing=segments",
                 "--config.training.steps=5", f"--workdir={tmp_path / 'run'}"]  # fmt: skip
    trained = command("train", *arguments)
    assert trained.returncode == 0, trained.stderr
    assert "left out: 1 broken documents, listed in" in trained.stdout
    assert len(losses(tmp_path / "run")) == 5
    evaluated = command("evaluate", f"--workdir={tmp_path / 'run'}", "--lengths=16,32")
    assert evaluated.returncode == 0, evaluated.stderr
    report = json.loads(next((tmp_path / "run" / "evaluation").glob("*.json")).read_text())
    assert report["tokenizer"].startswith("BPE 300 (")
    coder.unlink()
    assert command(*make, skip, "--vocab_size=310").returncode == 0
    message = "with 310 ids, 0 ending documents, and the model in"
    check_refusal(command("train", *arguments), message)
    check_refusal(command("evaluate", f"--workdir={tmp_path / 'run'}"), message)


CASES = {
    "no python": (["--config=README.md", "--workdir=W"], "is no configuration file; known: configs/base.py"),
    "no get_config": (["--config=configs/__init__.py", "--workdir=W"], "there is no get_config in it"),
    "unknown configuration": (["--config=configs/quickstat.py", "--workdir=W"], "did you mean 'configs/quickstart.py'"),
    "unknown folder": (["--config=confs/x.py", "--workdir=W"], "--config=confs/x.py is no configuration file"),
    "no configuration": (["--workdir=W"], "--config is missing"),
    "bucket": ([SMALL[0], "--workdir=gs://bucket/run"], "a local or mounted folder is needed"),
    "no workdir": ([SMALL[0]], "--workdir is missing"),
    "unknown position": (["--config=configs/quickstart.py:dape_kerpel", "--workdir=W"], "did you mean 'dape_kerple'"),
    "unknown field": ([SMALL[0], "--config.model.head=3", "--workdir=W"], "model.head is no field"),
    "unknown section": ([SMALL[0], "--config.modle.width=3", "--workdir=W"], "did you mean 'model'"),
    "float for an integer": ([SMALL[0], "--config.training.steps=1.5", "--workdir=W"], "steps=1.5: int is needed"),
    "word for a number": ([SMALL[0], "--config.training.steps=many", "--workdir=W"], "steps=many: int is needed"),
    "value out of range": ([SMALL[0], "--config.training.steps=0", "--workdir=W"], "training.steps=0"),
    "width and heads": ([SMALL[0], "--config.model.num_heads=7", "--workdir=W"], "not divisible by num_heads=7"),
    "missing text": ([SMALL[0], *data("/nowhere"), "--workdir=W"], "data.path='/nowhere' does not exist"),
    "unknown tokenizer": ([SMALL[0], "--config.data.tokenizer=gtp2", "--workdir=W"], "='gtp2' is unknown"),
    "unknown dataset": ([SMALL[0], "--config.data.source=tfds", "--config.data.path=zzz", "--workdir=W"],
                        "data.path='zzz' is no dataset that TFDS knows"),
    "wrong flag": ([SMALL[0], "--workdri=W"], "usage: python -m experiments.train"),
    "stray word": ([SMALL[0], "--workdir=W", "now"], "usage: python -m experiments.train"),
    "too long": ([SMALL[0], "--config.data.sequence_length=100000000", "--workdir=W"], "too few for one window"),
}  # fmt: skip


FAST = ("unknown configuration", "no workdir", "unknown position", "unknown field", "word for a number", "missing text",
        "wrong flag")  # fmt: skip
"""Each costs the start of a process."""


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c in FAST else pytest.mark.slow) for c in CASES])
def test_wrong_training_input_gets_one_line(case, command, tmp_path):
    arguments, message = CASES[case]
    result = command("train", *(a.replace("=W", f"={tmp_path / 'run'}") for a in arguments))
    check_refusal(result, message)
    assert not (tmp_path / "run").exists()


def check_refusal(result, message):
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    stated = (line for line in result.stderr.splitlines() if line.strip() and "%|" not in line)  # no progress bars
    lines = [line for line in stated if not line.startswith("usage: ")]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    assert message in result.stderr


WRONG_LENGTHS = {"64,0": "0 is no length", "64,abc": "'abc' is not an integer", "64,1.5": "'1.5' is not an integer",
                 "": "'' is not an integer", "1000000": "longer than every test document"}  # fmt: skip
WRONG_EVALUATION = {
    "--k=many": "many",
    "--step=7": "no such checkpoint",
    "--split=tset": "did you mean 'test'",
    "--protocol=lask_k": "did you mean 'last_k'",
    "--length=64": "usage: python -m experiments.evaluate",
}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_wrong_evaluation_input_gets_one_line(command, text_folder, tmp_path, every):
    assert command("train", *SMALL, *data(text_folder), f"--workdir={tmp_path / 'run'}").returncode == 0
    before = sorted(p.relative_to(tmp_path) for p in (tmp_path / "run").rglob("*"))
    workdir = f"--workdir={tmp_path / 'run'}"
    wrong = {
        (workdir, "--lengths=64", "--k=65"): "k=65",
        (f"--workdir={tmp_path / 'none'}",): "holds no run",
    }
    if every:
        wrong |= {(workdir, f"--lengths={lengths}"): message for lengths, message in WRONG_LENGTHS.items()}
        wrong |= {(workdir, flag): message for flag, message in WRONG_EVALUATION.items()}
        both = "--protocol=non_overlapping", "--max_windows=4"
        wrong |= {(workdir, *both): "non_overlapping scores all text of the split", (): "--workdir is missing"}
        check_refusal(command("compare"), "usage: python -m experiments.compare")
    for arguments, message in wrong.items():
        check_refusal(command("evaluate", *arguments), message)
    check_refusal(command("compare", tmp_path / "run"), "holds no evaluation")
    assert sorted(p.relative_to(tmp_path) for p in (tmp_path / "run").rglob("*")) == before
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(("given", "seen"), [
    (None, ["0", "1"]), ("5,7", ["5", "7"]), ("3", ["3"]), ("4,6,", ["4", "6"]), ("", ["", ""]), ("-1", ["-1", "-1"]),
])  # fmt: skip
def test_which_devices_parallel_runs_see(given, seen, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert visible_devices("CUDA_VISIBLE_DEVICES", 2) == seen
