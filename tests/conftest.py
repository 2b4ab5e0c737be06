"""Eight virtual CPU devices, strict promotion where numbers are made, and shared helpers."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _strict_promotion(request):
    """Implicit dtype and rank promotion raise in the tests of biases, rotary, absolute, DAPE network and attention."""
    if "/attention/" not in str(request.path) and request.path.stem not in (
        "test_biases",
        "test_rotary",
        "test_absolute",
        "test_adapt",
    ):
        yield
        return
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def text_folder(tmp_path):
    """A folder of 12 deterministic documents of 1,000 to 12,000 characters of pseudo-words."""
    folder = tmp_path / "text"
    folder.mkdir()
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefghij"), size=rng.integers(2, 8))) for _ in range(200)]
    for i in range(12):
        text = " ".join(rng.choice(words, size=200 * (i + 1)))
        (folder / f"document{i:02d}.txt").write_text(text[: 1000 * (i + 1)])
    return folder


def relative_error(actual, expected) -> float:
    """Norm of the difference over the norm of what was expected, in float64."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))
