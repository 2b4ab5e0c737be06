"""What the commands share: flags, overrides and errors, each answered in one line.

Exit status: 0 done; 2 the input is wrong (one line, nothing written); 1 training stopped for another reason; 143 and
130 stopped by SIGTERM and SIGINT.
"""

import inspect
import logging
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax
from absl import flags
from ml_collections import config_flags

from dape_jax.errors import UserError, nearest
from dape_jax.training.stop import Stopped

FLAGS = flags.FLAGS


_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Start jax.distributed first: for runs on several hosts, the same command on each of them."
)


class Terminated(KeyboardInterrupt):
    """SIGTERM, where there is nothing to save first."""


def define_config() -> None:
    """Defines --config=FILE.py[:ARGUMENT] and its overrides --config.a.b=value."""
    config_flags.DEFINE_config_file("config", None, "Configuration file, such as configs/quickstart.py:dape_kerple.")


def run(main: Callable[[list[str]], None], usage: str, positional: bool = False) -> None:
    """Parses the flags, calls ``main`` with the positional arguments, and turns errors into one line and a status.

    Args:
      main: the command.
      usage: how to call it, printed for a wrong flag.
      positional: whether it takes positional arguments.
    """
    logger = logging.getLogger("dape_jax")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler())
    logger.propagate = False
    try:
        arguments = _parse(positional)
    except (flags.Error, UserError) as e:
        sys.exit(_fail(f"{_one_line(e)}\nusage: {usage}", 2))
    _quieten_orbax()
    try:
        if _DISTRIBUTED.value:
            jax.distributed.initialize()
        # After the line above, which would put a handler of its own in the place of this one.
        signal.signal(signal.SIGTERM, _terminate)
        main(arguments)
    except UserError as e:
        sys.exit(_fail(_one_line(e), 2))
    except Stopped as e:
        sys.exit(_fail(_one_line(e), e.status))
    except KeyboardInterrupt as e:
        name, status = ("SIGTERM", 143) if isinstance(e, Terminated) else ("SIGINT", 130)
        sys.exit(_fail(f"stopped by {name}; start the same command again to go on from what is saved", status))


def stop(message: str) -> NoReturn:
    """Ends the command with status 1 and one line."""
    sys.exit(_fail(message, 1))


def integers(name: str, value: str) -> list[int]:
    """The integers of a comma-separated flag."""
    numbers = []
    for item in value.split(","):
        try:
            numbers.append(int(item))
        except ValueError:
            raise UserError(f"--{name}={value}: {item!r} is not an integer; write --{name}=128,256") from None
    return numbers


def workdir(value: str | None) -> Path:
    """The folder of a run, which is a required flag."""
    if not value:
        raise UserError("--workdir is missing; give the folder of the run")
    if "://" in value:
        raise UserError(f"--workdir={value}: a local or mounted folder is needed, not the address of a bucket")
    return Path(value).expanduser()


def _terminate(*_: object) -> None:
    raise Terminated


def _quieten_orbax() -> None:
    """Leaves out what Orbax prints besides about a save or a restore that failed, which is answered in one line.

    It logs the traceback that it raises as well, and abandons coroutines and tasks, which say so when collected.
    """

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        closed = isinstance(error, RuntimeError) and "Event loop is closed" in str(error)
        if not closed and not inspect.iscoroutine(unraisable.object):
            sys.__unraisablehook__(unraisable)

    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    sys.unraisablehook = hook


def _parse(positional: bool) -> list[str]:
    _check_config_path()
    try:
        arguments = FLAGS(sys.argv)[1:]
    except (AttributeError, KeyError) as e:  # an override of a field that is not there
        raise UserError(f"a --config override names no field of the configuration: {_unquoted(e)}") from e
    except (TypeError, ValueError) as e:
        raise UserError(f"a --config override has a value of the wrong type: {_unquoted(e)}") from e
    if arguments and not positional:
        raise UserError(f"{arguments[0]!r} is no flag; flags start with --")
    return arguments


def _check_config_path() -> None:
    """Answers a configuration file that is not there with the nearest that is, before it is executed."""
    for index, argument in enumerate(sys.argv[1:], start=1):
        name, equals, value = argument.lstrip("-").partition("=")
        if name == "config" and argument.startswith("-"):
            value = value if equals else "".join(sys.argv[index + 1 : index + 2])
            path = Path(value.partition(":")[0])
            if not path.is_file():
                known = [str(p) for p in sorted(path.parent.glob("*.py")) if p.stem != "__init__"]
                hint = nearest(str(path), known) if known else f"; there is no folder {path.parent} with configurations"
                raise UserError(f"--config={value} does not exist{hint}")


def _fail(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _unquoted(error: Exception) -> str:
    return str(error.args[0]) if error.args else str(error)
