"""Trains on a text or a task; started again with the same workdir, goes on from its latest checkpoint.

python -m experiments.train --config=configs/quickstart.py:dape_kerple --workdir=DIR [--config.field=value ...]
"""

from absl import flags

from dape_jax import config as config_lib
from dape_jax.training.checkpoint import SaveFailed
from dape_jax.training.loop import train
from dape_jax.training.recorder import NonFiniteUpdate
from dape_jax.training.run import make_run
from dape_jax.training.stop import deferred_signals
from dape_jax.training.workdir import refuse_foreign
from experiments import command

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run: configuration, metrics, checkpoints, reports.")
_USAGE = "python -m experiments.train --config=configs/X.py[:POSITION] --workdir=DIR [--config.field=value ...]"


def main(_: list[str]) -> None:
    directory = command.workdir(_WORKDIR.value)
    config = config_lib.from_mapping(command.config())
    refuse_foreign(directory)
    run = make_run(config)
    print("\n".join(run.problem.summary()))
    try:
        with deferred_signals() as stop:
            train(run, directory, stop=stop)
    except NonFiniteUpdate as e:
        command.stop(str(e))
    except SaveFailed as e:
        command.stop(f"{e}. Make room or mend the folder, and start the same command again to go on")
    print(f"trained to step {run.config.training.steps}; now: python -m experiments.evaluate --workdir={directory}")


if __name__ == "__main__":
    command.run(main, _USAGE, config=True)
