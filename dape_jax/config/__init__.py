"""Configurations: checked, frozen, and turned into models."""

from dape_jax.config.model import LABELS, Position, method_label, split_position, transformer
from dape_jax.config.parse import from_mapping, to_dict
from dape_jax.config.sections import (
    Config,
    DataSection,
    EvaluationSection,
    MeshSection,
    ModelSection,
    OptimizerSection,
    TrainingSection,
)

__all__ = [
    "LABELS", "Config", "DataSection", "EvaluationSection", "MeshSection", "ModelSection", "OptimizerSection",
    "Position", "TrainingSection", "from_mapping", "method_label", "split_position", "to_dict", "transformer",
]  # fmt: skip
