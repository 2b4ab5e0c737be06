"""The search for block sizes: what a tile costs under a causal mask, what is kept of a table, and wrong flags."""

import json

import numpy as np
import pytest

from experiments import tune_blocks


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
    assert tune_blocks.causal_cycles(length, tile, cost) == total


@pytest.fixture
def tune(tmp_path, monkeypatch):
    """The command on made-up costs, which prefer narrow tiles; returns the table that it writes."""
    output = tmp_path / "table.json"

    def compiled(order):
        return order, dict.fromkeys(tune_blocks.NAMES.values())

    def described(order, made, name, schedule):
        k = order.get("backward_k") or order["block_k"]
        return {"interior": k / 1000, "diagonal": k / 1000}

    monkeypatch.setattr(tune_blocks, "compile_order", compiled)
    monkeypatch.setattr(tune_blocks, "describe", described)
    monkeypatch.setattr(tune_blocks, "_versions", lambda: "made up")
    monkeypatch.setattr(tune_blocks, "_device_kind", lambda target: f"TPU {target}")

    def run(*arguments):
        flags = tune_blocks.flags.FLAGS
        flags.unparse_flags()
        for name in ("targets", "models", "widths", "lengths", "forward", "backward", "output", "by"):
            flags[name].unparse()
        flags(["tune_blocks", f"--output={output}", *arguments])
        tune_blocks.main([])
        return json.loads(output.read_text())["tiles"]

    return run


def test_the_table(tune):
    entries = tune("--targets=v5e", "--lengths=1024")
    found = {(e["kernel"], e["length"]): (e["block_q"], e["block_k"]) for e in entries}
    assert found == {("forward", 1024): (128, 256), ("backward", 1024): (64, 256)}
    assert {e["device_kind"] for e in entries} == {"TPU v5e"}
    # What is tuned again is replaced, the rest stays.
    again = tune("--targets=v5e", "--lengths=1024,2048", "--forward=128x512")
    found = {(e["kernel"], e["length"]): (e["block_q"], e["block_k"]) for e in again}
    assert len(again) == 4
    assert found["forward", 1024] == found["forward", 2048] == (128, 512)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--targets=v5x"], "--targets=v5x: 'v5x' is unknown"),
        (["--forward=128"], "--forward=128: tiles such as 128x512"),
        (["--lengths=0"], "--lengths=0: 0 is too small"),
        (["--output=/nowhere/x.json"], "there is no folder /nowhere"),
        (["--by=time"], "--by=time needs a TPU"),
    ],
)
def test_wrong_flags(tune, arguments, message):
    with pytest.raises(tune_blocks.UserError, match=message):
        tune(*arguments)
