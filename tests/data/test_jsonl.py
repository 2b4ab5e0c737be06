import json

import pytest
import zstandard

from dape_jax.data import cache, jsonl, text
from dape_jax.data.tokenizer import ByteTokenizer
from dape_jax.errors import UserError

RECORDS = [
    {"text": f"document {i} \u00e9\U0001f600\u2028 {'x' * 50 * i}", "meta": {"set": "Pile-CC"}} for i in range(40)
]
LINES = [json.dumps(record, ensure_ascii=i % 2 == 0).encode() for i, record in enumerate(RECORDS)]


def compressed(data):
    return zstandard.ZstdCompressor(level=1, write_checksum=True).compress(data)  # as the zstd command does


def load(path, glob="**/*", field="text", skip=False):
    return text.load_source("jsonl", str(path), glob, field, skip)


def read(path, **kwargs):
    return [(d.name, d.text) for d in load(path, **kwargs).documents()]


def build(path, tmp_path, **kwargs):
    return cache.open_or_build(load(path, **kwargs), ByteTokenizer(), tmp_path / "cache", 0.1, 0.1, False)


@pytest.mark.parametrize("block", [1, 7, 2**18])
@pytest.mark.parametrize("ending", [b"", b"\n", b"\r\n"])
@pytest.mark.parametrize("name", ["00.jsonl", "00.jsonl.zst"])
def test_every_line_is_a_document(name, ending, block, tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "BLOCK", block)
    data = b"\xef\xbb\xbf" + (b"\r\n" if ending == b"\r\n" else b"\n").join(LINES) + ending
    (tmp_path / name).write_bytes(compressed(data) if name.endswith(".zst") else data)
    source = load(tmp_path / name)
    documents = list(source.documents())
    assert [d.text for d in documents] == [r["text"] for r in RECORDS]
    assert [d.name for d in documents] == [f"{name}:{i + 1}" for i in range(40)]
    assert sum(d.size for d in documents) <= source.size == (tmp_path / name).stat().st_size


def test_several_frames_and_skippable_ones(tmp_path):
    """What pzstd and `cat a.zst b.zst` write; a line may cross frames."""
    data = b"\n".join(LINES)
    skippable = (0x184D2A50).to_bytes(4, "little") + (4).to_bytes(4, "little") + b"info"
    frames = [skippable, compressed(data[:333]), compressed(data[333:2000]), skippable, compressed(data[2000:])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    assert [t for _, t in read(tmp_path / "a.jsonl.zst")] == [r["text"] for r in RECORDS]


def test_a_folder_is_all_its_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(LINES[:3]) + b"\n\n \n")  # blank lines hold no document
    (tmp_path / "b" / "c.jsonl.zst").write_bytes(compressed(b"\n".join(LINES[3:5])))
    (tmp_path / "README.md").write_text("not this")
    (tmp_path / ".hidden.jsonl").write_text("nor this")
    names = ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3", "b/c.jsonl.zst:1", "b/c.jsonl.zst:2"]
    assert [name for name, _ in read(tmp_path)] == names
    assert [name for name, _ in read(tmp_path, glob="b/*")] == names[3:]
    made = build(tmp_path, tmp_path)
    assert sorted(made.names(0, 9)) == names
    before = load(tmp_path).describe()
    assert before == load(tmp_path).describe()
    assert before != load(tmp_path, field="other").describe()
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(LINES[:4]))
    assert before != load(tmp_path).describe()


BROKEN = {
    "cut": (b'{"text": "half of a li', r"no whole JSON object \(Unterminated string"),
    "not json": (b"hello", "no whole JSON object"),
    "no object": (b'["text"]', r"a JSON list, not an object with the field data.text_field='text'"),
    "no field": (b'{"content": "a", "id": 3}', r"no field data.text_field='text'; its fields: content, id"),
    "no string": (b'{"text": null}', r"data.text_field='text' holds a NoneType"),
    "latin": ('{"text": "caf\xe9"}'.encode("latin-1"), r"not UTF-8 \(byte 13 of the line\)"),
    "surrogate": (b'{"text": "\\ud83d"}', r"half of a surrogate pair \(character 0\)"),
    "huge number": (b'{"text": "a", "n": ' + b"1" * 5000 + b"}", "no usable JSON"),
    "nested": (b"[" * 100_000, "no usable JSON|no whole JSON"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_a_broken_line_is_refused_by_number_or_left_out_and_counted(case, suffix, tmp_path):
    bad, message = BROKEN[case]
    path = tmp_path / f"pile{suffix}"
    data = b"\n".join([*LINES[:6], bad, *LINES[6:]])
    path.write_bytes(compressed(data) if suffix.endswith("zst") else data)
    with pytest.raises(UserError, match=rf"pile{suffix}, line 7: .*({message}).*data.skip_broken=True") as error:
        build(path, tmp_path)
    assert "\n" not in str(error.value)
    assert list((tmp_path / "cache").iterdir()) == []
    made = build(path, tmp_path, skip=True)
    assert len(made.documents) == 40
    assert made.manifest["left_out"] == {"empty": 0, "broken": 1}
    assert json.loads((made.directory / "left_out.jsonl").read_text())["name"] == f"pile{suffix}:7"
    assert "left out: 1 broken documents" in made.left_out()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "garbage after", "cut between frames"])
def test_a_damaged_zst_is_refused_at_its_line(damage, tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "BLOCK", 50)
    path = tmp_path / "pile.jsonl.zst"
    first, second = compressed(b"\n".join(LINES[:10]) + b"\n"), compressed(b"\n".join(LINES[10:]))
    path.write_bytes({
        "truncated": (first + second)[:-20],
        "flipped": first + second[:-1] + bytes([second[-1] ^ 0xFF]),
        "garbage after": first + b"garbage garbage",
        "cut between frames": first + second[:3],
    }[damage])  # fmt: skip
    reason = "damaged here" if damage in ("flipped", "garbage after") else "cut short here"
    with pytest.raises(UserError, match=rf"pile.jsonl.zst, line (\d+): the compressed (data|file) is {reason}"):
        read(path)
    kept = list(load(path, skip=True).documents())
    assert [d.text for d in kept if d.text] == [r["text"] for r in RECORDS][: len(kept) - 1]
    assert 10 <= len(kept) - 1 < 40
    assert kept[-1].text is None
    assert kept[-1].name == f"pile.jsonl.zst:{len(kept)}"


@pytest.mark.parametrize(("case", "message"), [
    ("missing", "data.path='.*' does not exist"), ("", "data.path is empty"), ("other suffix", "neither a .jsonl nor"),
    ("nothing", "holds no .jsonl or .jsonl.zst file that matches data.glob='b/"),
    ("twice", r"holds both a.jsonl and a.jsonl.zst"), ("empty zst", "a.jsonl.zst, line 1: .*cut short"),
    ("all broken", r"every document of .* is empty \(2 are broken and left out\)"),
])  # fmt: skip
def test_bad_paths_get_one_line(case, message, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "a.jsonl").write_bytes(b"\n".join(LINES))
    path, glob, skip = folder, "**/*", False
    if case in ("missing", ""):
        path = tmp_path / "no" if case else ""
    if case == "other suffix":
        path = folder / "a.txt"
        path.write_text("a")
    if case == "nothing":
        glob = "b/*"
    if case == "twice":
        (folder / "a.jsonl.zst").write_bytes(compressed(b"\n".join(LINES)))
    if case == "empty zst":
        path = folder / "a.jsonl.zst"
        path.write_bytes(b"")
    if case == "all broken":
        (folder / "a.jsonl").write_bytes(b"{}\n{}")
        skip = True
    with pytest.raises(UserError, match=message):
        build(path, tmp_path, glob=glob, skip=skip)
