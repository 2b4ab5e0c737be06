"""The search for block sizes: what a tile costs under a causal mask, what is kept of a table, and wrong flags."""

import numpy as np
import pytest

from experiments import tuned_table
from tests.experiments.test_commands import check_refusal, command  # noqa: F401


@pytest.mark.parametrize(("length", "tile"), [(512, (128, 256)), (300, (64, 128)), (100, (16, 128)), (256, (128, 64))])
def test_cycles_of_a_causal_call(length, tile):
    """Against the mask itself."""
    q, k = tile
    cost = {"interior": 2.0, "diagonal": 3.0}
    total = 0.0
    mask = np.arange(length)[:, None] >= np.arange(length)[None]
    for i in range(0, length, q):
        for j in range(0, length, k):
            inside = mask[i : i + q, j : j + k]
            whole = inside.all() and j + k <= length
            total += q * k * (cost["interior"] if whole else cost["diagonal"]) if inside.any() else 0.0
    assert tuned_table.causal_cycles(length, tile, cost) == total


def test_the_table():
    figures = {("forward", 1024): {(128, 512): 2.0, (128, 256): 1.0}, ("backward", 1024): {(64, 256): 3.0}}
    entries = tuned_table.best_entries("TPU v5 lite", ("350M", 32), "made up", figures)
    assert [(e["kernel"], e["block_q"], e["block_k"], e["figure"]) for e in entries] == [
        ("forward", 128, 256, 1.0), ("backward", 64, 256, 3.0)]  # fmt: skip
    assert {(e["heads"], e["head_dim"], e["width"], e["length"]) for e in entries} == {(16, 64, 32, 1024)}
    # What is tuned again is replaced, the rest stays.
    again = {("forward", length): {(16, 128): 1.0} for length in (1024, 2048)}
    merged = tuned_table.merged(entries, tuned_table.best_entries("TPU v5 lite", ("350M", 32), "again", again))
    assert sorted((e["kernel"], e["length"], e["by"]) for e in merged) == [
        ("backward", 1024, "made up"), ("forward", 1024, "again"), ("forward", 2048, "again")]  # fmt: skip


def test_the_best_of_what_was_timed():
    def timed(kernel, warps, **found):
        tile = {"block_q": 16, "block_k": 16, "warps": warps, "stages": 1}
        return {"entry": tuned_table.entry("NVIDIA H100", kernel, (12, 64), 32, 2048, tile), **found}

    found = [timed("forward", 4, seconds=3.0), timed("forward", 8, seconds=2.0), timed("forward", 2, failed="why"),
             timed("keys", 4, failed="why")]  # fmt: skip
    (best,) = tuned_table.best_of_each_kernel(found, "made up")
    assert best == timed("forward", 8)["entry"] | {"figure": 2.0, "by": "made up"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--targets=v5x"], "--targets=v5x: 'v5x' is unknown"),
        (["--forward=128"], "--forward=128: tiles such as 128x512"),
        (["--lengths=0"], "--lengths=0: 0 is too small"),
        (["--output=/proc/none/x.json"], "--output=/proc/none/x.json: cannot be written"),
        (["--by=time"], "--by=time needs a TPU"),
    ],
)
def test_wrong_flags(command, arguments, message):  # noqa: F811
    check_refusal(command("tune_blocks", *arguments), message)
