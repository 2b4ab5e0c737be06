import json

import numpy as np
import pytest

from dape_jax.data import cache, text
from dape_jax.data.tokenizer import ByteTokenizer, load_tokenizer
from dape_jax.errors import UserError


def build(source, directory, validation=0.2, test=0.2):
    return cache.open_or_build(source, ByteTokenizer(), directory, validation, test, show_progress=False)


def test_bytes_there_and_back():
    coder = ByteTokenizer()
    ids = coder.encode("a\u00e9\U0001f600")
    assert ids.tolist() == [97, 0xC3, 0xA9, 0xF0, 0x9F, 0x98, 0x80]
    assert coder.decode(ids) == "a\u00e9\U0001f600"
    assert coder.decode(np.asarray([97, 256, 98])) == "a\ufffdb"
    with pytest.raises(UserError, match="did you mean 'bytes'"):
        load_tokenizer("byte")


def test_standard_library_is_long_documents():
    source = text.python_standard_library()
    assert "asyncio/base_events.py" in source.files
    assert not any("site-packages" in f or "/test" in f for f in source.files)
    document = next(iter(source.documents()))
    assert document.name == source.files[0]
    assert document.text
    assert document.size == 1
    assert source.describe() == text.python_standard_library().describe()


def test_cache_holds_every_document_once(text_folder, tmp_path):
    source = text.folder(str(text_folder), "**/*")
    tokens = build(source, tmp_path / "cache")
    names = tokens.names(0, len(tokens.documents))
    assert sorted(names) == sorted(source.files)
    assert isinstance(tokens.tokens, np.memmap)
    for name, (first, last) in zip(names, tokens.documents, strict=True):
        assert tokens.tokens[last - 1] == 256
        assert bytes(tokens.tokens[first : last - 1].astype(np.uint8)) == (text_folder / name).read_bytes()
    seen = []
    for split in cache.SPLITS:
        first, last = tokens.split_bounds(split)
        split_names, bounds = tokens.split_documents(split)
        assert len(split_names) >= 1
        assert (bounds[0, 0], bounds[-1, 1]) == (first, last)
        assert tokens.manifest["splits"][split]["tokens"] == last - first
        seen += split_names
    assert sorted(seen) == sorted(names)


def test_a_cache_is_built_once_and_again_for_changed_text(text_folder, tmp_path):
    source = text.folder(str(text_folder), "**/*")
    first = build(source, tmp_path / "cache")
    stamp = (first.directory / "tokens.npy").stat().st_mtime_ns
    again = build(text.folder(str(text_folder), "**/*"), tmp_path / "cache")
    assert again.directory == first.directory
    assert (again.directory / "tokens.npy").stat().st_mtime_ns == stamp
    (text_folder / "document03.txt").write_text("something else")
    changed = build(text.folder(str(text_folder), "**/*"), tmp_path / "cache")
    assert changed.directory != first.directory
    assert changed.manifest["tokens_sha256"] != first.manifest["tokens_sha256"]


def test_adding_documents_moves_no_other_between_splits():
    few = [f"d{i}" for i in range(100)]
    many = few + [f"e{i}" for i in range(300)]
    before = dict(zip(few, cache.assign_splits(few, 0.1, 0.2), strict=True))
    after = dict(zip(many, cache.assign_splits(many, 0.1, 0.2), strict=True))
    assert all(after[name] == before[name] for name in few)
    assert 0.15 < list(after.values()).count("test") / 400 < 0.25


def test_no_split_is_ever_empty():
    for n in range(3, 12):
        splits = cache.assign_splits([f"x{i}" for i in range(n)], 0.01, 0.01)
        assert set(splits) == set(cache.SPLITS)
        assert splits.count("test") == splits.count("validation") == 1
    with pytest.raises(UserError, match="2 documents; at least 3"):
        cache.assign_splits(["a", "b"], 0.1, 0.1)


@pytest.mark.parametrize("case", ["missing", "file", "empty", "no match", "binary", "latin", "all empty", "bad glob",
                                  ""])  # fmt: skip
def test_bad_folders_get_one_line_and_leave_nothing(case, tmp_path):
    folder, glob = tmp_path / "text", "**/*"
    if case != "missing":
        folder.mkdir()
    if case == "file":
        folder = folder / "a.txt"
        folder.write_text("text")
    for i in range(4):
        if case in ("binary", "latin", "no match", "bad glob"):
            (folder / f"{i}.txt").write_text("text")
        if case == "all empty":
            (folder / f"{i}.txt").write_text("")
    if case == "binary":
        (folder / "5.bin").write_bytes(b"\0\1\2")
    if case == "latin":
        (folder / "5.txt").write_bytes("caf\xe9".encode("latin-1"))
    if case == "no match":
        glob = "*.tex"
    if case == "bad glob":
        glob = "/abs/*"
    message = {
        "missing": "does not exist", "file": "is a file", "empty": "holds no file", "no match": r"data.glob='\*.tex'",
        "binary": "5.bin is binary", "latin": "5.txt is not UTF-8", "all empty": "every document",
        "bad glob": "no usable",
        "": "data.path is empty",
    }[case]  # fmt: skip
    with pytest.raises(UserError, match=message) as error:
        build(text.folder(str(folder) if case else "", glob), tmp_path / "cache")
    assert "\n" not in str(error.value)
    assert not list((tmp_path / "cache").glob("*")) if (tmp_path / "cache").exists() else True


def test_unknown_sources_are_named():
    with pytest.raises(UserError, match=r"data.source='folders'.*did you mean 'folder'"):
        text.load_source("folders", "", "")


def test_empty_documents_are_left_out_and_counted(text_folder, tmp_path):
    (text_folder / "empty.txt").write_text("")
    tokens = build(text.folder(str(text_folder), "**/*"), tmp_path / "cache")
    assert tokens.manifest["left_out"] == {"empty": 1, "broken": 0}
    listed = (tokens.directory / "left_out.jsonl").read_text()
    assert json.loads(listed) == {"name": "empty.txt", "reason": "empty"}
    assert "left out: 1 empty documents" in tokens.left_out()
    assert "empty.txt" not in tokens.names(0, 100)
    assert build(text.folder(str(text_folder), "document*"), tmp_path / "cache").left_out() == ""


def test_damaged_caches_are_named(text_folder, tmp_path):
    tokens = build(text.folder(str(text_folder), "**/*"), tmp_path / "cache")
    manifest = json.loads((tokens.directory / "manifest.json").read_text())
    (tokens.directory / "manifest.json").write_text(json.dumps({**manifest, "tokens": 5}))
    with pytest.raises(UserError, match="does not match its manifest; delete it"):
        cache.open_cache(tokens.directory)
    (tokens.directory / "manifest.json").write_text(json.dumps(manifest))
    names = (tokens.directory / "names.jsonl").read_text()
    (tokens.directory / "names.jsonl").write_text(names[:-5])
    with pytest.raises(UserError, match="does not match its manifest; delete it"):
        cache.open_cache(tokens.directory)
    (tokens.directory / "names.jsonl").write_text(names)
    assert len(cache.open_cache(tokens.directory).documents) == 12
    data = (tokens.directory / "tokens.npy").read_bytes()
    (tokens.directory / "tokens.npy").write_bytes(data[:1000])
    with pytest.raises(UserError, match="is damaged"):
        cache.open_cache(tokens.directory)


def test_an_interrupted_build_leaves_nothing(text_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "encode", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        build(text.folder(str(text_folder), "**/*"), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_other_fractions_or_tokenizers_make_another_cache(text_folder, tmp_path):
    class Other(ByteTokenizer):
        def describe(self):
            return {**super().describe(), "name": "other"}

    source, directory = text.load_source("folder", str(text_folder), "*"), tmp_path / "c"
    caches = [build(source, directory), build(source, directory, 0.3), build(source, directory, 0.2, 0.3)]
    caches.append(cache.open_or_build(source, Other(), directory, 0.2, 0.2, show_progress=False))
    assert len({c.directory for c in caches}) == 4
