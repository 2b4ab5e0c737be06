"""The Chomsky Hierarchy Evaluation at the paper's size: 5 layers of 256, 8 heads, 200,000 steps at lengths 1 to 40.

configs/chomsky.py:POSITION --config.data.task=even_pairs. The paper does not print its learning rate. Sinusoidal,
learned and rotary positions go with randomised ones: randomised_sinusoidal, randomised_learned, randomised_rope.
"""

from ml_collections import ConfigDict

from configs import base


def get_config(position: str = "dape_kerple") -> ConfigDict:
    config = base.get_config(position)
    config.model.update(num_layers=5, num_heads=8, width=256)
    config.model.dape.width = 64
    config.model.learned.length = 2048
    config.data.update(source="chomsky", task="even_pairs", sequence_length=40)
    config.optimizer.update(learning_rate=3e-4, b2=0.999, weight_decay=0.0, clip_norm=1.0)
    config.training.update(steps=200_000, batch_size=128, log_every=100, checkpoint_every=5000)
    config.evaluation.update(lengths=(500,), max_windows=512)
    return config
