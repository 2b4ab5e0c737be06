"""Every field of a configuration with its default: what the other files start from.

``dape_jax/config/sections.py`` says what each field means and what it may hold.
"""

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder


def get_config(position: str = "dape_kerple") -> ConfigDict:
    return ConfigDict(
        {
            "model": {
                "position": position,
                "num_layers": 2,
                "num_heads": 8,
                "num_kv_heads": placeholder(int),
                "width": 128,
                "mlp_ratio": 4,
                "rope_base": 10000.0,
                "dape": {"variant": "concat_residual", "width": 32, "per_head": False, "kernel_width": 1},
                "fire": {"width": 32, "init_length": placeholder(float)},
                "t5": {"num_buckets": 32, "max_distance": 128},
                "yarn": {"beta_fast": 32.0, "beta_slow": 1.0},
                "learned": {"length": placeholder(int)},
                "randomised": {"range": 2048},
                "dtype": "auto",
                "attention_backend": "auto",
                "remat": "none",
            },
            "data": {
                "source": "stdlib",
                "task": placeholder(str),
                "path": "",
                "glob": "**/*",
                "text_field": "text",
                "skip_broken": False,
                "tokenizer": "bytes",
                "packing": "stream",
                "cache_dir": placeholder(str),
                "validation_fraction": 0.05,
                "test_fraction": 0.1,
                "sequence_length": 128,
            },
            "optimizer": {
                "learning_rate": 6e-4,
                "final_fraction": 0.1,
                "warmup_fraction": 0.01,
                "b1": 0.9,
                "b2": 0.95,
                "eps": 1e-8,
                "weight_decay": 0.1,
                "clip_norm": 1.0,
            },
            "training": {
                "steps": 1000,
                "batch_size": 32,
                "accumulate": 1,
                "seed": 0,
                "log_every": 10,
                "validate_every": 0,
                "validation_windows": 64,
                "checkpoint_every": 1000,
                "keep_checkpoints": 2,
                "tensorboard": False,
            },
            "evaluation": {"lengths": (128, 256, 512, 1024, 2048), "k": placeholder(int), "max_windows": 64},
            "mesh": {"data": -1, "fsdp": 1},
        }
    )
