"""Configurations: checked, frozen, and turned into models."""

from dape_jax.config.model import LABELS, Position, encoder, method_label, positions, split_position, transformer
from dape_jax.config.parse import from_mapping, to_dict
from dape_jax.config.sections import (
    CHOMSKY,
    Config,
    DataSection,
    EvaluationSection,
    MeshSection,
    ModelSection,
    OptimizerSection,
    TrainingSection,
)

__all__ = [
    "CHOMSKY", "LABELS", "Config", "DataSection", "EvaluationSection", "MeshSection", "ModelSection",
    "OptimizerSection", "Position", "TrainingSection", "encoder", "from_mapping", "method_label", "positions",
    "split_position", "to_dict", "transformer",
]  # fmt: skip
