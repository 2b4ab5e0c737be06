"""The folder of a run: whose it is, and what it says of the run."""

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dape_jax import config as config_lib
from dape_jax.config import Config
from dape_jax.errors import UserError
from dape_jax.training.identity import difference
from dape_jax.training.run import Run

_log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
_PARTIAL = "config.partial"
_LOCK = "lock"


def refuse_foreign(workdir: Path) -> None:
    """Raises for a ``workdir`` that cannot become or be a run's: a file, unwritable, or holding other things."""
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"workdir {workdir} is a file; give a folder")
    if not workdir.exists():
        return
    if not os.access(workdir, os.W_OK):
        raise UserError(f"workdir {workdir} cannot be written; give a folder of your own")
    found = {path.name for path in workdir.iterdir()} - {_PARTIAL, _LOCK}
    if found and CONFIG_FILE not in found:
        raise UserError(f"workdir {workdir} is not empty and holds no run of this program; use another workdir")
    for name in ("checkpoints", "evaluation"):
        if (workdir / name).exists() and not (workdir / name).is_dir():
            raise UserError(f"workdir {workdir} is damaged: {name} is a file")


@contextlib.contextmanager
def sole_training(workdir: Path) -> Iterator[None]:
    """Holds ``workdir`` for this process, which makes the folder. The lock ends with the process, however that ends.

    Raises:
      UserError: another process trains in it.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        file = (workdir / _LOCK).open("a")
    except OSError as e:
        raise UserError(f"workdir {workdir} cannot be made or written: {e.strerror or e}") from e
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"workdir {workdir}: another process is training in it; wait, or use another workdir"
            ) from None
        except OSError as e:  # a file system without locks
            _log.warning(
                "workdir %s cannot be locked (%s): see that nothing else trains in it", workdir, e.strerror or e
            )
        yield


def claim(workdir: Path, run: Run) -> None:
    """Makes ``workdir`` this run's, or checks that it already is: it holds config.json, with tokenizer and text's hash.

    Fields that may change between starts (``identity.FREE``) are brought up to date there.
    """
    refuse_foreign(workdir)
    path = workdir / CONFIG_FILE
    record = {
        "config": config_lib.to_dict(run.config),
        "dtype": run.model.dtype,
        "tokenizer": run.problem.tokenizer,
        "tokens_sha256": run.problem.fingerprint,
    }
    if path.exists():
        before = _read(path)
        check_same(workdir, before["config"], record["config"])  # first, since a task has its own vocabulary
        check_tokenizer(workdir, run.config.data.tokenizer, run.problem.tokenizer)
        check_same(workdir, before, record)
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        partial = workdir / _PARTIAL
        partial.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(partial, path)
    except OSError as e:
        raise UserError(f"workdir {workdir} cannot be made or written: {e.strerror or e}") from e


def check_same(workdir: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuses what differs, but for fields that may change, between two records or configurations."""
    found = difference(before, now)
    if found is not None:
        raise UserError(
            f"workdir {workdir} holds another run: {found.field} is {found.before!r} there and {found.now!r} here; "
            "use another workdir"
        )


def load_config(workdir: Path) -> Config:
    """The configuration of the run in ``workdir``."""
    return config_lib.from_mapping(read_record(workdir)["config"])


def read_record(workdir: Path) -> dict[str, Any]:
    """What the run in ``workdir`` was started with: config, dtype of activations, tokenizer, tokens_sha256."""
    path = workdir / CONFIG_FILE
    if not path.exists():
        raise UserError(f"workdir {workdir} holds no run: there is no {path.name} in it")
    return _read(path)


def check_tokenizer(workdir: Path, name: str, description: dict) -> None:
    """Refuses a tokenizer, ``data.tokenizer`` and what it says of itself, other than that of the run in ``workdir``."""
    before = read_record(workdir)["tokenizer"]
    if before != description:
        raise UserError(
            f"data.tokenizer={name!r} is {_tokenizer_line(description)}, and the model in {workdir} was trained with "
            f"{_tokenizer_line(before)}: a model takes the vocabulary it was trained with and no other"
        )


def check_text(workdir: Path, run: Run) -> None:
    """Refuses a text that is not the one that the run in ``workdir`` was started on."""
    if run.problem.fingerprint != read_record(workdir)["tokens_sha256"]:
        raise UserError(f"{run.problem.name} has changed since {workdir} was trained on it")


def _tokenizer_line(description: dict) -> str:
    end = description["end_of_document"]
    return f"{description['name']} with {description['vocab_size']} ids, {end['id']} ending documents"


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
        texts = {name: str(record[name]) for name in ("dtype", "tokens_sha256")}
        return {"config": dict(record["config"]), "tokenizer": dict(record["tokenizer"]), **texts}
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path} is damaged: {e!r}") from e
