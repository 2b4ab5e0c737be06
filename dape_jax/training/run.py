"""What belongs to one run: its configuration, and the model, data and mesh that it implies."""

import dataclasses
import os
from pathlib import Path

import jax
from jax.sharding import Mesh

from dape_jax import config as config_lib
from dape_jax import sharding
from dape_jax.config import CHOMSKY, Config
from dape_jax.data import cache, text, tokenizer
from dape_jax.data.chomsky import get_task
from dape_jax.errors import UserError
from dape_jax.nn.transformer import TransformerConfig
from dape_jax.sharding import BATCH_AXES
from dape_jax.training.problem import Chomsky, LanguageModelling, Problem


@dataclasses.dataclass(frozen=True)
class Run:
    """A configuration made concrete.

    Fields:
      config: as checked.
      model: the model's configuration.
      problem: what it is trained on.
      mesh: devices.
    """

    config: Config
    model: TransformerConfig
    problem: Problem
    mesh: Mesh

    @property
    def tokens(self) -> cache.TokenCache:
        """The open token cache of a run on text."""
        if not isinstance(self.problem, LanguageModelling):
            raise UserError(f"{self.problem.name} is no text")
        return self.problem.tokens


def make_run(config: Config, show_progress: bool = True) -> Run:
    """Makes mesh, batches and, for text, the token cache; raises before anything is written if they cannot be."""
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp)
    if config.data.source == CHOMSKY:
        task = get_task(str(config.data.task))
        problem = Chomsky(config, task)
        model = config_lib.encoder(
            config, task.input_vocab + 1, task.output_vocab, problem.row_length, jax.default_backend(), BATCH_AXES
        )
        return Run(config, model, problem, mesh)
    coder = tokenizer.load_tokenizer(config.data.tokenizer)
    source = load_text(config)
    tokens = cache.open_or_build(
        source,
        coder,
        cache_directory(config),
        config.data.validation_fraction,
        config.data.test_fraction,
        show_progress,
    )
    model = config_lib.transformer(config, coder.vocab_size, jax.default_backend(), BATCH_AXES)
    return Run(config, model, LanguageModelling(config, tokens), mesh)


def load_text(config: Config) -> text.Source:
    """The source of documents that a configuration names."""
    data = config.data
    return text.load_source(data.source, data.path, data.glob, data.text_field, data.skip_broken)


def cache_directory(config: Config) -> Path:
    """Where token caches lie: ``data.cache_dir``, else the user's cache folder."""
    if config.data.cache_dir is not None:
        return Path(config.data.cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dape_jax"
