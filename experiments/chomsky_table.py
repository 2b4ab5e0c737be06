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
from typing import IO, Any, NamedTuple

from absl import flags
from tqdm import tqdm

from dape_jax import config as config_lib
from dape_jax.data.chomsky import TASKS
from dape_jax.errors import UserError
from dape_jax.evaluation import chomsky_table
from dape_jax.training.run import make_run
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
_JOBS = flags.DEFINE_integer("jobs", 1, "Runs at a time; on GPU and TPU each takes a device, of those visible.")
_USAGE = (
    "python -m experiments.chomsky_table --config=configs/chomsky_small.py --workdir=DIR [--tasks=A,B] [--methods=X,Y]"
)
DEVICES = ("CUDA_VISIBLE_DEVICES", "TPU_VISIBLE_CHIPS")
"""Environment variables that say which devices a process sees."""
OVERRIDES: list[str] = []
"""--config.field=value, for every run."""


class Job(NamedTuple):
    """One run of the table, and what its report must be of."""

    task: str
    position: str
    seed: int
    workdir: Path
    step: int = 0
    longest: int = 0
    samples: int = 0

    def report(self) -> dict[str, Any] | None:
        return chomsky_table.find_report(
            self.workdir, self.task, self.position, self.seed, self.step, self.longest, self.samples
        )


def main(_: list[str]) -> None:
    root = command.workdir(_WORKDIR.value)
    if root.exists() and not root.is_dir():
        raise UserError(f"--workdir={root} is a file; a folder is needed")
    jobs = _jobs(root)
    if _JOBS.value < 1:
        raise UserError(f"--jobs={_JOBS.value}: 1 or more is needed")
    for name in DEVICES:
        visible = len(command.visible_devices(name, _JOBS.value))
        if _JOBS.value > visible:
            raise UserError(f"--jobs={_JOBS.value}: {name}={os.environ[name]} lets {visible} be seen")
    jobs = [_checked(job) for job in jobs]
    missing = [job for job in jobs if job.report() is None]
    print(f"{len(missing)} of {len(jobs)} runs to do; their logs: {root}/TASK/METHOD/seedN.log")
    failed = _run_all(missing)
    reports = [report for job in jobs if (report := job.report()) is not None]
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
    tasks = command.names("tasks", _TASKS.value, TASKS)
    positions = command.names("methods", _METHODS.value, config_lib.positions())
    seeds = command.integers("seeds", _SEEDS.value)
    return [Job(t, p, s, root / t / p / f"seed{s}") for t in tasks for s in seeds for p in positions]


def _checked(job: Job) -> Job:
    """With what its report must be of. Refuses a wrong configuration, and a run in the folder that has another one."""
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
        if name == "evaluation.lengths" and isinstance(parsed, int):
            parsed = (parsed,)
        try:
            raw.update_from_flattened_dict({name: parsed})
        except (KeyError, TypeError, ValueError) as e:
            raise UserError(f"{override} does not fit the configuration: {e}") from e
    config = config_lib.from_mapping(raw)
    if config.data.source != config_lib.CHOMSKY:
        raise UserError(f"--config={_CONFIG.value}: data.source={config.data.source!r} is no task")
    if max(config.evaluation.lengths) <= config.data.sequence_length:
        raise UserError(f"evaluation.lengths={config.evaluation.lengths}: a length beyond training is needed")
    run = make_run(config)
    run.problem.check(run.model)
    if job.workdir.exists():
        if not job.workdir.is_dir():
            raise UserError(f"{job.workdir} is a file, where the folder of a run is to be; use another workdir")
        if (job.workdir / CONFIG_FILE).exists():
            check_same(job.workdir, read_record(job.workdir)["config"], config_lib.to_dict(config))
        elif any(job.workdir.iterdir()):
            raise UserError(f"{job.workdir} has files, and none of a run ({CONFIG_FILE}); use another workdir")
    longest, samples = max(config.evaluation.lengths), config.evaluation.max_windows
    job = job._replace(step=config.training.steps, longest=longest, samples=samples)
    job.report()  # which refuses a damaged one
    return job


class _Children:
    """The processes under way, which end with this one."""

    def __init__(self) -> None:
        self.stopped = threading.Event()
        self._running: list[subprocess.Popen] = []

    def run(self, line: list[str], log: IO[str], environment: dict[str, str]) -> int | None:
        """The exit status; None if all was stopped."""
        if self.stopped.is_set():
            return None
        with subprocess.Popen(line, stdout=log, stderr=log, env=environment) as process:
            self._running.append(process)
            status = process.wait()
            self._running.remove(process)
        return None if self.stopped.is_set() else status

    def stop(self) -> None:
        self.stopped.set()
        for process in list(self._running):
            process.terminate()


def _run_all(jobs: list[Job]) -> list[str]:
    """Runs what is not done; returns what failed, in words."""
    failed, children = [], _Children()
    slots = list(range(_JOBS.value))
    with (
        tqdm(total=len(jobs), desc="runs", unit="run", disable=not jobs) as progress,
        concurrent.futures.ThreadPoolExecutor(_JOBS.value) as pool,
    ):

        def work(job: Job) -> None:
            slot = slots.pop()
            progress.set_postfix_str(f"{job.task}, {job.position}, seed {job.seed}")
            try:
                error = _run(job, slot, children)
            finally:
                slots.append(slot)
            if error is not None:
                failed.append(error)
            progress.update()

        try:
            for done in concurrent.futures.as_completed([pool.submit(work, job) for job in jobs]):
                done.result()
        except KeyboardInterrupt:
            children.stop()  # they save what they have
            raise
    return failed


def _run(job: Job, slot: int, children: _Children) -> str | None:
    """Trains and scores one run; returns what went wrong, if something did."""
    job.workdir.parent.mkdir(parents=True, exist_ok=True)
    log_path = job.workdir.with_name(job.workdir.name + ".log")
    chosen = [f"--config={_CONFIG.value}:{job.position}", f"--config.data.task={job.task}"]
    train = ["train", *chosen, f"--config.training.seed={job.seed}", *OVERRIDES]
    evaluate = ["evaluate", f"--step={job.step}", f"--lengths={job.longest}", f"--max_windows={job.samples}"]
    environment = dict(os.environ)
    if _JOBS.value > 1:
        environment |= {name: command.visible_devices(name, _JOBS.value)[slot] for name in DEVICES}
    with log_path.open("a") as log:
        for name, *arguments in (train, evaluate):
            line = [sys.executable, "-m", f"experiments.{name}", *arguments, f"--workdir={job.workdir}"]
            log.flush()
            before = log_path.stat().st_size
            status = children.run(line, log, environment)
            if status:
                said = log_path.read_bytes()[before:].decode(errors="replace").splitlines()
                errors = [x.removeprefix("error: ") for x in said if x.startswith("error: ")]
                return f"{job.task}, {job.position}, seed {job.seed}: {(errors or [f'see {log_path}'])[-1]}"
            if status is None:
                return None
    return None


if __name__ == "__main__":
    OVERRIDES += [argument for argument in sys.argv if argument.startswith("--config.")]
    sys.argv = [argument for argument in sys.argv if argument not in OVERRIDES]
    command.run(main, _USAGE)
