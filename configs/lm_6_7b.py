"""The paper's 6.7B model: 32 layers of 4,096, 32 heads. Learning rate of GPT-3 at this size (arXiv 2005.14165).

configs/lm_6_7b.py:POSITION. Parameters and optimiser are split over 16 devices (--config.mesh.fsdp).
"""

from ml_collections import ConfigDict

from configs import lm_125m


def get_config(position: str = "dape_kerple") -> ConfigDict:
    config = lm_125m.get_config(position)
    config.model.update(num_layers=32, num_heads=32, width=4096, remat="attention_saved")
    config.optimizer.update(learning_rate=1.2e-4)
    config.mesh.update(fsdp=16)
    return config
