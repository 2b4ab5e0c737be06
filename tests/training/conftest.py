"""A tiny run that a test can train in a second or two."""

import pytest

from configs import base
from dape_jax import config as config_lib
from dape_jax.training import metrics
from dape_jax.training import run as run_lib


@pytest.fixture
def make(text_folder, tmp_path):
    """A function from a position encoding and fields of the training section to a ``Run``."""

    def make(position="dape_kerple", optimizer=None, **training):
        mapping = base.get_config(position)
        mapping.model.update(num_layers=2, num_heads=2, width=16)
        mapping.data.update(source="folder", path=str(text_folder), cache_dir=str(tmp_path / "cache"))
        mapping.data.sequence_length = 32
        mapping.optimizer.update(optimizer or {})
        mapping.training.update(steps=12, batch_size=8, log_every=4, checkpoint_every=4)
        mapping.training.update(training)
        return run_lib.make_run(config_lib.from_mapping(mapping), show_progress=False)

    return make


def lines(workdir):
    """The metrics of a run."""
    return metrics.read_metrics(workdir / "metrics.jsonl")


def losses(workdir):
    """Loss and gradient norm by step."""
    return {line["step"]: (line["loss"], line["grad_norm"]) for line in lines(workdir) if "loss" in line}


def validations(workdir):
    """Validation loss by step."""
    return {line["step"]: line["validation_loss"] for line in lines(workdir) if "validation_loss" in line}
