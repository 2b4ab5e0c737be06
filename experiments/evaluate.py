"""Scores the checkpoint of a run at a list of lengths and writes DIR/evaluation/last_k_step*.{json,png}.

python -m experiments.evaluate --workdir=DIR [--lengths=128,512,2048] [--k=K] [--step=N] [--split=test]
"""

import dataclasses

import jax
from absl import flags

from dape_jax import config as config_lib
from dape_jax.data.splits import SPLITS
from dape_jax.data.tokenizer import load_tokenizer
from dape_jax.errors import UserError, nearest
from dape_jax.evaluation import extrapolation, report
from dape_jax.sharding import tree_sharding
from dape_jax.training.checkpoint import Checkpoints, require_step
from dape_jax.training.run import check_text, check_tokenizer, load_config, make_run, read_record
from dape_jax.training.step import init_params
from dape_jax.training.stop import deferred_signals
from experiments import command

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_LENGTHS = flags.DEFINE_string("lengths", None, "Comma-separated lengths in tokens; default evaluation.lengths.")
_K = flags.DEFINE_integer("k", None, "Scored tokens of a window; default evaluation.k, else min(256, shortest length).")
_STEP = flags.DEFINE_integer("step", None, "Checkpoint; default the latest.")
_MAX_WINDOWS = flags.DEFINE_integer("max_windows", None, "Windows at each length; default evaluation.max_windows.")
_SPLIT = flags.DEFINE_string("split", "test", "Documents to score: test, validation or train.")
_FSDP = flags.DEFINE_integer("fsdp", None, "Devices that the parameters are split over; default mesh.fsdp of the run.")
_DATA_PATH = flags.DEFINE_string("data_path", None, "Where the run's text lies now; default data.path of the run.")
_USAGE = "python -m experiments.evaluate --workdir=DIR [--lengths=128,512,2048] [--k=K] [--step=N] [--split=test]"


def main(_: list[str]) -> None:
    directory = command.workdir(_WORKDIR.value)
    config = load_config(directory)
    lengths = list(config.evaluation.lengths) if _LENGTHS.value is None else command.integers("lengths", _LENGTHS.value)
    lengths, k = extrapolation.check_lengths(lengths, config.evaluation.k if _K.value is None else _K.value)
    max_windows = config.evaluation.max_windows if _MAX_WINDOWS.value is None else _MAX_WINDOWS.value
    if max_windows < 1:
        raise UserError(f"--max_windows={max_windows}: 1 or more is needed")
    if _SPLIT.value not in SPLITS:
        raise UserError(f"--split={_SPLIT.value} is unknown{nearest(_SPLIT.value, SPLITS)}")
    checkpoints = Checkpoints(directory / "checkpoints")
    step = require_step(checkpoints, directory, _STEP.value)
    fsdp = config.mesh.fsdp if _FSDP.value is None else _FSDP.value
    if fsdp < 1 or jax.device_count() % fsdp:
        raise UserError(f"mesh.fsdp={fsdp} does not divide the {jax.device_count()} devices here; give --fsdp=1")
    config = dataclasses.replace(config, mesh=config_lib.MeshSection(data=-1, fsdp=fsdp))
    if _DATA_PATH.value is not None:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, path=_DATA_PATH.value))
    check_tokenizer(directory, config.data.tokenizer, load_tokenizer(config.data.tokenizer).describe())
    run = make_run(config)
    check_text(directory, run)
    plan = extrapolation.plan_windows(run.tokens, _SPLIT.value, lengths[-1], k, max_windows)
    shapes = jax.eval_shape(lambda: init_params(run.model, jax.random.key(0)))
    shardings = tree_sharding(run.mesh, shapes)
    abstract = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)
    params = checkpoints.restore_params(step, abstract)
    with deferred_signals() as stop:  # also while the report is written, which so is written whole
        scores = extrapolation.score(run, params, plan, lengths, k, jax.process_index() == 0, stop)
        train_dtype = read_record(directory)["dtype"]
        result = report.make_report(run, plan, scores, k, _SPLIT.value, step, train_dtype)
        if jax.process_index() == 0:
            report.print_table([result])
            try:
                path = report.write_report(result, directory / "evaluation")
            except OSError as e:
                command.stop(f"the report in {directory / 'evaluation'} cannot be written: {e.strerror or e}")
            print(f"{path}\n{path.with_suffix('.png')}")


if __name__ == "__main__":
    command.run(main, _USAGE)
