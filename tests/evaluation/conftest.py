import pytest

from configs import base
from dape_jax import config as config_lib
from dape_jax.training import run as run_lib


@pytest.fixture
def run(text_folder, tmp_path):
    """One layer of DAPE-Kerple over bytes of pseudo-words, half of whose documents are the test split."""
    mapping = base.get_config("dape_kerple")
    mapping.model.update(num_layers=1, num_heads=2, width=16)
    mapping.data.update(source="folder", path=str(text_folder), cache_dir=str(tmp_path / "cache"), test_fraction=0.5)
    return run_lib.make_run(config_lib.from_mapping(mapping), show_progress=False)
