"""What the commands share: flags, overrides and errors, each answered in one line.

Exit status: 0 done; 2 the input is wrong (one line, nothing written); 1 training stopped for another reason; 143 and
130 stopped by SIGTERM and SIGINT.
"""

import errno
import inspect
import logging
import os
import re
import runpy
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
from absl import flags
from ml_collections import ConfigDict, config_flags

from dape_jax.errors import UserError, nearest
from dape_jax.training.stop import Stopped

FLAGS = flags.FLAGS


_DISTRIBUTED = flags.DEFINE_bool(
    "distributed", False, "Start jax.distributed first: for runs on several hosts, the same command on each of them."
)


class Terminated(KeyboardInterrupt):
    """SIGTERM, where there is nothing to save first."""


def run(main: Callable[[list[str]], None], usage: str, positional: bool = False, config: bool = False) -> None:
    """Parses the flags, calls ``main`` with the positional arguments, and turns errors into one line and a status.

    Args:
      main: the command.
      usage: how to call it, printed for a wrong flag.
      positional: whether it takes positional arguments.
      config: whether it takes --config=FILE.py[:ARGUMENT] and overrides --config.field=value.
    """
    logger = logging.getLogger("dape_jax")
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler())
    logger.propagate = False
    if "--help" in sys.argv or "-h" in sys.argv:
        print(f"usage: {usage}\n{sys.modules['__main__'].__doc__}\n{FLAGS.main_module_help()}")
        return
    try:
        arguments = _parse(positional, config)
    except (flags.Error, UserError) as e:
        sys.exit(_fail(f"{_one_line(e)}\nusage: {usage}", 2))
    _quieten_orbax()
    try:
        if _DISTRIBUTED.value:
            _start_distributed()
        # After the line above, which would put a handler of its own in the place of this one.
        signal.signal(signal.SIGTERM, _terminate)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        main(arguments)
    except UserError as e:
        sys.exit(_fail(_one_line(e), 2))
    except Stopped as e:
        sys.exit(_fail(_one_line(e), e.status))
    except BrokenPipeError:
        # The reader of what is printed has gone, as with `| head`: nothing more can be said to it, at the exit neither.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt as e:
        name, status = ("SIGTERM", 143) if isinstance(e, Terminated) else ("SIGINT", 130)
        sys.exit(_fail(f"stopped by {name}; start the same command again to go on from what is saved", status))


def config() -> ConfigDict:
    """The configuration of --config with its overrides, which is required."""
    if "config" not in FLAGS:
        raise UserError("--config is missing; configs/quickstart.py:dape_kerple is one")
    return FLAGS.config


def stop(message: str) -> NoReturn:
    """Ends the command with status 1 and one line."""
    sys.exit(_fail(message, 1))


def names(flag: str, value: str, known: Collection[str]) -> list[str]:
    """The names of a comma-separated flag, each of them known and given once."""
    given = value.split(",")
    for name in given:
        if name not in known:
            raise UserError(f"--{flag}={value}: {name!r} is unknown{nearest(name, known)}")
    return _once(flag, value, given)


def integers(name: str, value: str) -> list[int]:
    """The integers of a comma-separated flag, each given once."""
    numbers = []
    for item in value.split(","):
        try:
            numbers.append(int(item))
        except ValueError:
            raise UserError(f"--{name}={value}: {item!r} is not an integer; write --{name}=128,256") from None
    return _once(name, value, numbers)


def _once(flag: str, value: str, given: list) -> list:
    for item in given:
        if given.count(item) > 1:
            raise UserError(f"--{flag}={value} names {item} twice")
    return given


def writable(flag: str, value: str) -> Path:
    """The path of a file that is to be written at the end, made sure of at the beginning: its folder is made."""
    path = Path(value).expanduser()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as e:
        raise UserError(f"--{flag}={path}: cannot be written: {e.strerror or e}") from e
    return path


def visible_devices(variable: str, count: int) -> list[str]:
    """What each of ``count`` processes is to see: a device of those that ``variable`` lets this one see, else any."""
    given = os.environ.get(variable)
    if given is None:
        return [str(i) for i in range(count)]
    if given.strip() in ("", "-1"):  # none at all, so that all run on the CPU
        return [given] * count
    return [device for device in given.split(",") if device]


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


def _parse(positional: bool, config: bool) -> list[str]:
    argv = FLAGS.read_flags_from_files(sys.argv, force_gnu=False)  # --flagfile
    argv = _take_config(argv) if config else argv
    try:
        arguments = FLAGS(argv)[1:]
    except flags.IllegalFlagValueError as e:
        found = re.match(r"flag --(\S+?)=(.*?): ", str(e))
        if found and found[1].startswith("config."):
            config_dict: Any = FLAGS["config"].value
            kind = _field_type(config_dict, found[1]).__name__
            raise UserError(f"{found[1].removeprefix('config.')}={found[2]}: {kind} is needed") from e
        raise
    except (TypeError, ValueError) as e:
        raise UserError(f"a --config override has a value of the wrong type: {e}") from e
    if arguments and not positional:
        raise UserError(f"{arguments[0]!r} is no flag; flags start with --")
    return arguments


def _take_config(argv: Sequence[str]) -> list[str]:
    """Loads the file of --config, defines its fields as flags, and returns the other arguments."""
    rest, file = [], None
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if name in ("--config", "-config"):
            file = value if equals else next(arguments, "")
        else:
            rest.append(argument)
    if file is None:
        return rest
    loaded = load_config(file)
    for argument in rest:
        name = argument.lstrip("-").partition("=")[0]
        if name.startswith("config."):
            _field_type(loaded, name)
    config_flags.DEFINE_config_dict("config", loaded, sys_argv=rest)
    return rest


def load_config(value: str) -> ConfigDict:
    """The configuration of FILE.py[:ARGUMENT]."""
    name, colon, argument = value.partition(":")
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        folder = path.parent if any(path.parent.glob("*.py")) and path.parent != Path() else Path("configs")
        known = [str(p) for p in sorted(folder.glob("*.py")) if p.stem != "__init__"]
        raise UserError(f"--config={value} is no configuration file{nearest(name, known) if known else ''}")
    try:
        get_config = runpy.run_path(name).get("get_config")
        if get_config is None:
            raise UserError("there is no get_config in it")
        made = get_config(argument) if colon else get_config()
        if not isinstance(made, ConfigDict):
            raise UserError(f"its get_config gives a {type(made).__name__}, not a ConfigDict")
        return made
    except UserError as e:
        raise UserError(f"--config={value} is no configuration file: {e}") from e
    except Exception as e:  # whatever the user's file raises
        raise UserError(f"--config={value} cannot be loaded: {type(e).__name__}: {e}") from e


def _field_type(config: ConfigDict, name: str) -> type:
    """The type of the field ``config.a.b``; refuses a name that is not there."""
    node: Any = config
    parent, parts = config, name.split(".")[1:]
    for part in parts:
        if not isinstance(node, ConfigDict) or part not in node:
            known = list(node.keys()) if isinstance(node, ConfigDict) else []
            hint = nearest(part, known) if known else ""
            raise UserError(f"{name.removeprefix('config.')} is no field of the configuration{hint}")
        parent, node = node, node[part]
    return parent.get_type(parts[-1])


def _start_distributed() -> None:
    try:
        jax.distributed.initialize()
    except (RuntimeError, ValueError) as e:
        raise UserError(f"--distributed: {e}; leave it out on a single host") from e


def _fail(message: str, status: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return status


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
