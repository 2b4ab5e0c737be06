"""Datasets of TFDS, prepared and read without TensorFlow."""

import shutil
import sys

import pytest
import tensorflow_datasets as tfds
from tensorflow_datasets.core import constants

from dape_jax.data import cache, text
from dape_jax.data.tokenizer import ByteTokenizer
from dape_jax.errors import UserError

COUNTS = {"train": 300, "unsupervised": 20, "test": 15}


class TinyCorpus(tfds.core.GeneratorBasedBuilder):
    """Texts with numbers."""

    VERSION = tfds.core.Version("1.0.0")
    splits = COUNTS

    def _info(self):
        features = {"content": tfds.features.Text(), "label": tfds.features.ClassLabel(num_classes=3)}
        return tfds.core.DatasetInfo(builder=self, features=tfds.features.FeaturesDict(features))

    def _split_generators(self, dl_manager):
        return {name: self._generate_examples(name) for name in self.splits}

    def _generate_examples(self, split):
        for i in range(self.splits[split]):
            yield i, {"content": f"{split} document {i} caf\u00e9", "label": i % 3}


class WholeCorpus(TinyCorpus):
    """The same with nothing held out."""

    splits = {"train": 200}  # noqa: RUF012


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tensorflow_datasets")
    for builder in (TinyCorpus, WholeCorpus):
        builder(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


@pytest.fixture
def data_dir(prepared, monkeypatch):
    monkeypatch.setattr(constants, "DATA_DIR", str(prepared))
    return prepared


def load(path, field="content", skip=False):
    return text.load_source("tfds", str(path), "**/*", field, skip)


def test_every_record_is_a_document_by_name_or_folder_without_tensorflow(data_dir):
    everything = {f"{split} document {i} caf\u00e9" for split, n in COUNTS.items() for i in range(n)}
    for path in ("tiny_corpus", "tiny_corpus:1.0.0", data_dir / "tiny_corpus" / "1.0.0"):
        source = load(path)
        documents = list(source.documents())
        assert source.name == "TFDS tiny_corpus/1.0.0"
        assert source.size == len(documents) == len({d.name for d in documents}) == 335
        assert {d.text for d in documents} == everything
        assert all(d.text.startswith(d.name.partition(":")[0]) for d in documents)
        assert all((d.split == "test") == d.name.startswith("test:") for d in documents)
        assert source.describe() == load(path).describe()
    assert "tensorflow" not in sys.modules


def test_its_own_test_split_stays_and_the_rest_is_held_out_by_hash(data_dir, tmp_path):
    def build(path, test):
        return cache.open_or_build(load(path), ByteTokenizer(), tmp_path / "cache", 0.1, test, False)

    made = build("tiny_corpus", 0.5)
    assert made.manifest["source"]["splits"] == {"train": "train", "unsupervised": "train", "test": "test"}
    names, bounds = made.split_documents("test")
    assert sorted(names) == sorted(f"test:{i}" for i in range(15))
    assert bytes(made.tokens[bounds[0, 0] : bounds[0, 1] - 1].astype("u1")).decode().startswith("test document")
    validation, _ = made.split_documents("validation")
    assert 15 < len(validation) < 50
    assert not any(name.startswith("test:") for name in validation)
    made = build("whole_corpus", 0.5)
    assert 75 < len(made.split_documents("test")[0]) < 125


def test_bad_names_and_features_get_one_line(data_dir, tmp_path):
    def refused(path, message, **kwargs):
        with pytest.raises(UserError, match=message) as error:
            list(load(path, **kwargs).documents())
        assert "\n" not in str(error.value)
        assert len(str(error.value)) < 600

    refused("", "data.path is empty")
    refused("tiny_corpos", r"no dataset that TFDS knows.*did you mean 'tiny_corpus'.*file_format='array_record'")
    refused("zzz", r"data.path='zzz' is no dataset that TFDS knows without TensorFlow, nor prepared in ")
    refused("tiny_corpus:2.0.0", "data.path='tiny_corpus:2.0.0' cannot be opened by TFDS: .*only: 1.0.0")
    refused("imdb_reviews", "data.path='imdb_reviews' is not prepared in .*; prepare it with file_format=")
    refused("/no/where", "data.path='/no/where' does not exist")
    refused(tmp_path, "no folder of a prepared TFDS dataset")
    refused(data_dir / "tiny_corpus", "no dataset_info.json.*; .*1.0.0 is one")
    refused("tiny_corpus", "data.text_field='text' is no text feature of 'tiny_corpus'; its text features: content",
            field="text")  # fmt: skip
    refused("tiny_corpus", "its text features: content", field="label")
    assert not (data_dir / "imdb_reviews").exists()


def test_a_version_that_is_only_on_disk(data_dir, tmp_path, monkeypatch):
    """A dataset whose builder is not in any imported module is found by its folder; another version is named."""
    shutil.copytree(data_dir / "tiny_corpus", tmp_path / "copy" / "unknown_corpus")
    monkeypatch.setattr(constants, "DATA_DIR", str(tmp_path / "copy"))
    with pytest.raises(UserError, match=r"unknown_corpus:3.0.0.*prepared there: 1.0.0"):
        load("unknown_corpus:3.0.0")


def test_tfrecord_is_named(data_dir, tmp_path):
    folder = tmp_path / "1.0.0"
    shutil.copytree(data_dir / "tiny_corpus" / "1.0.0", folder)
    info = folder / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))
    with pytest.raises(UserError, match="is prepared as tfrecord, which cannot be read without TensorFlow"):
        load(folder)


def test_damaged_records_are_refused_or_left_out_and_counted(data_dir, tmp_path):
    folder = tmp_path / "1.0.0"
    shutil.copytree(data_dir / "tiny_corpus" / "1.0.0", folder)
    (file,) = folder.glob("*-train.array_record*")
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match=r"record \d+ of split train: its feature 'content' holds nothing.*skip_broken"):
        list(load(folder).documents())
    documents = list(load(folder, skip=True).documents())
    assert len(documents) == 335
    assert sum(d.text is None for d in documents) >= 1
    assert all(d.text for d in documents if d.name.startswith(("test", "unsupervised")))
    file.unlink()
    with pytest.raises(UserError, match="cannot be read: No such file.*prepare TFDS tiny_corpus/1.0.0 again"):
        load(folder).describe()
