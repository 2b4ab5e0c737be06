"""The paper's 350M model: 24 layers of 1,024, 16 heads; trained as the 125M one, at half its learning rate.

configs/lm_350m.py:POSITION
"""

from ml_collections import ConfigDict

from configs import lm_125m


def get_config(position: str = "dape_kerple") -> ConfigDict:
    config = lm_125m.get_config(position)
    config.model.update(num_layers=24, num_heads=16, width=1024)
    config.optimizer.update(learning_rate=3e-4)
    return config
