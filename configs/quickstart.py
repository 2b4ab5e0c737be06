"""Minutes on two CPU cores: a byte model of Python's standard library, trained at 64 and scored up to 2,048.

configs/quickstart.py:POSITION, with rope, kerple, dape_kerple, or any other position encoding.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(position: str = "dape_kerple") -> ConfigDict:
    config = base.get_config(position)
    config.model.update(num_layers=2, num_heads=8, width=128)
    config.data.sequence_length = 64
    config.optimizer.update(learning_rate=2e-3, warmup_fraction=0.1)
    config.training.update(steps=500, batch_size=32, checkpoint_every=100)
    config.evaluation.update(lengths=(64, 128, 256, 512, 1024, 2048), max_windows=128)
    return config
