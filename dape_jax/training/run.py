"""What belongs to one run: its folder, its configuration, and the model, data and mesh that the two imply."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from dape_jax import config as config_lib
from dape_jax import sharding
from dape_jax.config import Config
from dape_jax.data import cache, text, tokenizer
from dape_jax.errors import UserError
from dape_jax.nn.transformer import TransformerConfig

FREE = ("training.log_every", "training.checkpoint_every", "training.keep_checkpoints", "training.validate_every",
        "training.validation_windows", "training.accumulate", "training.tensorboard", "evaluation", "mesh",
        "data.cache_dir", "data.path", "model.attention_backend", "model.remat")  # fmt: skip
"""Fields that a resumed run may change: they do not change what is computed, only where, how often and how fast.
``data.path`` may move because the text itself is compared, by the hash of its tokens. ``training.accumulate`` goes
with the number of devices."""


@dataclasses.dataclass(frozen=True)
class Run:
    """A configuration made concrete.

    Fields:
      config: as checked.
      model: the model's configuration.
      tokens: the open token cache.
      mesh: devices.
    """

    config: Config
    model: TransformerConfig
    tokens: cache.TokenCache
    mesh: Mesh


def make_run(config: Config, show_progress: bool = True) -> Run:
    """Makes mesh and token cache; raises before anything is written if they cannot be."""
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp)
    coder = tokenizer.load_tokenizer(config.data.tokenizer)
    source = text.load_source(config.data.source, config.data.path, config.data.glob)
    tokens = cache.open_or_build(
        source,
        coder,
        cache_directory(config),
        config.data.validation_fraction,
        config.data.test_fraction,
        show_progress,
    )
    model = config_lib.transformer(config, coder.vocab_size, jax.default_backend(), sharding.BATCH_AXES)
    return Run(config, model, tokens, mesh)


def cache_directory(config: Config) -> Path:
    """Where token caches lie: ``data.cache_dir``, else the user's cache folder."""
    if config.data.cache_dir is not None:
        return Path(config.data.cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dape_jax"


def claim(workdir: Path, run: Run) -> None:
    """Makes ``workdir`` this run's, or checks that it already is: it holds config.json and the text's hash."""
    path = workdir / "config.json"
    record = {"config": config_lib.to_dict(run.config), "tokens_sha256": run.tokens.manifest["tokens_sha256"]}
    if path.exists():
        other = _read(path)
        before, now = (_flat({k: r[k] for k in ("config", "tokens_sha256")}) for r in (other, record))
        for name in sorted({*before, *now}):
            field = name.removeprefix("config.")
            if before.get(name) != now.get(name) and not any(field == f or field.startswith(f"{f}.") for f in FREE):
                raise UserError(
                    f"workdir {workdir} holds another run: {field} is {before.get(name)!r} there and "
                    f"{now.get(name)!r} here; use another workdir"
                )
        return
    try:
        partial = path.with_suffix(".partial")  # which a run that was killed right here has left
        if workdir.is_dir() and any(other != partial for other in workdir.iterdir()):
            raise UserError(f"workdir {workdir} is not empty and holds no run of this program; use another workdir")
        workdir.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(partial, path)
    except OSError as e:
        raise UserError(f"workdir {workdir} cannot be made or written: {e.strerror or e}") from e


def load_config(workdir: Path) -> Config:
    """The configuration of the run in ``workdir``."""
    path = workdir / "config.json"
    if not path.exists():
        raise UserError(f"workdir {workdir} holds no run: there is no {path.name} in it")
    return config_lib.from_mapping(_read(path)["config"])


def recorded_text_hash(workdir: Path) -> str:
    """The hash of the tokens that the run in ``workdir`` was started on."""
    return _read(workdir / "config.json")["tokens_sha256"]


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
        return {"config": dict(record["config"]), "tokens_sha256": str(record["tokens_sha256"])}
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise UserError(f"{path} is damaged: {e!r}") from e


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {prefix: tree}
    flat = {}
    for name, value in tree.items():
        flat |= _flat(value, f"{prefix}.{name}" if prefix else name)
    return flat
