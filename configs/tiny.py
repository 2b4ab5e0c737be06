"""A tiny language model for trying things out: 4 layers of 256, 8 heads, trained at 128.

configs/tiny.py:POSITION
"""

from ml_collections import ConfigDict

from configs import base


def get_config(position: str = "dape_kerple") -> ConfigDict:
    config = base.get_config(position)
    config.model.update(num_layers=4, num_heads=8, width=256)
    config.model.randomised.range = 4096
    config.data.sequence_length = 128
    config.optimizer.update(learning_rate=1e-3)
    config.training.update(steps=5000, batch_size=64, validate_every=500, checkpoint_every=500)
    config.evaluation.update(lengths=(128, 256, 512, 1024, 2048, 4096))
    return config
