"""Trains and scores tasks x methods x seeds of the Chomsky hierarchy and puts them into one table beside the paper's.

python -m experiments.chomsky_table --config=configs/chomsky_small.py --workdir=DIR [--tasks=even_pairs,odds_first]
    [--methods=randomised_rope,dape_kerple] [--seeds=0,1,2] [--jobs=N] [--config.field=value ...]

Each run lies in DIR/TASK/METHOD/seedN with a log. Started again, the command goes on where it stopped.
"""

import ast
import concurrent.futures
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

from absl import flags
from tqdm import tqdm

from dape_jax import config as config_lib
from dape_jax.data.chomsky import TASKS, get_task
from dape_jax.errors import UserError
from dape_jax.evaluation import chomsky_table
from dape_jax.training.workdir import CONFIG_FILE, check_same, read_record
from experiments import command

_CONFIG = flags.DEFINE_string("config", "configs/chomsky.py", "Configuration file of every run, without a method.")
_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of all runs and of the table.")
_TASKS = flags.DEFINE_string("tasks", ",".join(TASKS), "Comma-separated tasks.")
_METHODS = flags.DEFINE_string(
    "methods",
    "randomised_learned,randomised_sinusoidal,randomised_rope,alibi,kerple,fire,dape_alibi,dape_kerple,dape_fire",
    "Comma-separated position encodings.",
)
_SEEDS = flags.DEFINE_string("seeds", "0,1,2", "Comma-separated seeds.")
_JOBS = flags.DEFINE_integer("jobs", 1, "Runs at a time; on GPU and TPU each takes the device of its number.")
_USAGE = (
    "python -m experiments.chomsky_table --config=configs/chomsky_small.py --workdir=DIR [--tasks=A,B] [--methods=X,Y]"
)
OVERRIDES: list[str] = []
"""--config.field=value, for every run."""


class Job(NamedTuple):
    """One run of the table."""

    task: str
    position: str
    seed: int
    workdir: Path


def main(_: list[str]) -> None:
    root = command.workdir(_WORKDIR.value)
    jobs = _jobs(root)
    if _JOBS.value < 1:
        raise UserError(f"--jobs={_JOBS.value}: 1 or more is needed")
    for job in jobs:
        _check(job)
    todo = [job for job in jobs if chomsky_table.latest_report(job.workdir) is None]
    failed = _run_all(todo)
    reports = [report for job in jobs if (report := chomsky_table.latest_report(job.workdir)) is not None]
    if reports:
        table = chomsky_table.make_table(reports)
        chomsky_table.print_table(table)
        chomsky_table.write(table, root / "table")
        print(f"{root / 'table.json'}\n{root / 'table.png'}")
    if failed:
        command.stop(f"{len(failed)} of {len(jobs)} runs failed: {'; '.join(failed)}")


def _jobs(root: Path) -> list[Job]:
    if not Path(_CONFIG.value).is_file():
        raise UserError(f"--config={_CONFIG.value} is no file; configs/chomsky_small.py is one")
    tasks, positions = ([x for x in flag.value.split(",") if x] for flag in (_TASKS, _METHODS))
    for task in tasks:
        get_task(task)
    for position in positions:
        config_lib.split_position(position)
    seeds = command.integers("seeds", _SEEDS.value)
    for flag, values in ((_TASKS, tasks), (_METHODS, positions), (_SEEDS, seeds)):
        if len(set(values)) < len(values):
            raise UserError(f"--{flag.name}={flag.value} names one twice")
    jobs = [Job(t, p, s, root / t / p / f"seed{s}") for t in tasks for s in seeds for p in positions]
    if not jobs:
        raise UserError("--tasks, --methods and --seeds: at least one of each is needed")
    return jobs


def _check(job: Job) -> None:
    """Refuses a wrong configuration before anything runs, and a run in the folder that has another one."""
    raw: Any = command.load_config(f"{_CONFIG.value}:{job.position}")
    raw.data.task, raw.training.seed = job.task, job.seed
    for override in OVERRIDES:
        name, _, value = override.removeprefix("--config.").partition("=")
        if name in ("data.task", "training.seed", "model.position"):
            raise UserError(f"{override}: --tasks, --seeds and --methods say it for each run")
        try:
            parsed = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            parsed = value
        try:
            raw.update_from_flattened_dict({name: parsed})
        except (KeyError, TypeError, ValueError) as e:
            raise UserError(f"{override} does not fit the configuration: {e}") from e
    config = config_lib.from_mapping(raw)
    if config.data.source != config_lib.CHOMSKY:
        raise UserError(f"--config={_CONFIG.value}: data.source={config.data.source!r} is no task")
    if max(config.evaluation.lengths) <= config.data.sequence_length:
        raise UserError(f"evaluation.lengths={config.evaluation.lengths}: a length beyond training is needed")
    if (job.workdir / CONFIG_FILE).exists():
        check_same(job.workdir, read_record(job.workdir)["config"], config_lib.to_dict(config))
        report = chomsky_table.latest_report(job.workdir)
        wanted = {"step": config.training.steps, "samples_of_each_length": config.evaluation.max_windows}
        for what, value in wanted.items():
            if report is not None and report[what] != value:
                raise UserError(
                    f"{job.workdir} was scored with {what}={report[what]}, not {value}; use another workdir"
                )


def _run_all(jobs: list[Job]) -> list[str]:
    """Runs what is not done; returns what failed, in words."""
    failed, stop = [], threading.Event()
    slots = list(range(_JOBS.value))
    with (
        tqdm(total=len(jobs), desc="runs", unit="run", disable=not jobs) as progress,
        concurrent.futures.ThreadPoolExecutor(_JOBS.value) as pool,
    ):

        def work(job: Job) -> None:
            slot = slots.pop()
            try:
                error = None if stop.is_set() else _run(job, slot)
            finally:
                slots.append(slot)
            if error is not None:
                failed.append(error)
            progress.set_postfix_str(f"{job.task}, {job.position}, seed {job.seed}")
            progress.update()

        try:
            for done in concurrent.futures.as_completed([pool.submit(work, job) for job in jobs]):
                done.result()
        except KeyboardInterrupt:
            stop.set()  # the runs under way have had the same signal and save what they have
            raise
    return failed


def _run(job: Job, slot: int) -> str | None:
    """Trains and scores one run; returns what went wrong, if something did."""
    job.workdir.parent.mkdir(parents=True, exist_ok=True)
    log_path = job.workdir.with_name(job.workdir.name + ".log")
    chosen = [f"--config={_CONFIG.value}:{job.position}", f"--config.data.task={job.task}"]
    train = ["train", *chosen, f"--config.training.seed={job.seed}", *OVERRIDES]
    environment = dict(os.environ)
    if _JOBS.value > 1:
        environment |= {"CUDA_VISIBLE_DEVICES": str(slot), "TPU_VISIBLE_CHIPS": str(slot)}
    with log_path.open("a") as log:
        for name, *arguments in (train, ["evaluate"]):
            line = [sys.executable, "-m", f"experiments.{name}", *arguments, f"--workdir={job.workdir}"]
            if subprocess.run(line, stdout=log, stderr=log, env=environment, check=False).returncode:
                errors = [x for x in log_path.read_text(errors="replace").splitlines() if x.startswith("error: ")]
                said = errors[-1].removeprefix("error: ") if errors else f"see {log_path}"
                return f"{job.task}, {job.position}, seed {job.seed}: {said}"
    return None


if __name__ == "__main__":
    OVERRIDES += [argument for argument in sys.argv if argument.startswith("--config.")]
    sys.argv = [argument for argument in sys.argv if argument not in OVERRIDES]
    command.run(main, _USAGE)
