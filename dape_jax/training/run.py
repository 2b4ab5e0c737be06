"""What belongs to one run: its configuration, and the model, data and mesh that it implies."""

import dataclasses
import os
from pathlib import Path

import jax
from jax.sharding import Mesh

from dape_jax import config as config_lib
from dape_jax import sharding
from dape_jax.config import Config
from dape_jax.data import cache, text, tokenizer
from dape_jax.nn.transformer import TransformerConfig


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

    @property
    def segment_end(self) -> int | None:
        """The id that ends documents if attention is to stay within them in training, else None."""
        end = self.tokens.manifest["tokenizer"]["end_of_document"]["id"]
        return end if self.config.data.packing == "segments" else None


def make_run(config: Config, show_progress: bool = True) -> Run:
    """Makes mesh and token cache; raises before anything is written if they cannot be."""
    mesh = sharding.make_mesh(config.mesh.data, config.mesh.fsdp)
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
    model = config_lib.transformer(config, coder.vocab_size, jax.default_backend(), sharding.BATCH_AXES)
    return Run(config, model, tokens, mesh)


def load_text(config: Config) -> text.Source:
    """The source of documents that a configuration names."""
    data = config.data
    return text.load_source(data.source, data.path, data.glob, data.text_field, data.skip_broken)


def cache_directory(config: Config) -> Path:
    """Where token caches lie: ``data.cache_dir``, else the user's cache folder."""
    if config.data.cache_dir is not None:
        return Path(config.data.cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dape_jax"
