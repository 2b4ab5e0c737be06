"""Puts the latest evaluations of several runs into one table and one plot.

python -m experiments.compare DIR [DIR ...] [--protocol=last_k] [--output=DIR/comparison]
"""

from pathlib import Path

from absl import flags

from dape_jax import config as config_lib
from dape_jax.errors import UserError
from dape_jax.evaluation import plots, protocols, report, table
from dape_jax.training.workdir import CONFIG_FILE, load_config
from experiments import command

_OUTPUT = flags.DEFINE_string(
    "output", None, "Path without suffix of the JSON and PNG; default 'comparison' in the first run's parent folder."
)
_SPLIT = flags.DEFINE_enum("split", "test", ["test", "validation", "train"], "Evaluations of which documents.")
_PROTOCOL = flags.DEFINE_string("protocol", "last_k", "Evaluations by which: last_k, official or non_overlapping.")
_USAGE = (
    "python -m experiments.compare DIR [DIR ...] [--protocol=last_k|official|non_overlapping] [--split=test] "
    "[--output=PATH]"
)


def main(arguments: list[str]) -> None:
    if not arguments:
        raise UserError(f"no runs to compare; usage: {_USAGE}")
    directories = [Path(argument).expanduser() for argument in arguments]
    names = [str(directory) for directory in directories]
    if len(set(names)) < len(names):
        raise UserError(f"one run is named twice: {' '.join(names)}")
    protocol = protocols.check_protocol(_PROTOCOL.value)
    for directory in directories:
        if (directory / CONFIG_FILE).is_file() and load_config(directory).data.source == config_lib.CHOMSKY:
            raise UserError(f"{directory} is a run on a task; experiments.chomsky_table makes tables of those")
    reports = [report.latest_report(directory, _SPLIT.value, protocol) for directory in directories]
    report.check_comparable(reports, names)
    reports = report.with_labels(reports, names)
    output = Path(_OUTPUT.value).expanduser() if _OUTPUT.value else directories[0].absolute().parent / "comparison"
    table.print_table(reports)
    json_path, png_path = (output.with_name(output.name + suffix) for suffix in (".json", ".png"))
    try:
        report.write_json({"reports": reports}, json_path)
        plots.perplexity_by_length(reports, png_path)
    except OSError as e:
        raise UserError(f"--output={output}: cannot be written: {e.strerror or e}") from e
    print(f"{json_path}\n{png_path}")


if __name__ == "__main__":
    command.run(main, _USAGE, positional=True)
