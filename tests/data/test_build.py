"""The streaming build against the same cache made in memory, and its memory."""

import errno
import hashlib
import tracemalloc

import numpy as np
import pytest

from dape_jax.data import build as build_lib
from dape_jax.data import cache
from dape_jax.data.splits import SPLITS, SplitAssigner, assign_splits
from dape_jax.data.text import Document
from dape_jax.data.tokenizer import ByteTokenizer
from dape_jax.errors import UserError


class Texts:
    """A source from a list of documents."""

    name, unit = "texts", "doc"

    def __init__(self, documents, own_splits=()):
        self._documents = documents
        self.size = 1000
        self.own_splits = own_splits

    def documents(self):
        yield from self._documents

    def describe(self):
        return {"name": self.name}


def random_documents(n, seed=0):
    rng = np.random.default_rng(seed)
    return [
        Document(f"d{i}\n\u00e9", "".join(rng.choice(list("abc\u00e9 "), rng.integers(0, 40))), 1) for i in range(n)
    ]


def make(documents, tmp_path, validation=0.1, test=0.1, own_splits=()):
    return cache.open_or_build(Texts(documents, own_splits), ByteTokenizer(), tmp_path, validation, test, False)


@pytest.mark.parametrize(("n", "validation", "test"), [
    (300, 0.1, 0.2), (9, 0.01, 0.01), (12, 0.4, 0.59), (4, 0.49, 0.5), (40, 0.001, 0.998),
])  # fmt: skip
def test_the_stream_builds_what_memory_would(n, validation, test, tmp_path, monkeypatch):
    """With all splits filled by the hash, and with up to two that take a document from another."""
    for name, size in (("BATCH_CHARACTERS", 50), ("BATCH_DOCUMENTS", 3), ("COPY_BYTES", 7)):
        monkeypatch.setattr(build_lib, name, size)
    documents = random_documents(n)
    whole = [d for d in documents if d.text]
    splits = assign_splits([d.name for d in whole], validation, test)
    order = sorted(range(len(whole)), key=lambda i: SPLITS.index(splits[i]))
    stream = [np.append(ByteTokenizer().encode(whole[i].text), 256) for i in order]
    made = make(documents, tmp_path, validation, test)
    assert np.array_equal(made.tokens, np.concatenate(stream))
    assert made.tokens.dtype == np.uint16
    assert made.names(0, n) == [whole[i].name for i in order]
    assert made.documents.tolist() == [[sum(map(len, stream[:i])), sum(map(len, stream[: i + 1]))]
                                       for i in range(len(stream))]  # fmt: skip
    assert made.manifest["tokens_sha256"] == hashlib.sha256(np.concatenate(stream).astype("<u2").tobytes()).hexdigest()
    for split in SPLITS:
        names, bounds = made.split_documents(split)
        assert names == [whole[i].name for i in order if splits[i] == split]
        assert (bounds[0, 0], bounds[-1, 1]) == made.split_bounds(split)
    assert made.manifest["left_out"]["empty"] == n - len(whole)
    files = {"tokens.npy", "documents.npy", "names.jsonl", "left_out.jsonl", "manifest.json"}
    assert {p.name for p in made.directory.iterdir()} == files


def test_memory_does_not_grow_with_the_text(tmp_path):
    text = "0123456789" * 10_000  # 100 kB, 200 kB as tokens

    def peak(n, folder):
        tracemalloc.start()
        made = make((Document(str(i), text, 1) for i in range(n)), tmp_path / folder)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert len(made.tokens) == n * 100_001
        return found

    peak(20, "warm-up")
    small, large = peak(40, "small"), peak(400, "large")
    assert large - small < 100_001 * 2 * 360 / 50


def test_a_source_may_bring_its_own_held_out_documents(tmp_path):
    documents = [Document(f"train:{i}", "text", 1) for i in range(200)]
    documents += [Document(f"test:{i}", "text", 1, "test") for i in range(30)]
    made = make(documents, tmp_path, validation=0.1, test=0.3, own_splits=("test",))
    names = {split: made.split_documents(split)[0] for split in SPLITS}
    assert names["test"] == [f"test:{i}" for i in range(30)]
    assert 5 <= len(names["validation"]) <= 40
    assert len(names["train"]) + len(names["validation"]) == 200
    # Without any validation document by hash, one of the train documents takes its place, none of the test ones.
    made = make(documents[:3] + documents[-9:], tmp_path / "few", 0.001, 0.3, own_splits=("test",))
    assert len(made.split_documents("validation")[0]) == 1
    assert len(made.split_documents("test")[0]) == 9
    fixed = {f"d{i}": ("validation", "test")[i % 2] for i in range(9)}
    with pytest.raises(UserError, match="no train documents, and all others have a split of their own"):
        assign_splits(list(fixed), 0.1, 0.1, fixed)


def test_the_assigner_forgets_names_once_the_hash_decides():
    assigner = SplitAssigner(0.2, 0.2)
    given = [assigner.add(f"d{i}") for i in range(100)]
    assert assigner.settled
    assert assigner.final_splits() is None
    assert given == assign_splits([f"d{i}" for i in range(100)], 0.2, 0.2)
    assert assigner._seen == []


def test_a_text_with_the_end_of_document_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "end_of_document", ord("b"))
    with pytest.raises(UserError, match=r"x2: its text contains the token 98 that ends documents"):
        make([Document(f"x{i}", "aab"[i:], 1) for i in range(3)][::-1], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_and_names_the_folder(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(build_lib, "_blocks", full)
    with pytest.raises(UserError, match=r"data.cache_dir='.*' cannot be written: No space left on device"):
        make(random_documents(20), tmp_path)
    assert list(tmp_path.iterdir()) == []
