import json
import shutil

import jax
import numpy as np
import pytest

from configs import base
from dape_jax import config as config_lib
from dape_jax import sharding
from dape_jax.data import batches, vocabulary
from dape_jax.errors import UserError
from dape_jax.training import checkpoint, loop, step
from dape_jax.training import optimizer as optimizer_lib
from dape_jax.training import run as run_lib
from dape_jax.training import workdir as workdir_lib
from dape_jax.training.objective import NextToken
from tests.training.conftest import lines, losses


def test_a_run_learns_and_leaves_its_record(make, tmp_path):
    run = make(validate_every=6, validation_windows=9, steps=40)
    loop.train(run, tmp_path / "run", show_progress=False)
    found = losses(tmp_path / "run")
    assert sorted(found) == list(range(1, 41))
    assert found[40][0] < found[1][0] - 0.3
    record = [line for line in lines(tmp_path / "run") if "validation_loss" in line]
    validations = {line["step"]: line["validation_loss"] for line in record}
    assert sorted(validations) == [6, 12, 18, 24, 30, 36]
    assert abs(validations[36] - found[36][0]) < 0.5
    assert checkpoint.Checkpoints(tmp_path / "run" / "checkpoints").steps() == [36, 40]
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config_lib.from_mapping(record["config"]) == run.config
    assert workdir_lib.load_config(tmp_path / "run") == run.config


def test_resuming_anywhere_gives_the_unbroken_losses_bit_for_bit(make, tmp_path):
    straight = loop.train(make(), tmp_path / "straight", show_progress=False)
    loop.train(make(keep_checkpoints=9), tmp_path / "broken", show_progress=False)
    for step_dir in ("12", "8"):  # as if the run had been killed after step 4 with lines of later steps written
        shutil.rmtree(tmp_path / "broken" / "checkpoints" / step_dir)
    with (tmp_path / "broken" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')
    resumed = loop.train(make(), tmp_path / "broken", show_progress=False)
    assert losses(tmp_path / "broken") == losses(tmp_path / "straight")
    assert len(lines(tmp_path / "broken")) == 12
    for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(straight), strict=True):
        assert np.array_equal(a, b)
    again = loop.train(make(), tmp_path / "broken", show_progress=False)  # nothing left to do
    assert int(again.step) == 12


def test_a_checkpoint_restores_into_another_mesh(make, tmp_path):
    run = make()
    state = loop.train(run, tmp_path / "run", show_progress=False)
    optimizer = optimizer_lib.make_optimizer(run.config.optimizer, 12)
    for mesh in (sharding.make_mesh(1, 1, jax.devices()[:1]), sharding.make_mesh(2, 4)):
        with jax.set_mesh(mesh):
            _, abstract = step.init_state(run.model, optimizer, 0, mesh)
            restored = checkpoint.Checkpoints(tmp_path / "run" / "checkpoints").restore(12, abstract)
        assert restored.params["head"]["kernel"].sharding.mesh.shape == mesh.shape
        for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state), strict=True):
            assert np.array_equal(a, b)


def test_another_configuration_or_text_in_the_workdir_is_refused(make, tmp_path, text_folder):
    loop.train(make(), tmp_path / "run", show_progress=False)
    before = sorted(p.name for p in (tmp_path / "run").iterdir())
    with pytest.raises(UserError, match="training.seed is 0 there and 1 here; use another workdir"):
        loop.train(make(seed=1), tmp_path / "run", show_progress=False)
    with pytest.raises(UserError, match=r"model.position is 'dape_kerple' there and 'kerple' here"):
        loop.train(make("kerple"), tmp_path / "run", show_progress=False)
    loop.train(make(log_every=1), tmp_path / "run", show_progress=False)  # changes nothing that is computed
    assert workdir_lib.load_config(tmp_path / "run").training.log_every == 1
    (text_folder / "document00.txt").write_text("another text")
    with pytest.raises(UserError, match="tokens_sha256"):
        loop.train(make(), tmp_path / "run", show_progress=False)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="is not empty and holds no run"):
        loop.train(make(), tmp_path / "other", show_progress=False)
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config.json is damaged"):
        loop.train(make(), tmp_path / "run", show_progress=False)


def test_a_damaged_workdir_is_named(make, tmp_path):
    workdir = tmp_path / "run"
    workdir.mkdir()
    (workdir / "config.partial").write_text("of a killed start")
    loop.train(make(steps=1), workdir, show_progress=False)
    text = (workdir / "metrics.jsonl").read_text()
    (workdir / "metrics.jsonl").write_text("garbage\n" + text)
    with pytest.raises(UserError, match="metrics.jsonl is damaged in line 1"):
        loop.train(make(steps=1), workdir, show_progress=False)
    shutil.rmtree(workdir / "checkpoints")
    (workdir / "checkpoints").write_text("")
    with pytest.raises(UserError, match="checkpoints is a file"):
        loop.train(make(steps=1), workdir, show_progress=False)
    with pytest.raises(UserError, match="is a file; give a folder"):
        workdir_lib.refuse_foreign(workdir / "config.json")


def test_another_tokenizer_is_refused_and_a_moved_one_is_not(text_folder, tmp_path):
    def run(tokenizer, **data):
        mapping = base.get_config()
        mapping.data.update(source="folder", path=str(text_folder), cache_dir=str(tmp_path / "cache"), **data)
        mapping.data.tokenizer = str(tokenizer)
        return run_lib.make_run(config_lib.from_mapping(mapping), show_progress=False)

    for name, size in (("a.json", 280), ("other.json", 281)):
        texts = (path.read_text() for path in sorted(text_folder.glob("*")))
        (tmp_path / name).write_text(vocabulary.train_bpe(texts, size, show_progress=False))
    shutil.copy(tmp_path / "a.json", tmp_path / "moved.json")
    first = run(tmp_path / "a.json", packing="segments")
    assert (first.model.vocab_size, first.problem.objective) == (280, NextToken(0))
    workdir_lib.claim(tmp_path / "run", first)
    workdir_lib.claim(tmp_path / "run", run(tmp_path / "moved.json", packing="segments"))
    for other, ids in ((tmp_path / "other.json", 281), ("bytes", 257)):
        with pytest.raises(UserError, match=rf"with {ids} ids.* was trained with BPE 280 .* with 280 ids") as error:
            workdir_lib.claim(tmp_path / "run", run(other, packing="segments"))
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="data.packing is 'segments' there and 'stream' here"):
        workdir_lib.claim(tmp_path / "run", run(tmp_path / "a.json"))
    assert run(tmp_path / "a.json").problem.objective == NextToken()


def test_a_batch_that_does_not_fit_the_devices_is_named_before_anything_is_written(make, tmp_path):
    with pytest.raises(UserError, match="training.batch_size=12 cannot be split over 8 devices"):
        loop.train(make(batch_size=12), tmp_path / "run", show_progress=False)
    assert not (tmp_path / "run").exists()


def test_checkpoints_that_are_not_there_are_named(tmp_path):
    with pytest.raises(UserError, match="holds no whole checkpoint yet"):
        checkpoint.require_step(checkpoint.Checkpoints(tmp_path / "none"), tmp_path, None)


def test_the_loop_uses_the_seed_and_the_schedule(make, tmp_path, monkeypatch):
    seen, original = [], batches.training_batches
    monkeypatch.setattr(batches, "training_batches", lambda *a: (seen.append(a[3]), original(*a))[1])
    run = make(seed=7, steps=3)
    loop.train(run, tmp_path / "run", show_progress=False)
    assert seen == [7]
    rate = optimizer_lib.schedule(run.config.optimizer, 3)
    for line in lines(tmp_path / "run"):
        assert np.isclose(line["learning_rate"], float(rate(line["step"] - 1)))
