"""The Chomsky Hierarchy Evaluation in minutes on two CPU cores: 3 layers of 64, 8 heads, 1,500 steps of 64.

configs/chomsky_small.py:POSITION --config.data.task=even_pairs
"""

from ml_collections import ConfigDict

from configs import chomsky


def get_config(position: str = "dape_kerple") -> ConfigDict:
    config = chomsky.get_config(position)
    config.model.update(num_layers=3, width=64)
    config.model.dape.width = 32
    config.optimizer.update(learning_rate=1e-3, warmup_fraction=0.05)
    config.training.update(steps=1500, batch_size=64, log_every=50, checkpoint_every=500)
    config.evaluation.update(max_windows=32)
    return config
