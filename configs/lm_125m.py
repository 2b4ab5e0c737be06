"""The paper's 125M model and training: 12 layers of 768, 12 heads, 50,000 steps of 256 sequences of 512 tokens.

configs/lm_125m.py:POSITION. Training lengths in the paper are 128, 512 and 1,024 (--config.data.sequence_length).
"""

from ml_collections import ConfigDict

from configs import base


def get_config(position: str = "dape_kerple") -> ConfigDict:
    config = base.get_config(position)
    config.model.update(num_layers=12, num_heads=12, width=768)
    config.model.randomised.range = 8192
    config.data.sequence_length = 512
    config.optimizer.update(learning_rate=6e-4)
    config.training.update(steps=50_000, batch_size=256, validate_every=5000, checkpoint_every=1000)
    config.evaluation.update(lengths=(512, 1024, 2048, 4096, 8192), k=256, max_windows=256)
    return config
