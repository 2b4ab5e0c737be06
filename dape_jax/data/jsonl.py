"""Documents from .jsonl and .jsonl.zst files: one JSON object a line, with the text in one of its fields.

Files are read as a stream, so neither a file nor its decompressed form is ever held whole.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import zstandard

from dape_jax.data.text import Document, find_files, fingerprint, visible
from dape_jax.errors import UserError

SUFFIXES = (".jsonl", ".jsonl.zst")
BLOCK = 2**18
"""Bytes read at once."""


class _DamagedFile(Exception):
    """What follows in a compressed file cannot be read."""


@dataclasses.dataclass(frozen=True)
class JsonLines:
    """A source of .jsonl and .jsonl.zst files; a document's name is "file:line", lines counted from 1.

    Fields:
      name: for reports.
      root: folder that file names are relative to.
      files: sorted.
      text_field: name of the field that holds the text.
      skip_broken: whether a broken line is yielded as a document without text, or refused.
    """

    name: str
    root: Path
    files: tuple[str, ...]
    text_field: str
    skip_broken: bool
    unit: str = "B"
    own_splits: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return sum((self.root / file).stat().st_size for file in self.files)

    def describe(self) -> dict:
        return {
            "name": self.name,
            "files": len(self.files),
            "fingerprint": fingerprint(self.root, self.files),
            "text_field": self.text_field,
            "skip_broken": self.skip_broken,
        }

    def documents(self) -> Iterator[Document]:
        for file in self.files:
            try:
                yield from self._documents(file)
            except OSError as e:
                raise UserError(f"{self.root / file} cannot be read: {e.strerror or e}") from e

    def _documents(self, file: str) -> Iterator[Document]:
        number = done = 0
        with (self.root / file).open("rb") as raw:
            blocks = _decompress(raw) if file.endswith(".zst") else iter(lambda: raw.read(BLOCK), b"")
            try:
                for number, line in enumerate(_lines(blocks), start=1):
                    if not line.strip():
                        continue
                    size, done = raw.tell() - done, raw.tell()
                    text, reason = _text(line, self.text_field)
                    if text is None:
                        yield self._broken(file, number, reason, size)
                    else:
                        yield Document(f"{file}:{number}", text, size)
            except _DamagedFile as e:
                yield self._broken(file, number + 1, f"{e}; nothing after it can be read", raw.tell() - done)

    def _broken(self, file: str, number: int, reason: str, size: int) -> Document:
        if not self.skip_broken:
            raise UserError(
                f"{self.root / file}, line {number}: {reason}; mend it, or leave broken lines out, counted, with "
                "data.skip_broken=True"
            )
        return Document(f"{file}:{number}", None, size, broken=reason)


def json_lines(path: str, glob: str, text_field: str, skip_broken: bool) -> JsonLines:
    """The .jsonl or .jsonl.zst file ``path``, or all of them below the folder ``path`` that match ``glob``."""
    root = Path(path).expanduser()
    if not path:
        raise UserError("data.path is empty; data.source=jsonl needs a .jsonl or .jsonl.zst file or a folder of them")
    if not root.exists():
        raise UserError(f"data.path={path!r} does not exist; give a .jsonl or .jsonl.zst file or a folder of them")
    if root.is_file():
        if not root.name.endswith(SUFFIXES):
            raise UserError(f"data.path={path!r} is neither a .jsonl nor a .jsonl.zst file")
        return JsonLines(str(root), root.parent, (root.name,), text_field, skip_broken)
    files = find_files(root, glob, lambda file: visible(file) and file.name.endswith(SUFFIXES))
    if not files:
        raise UserError(f"data.path={path!r} holds no .jsonl or .jsonl.zst file that matches data.glob={glob!r}")
    twice = sorted({f.removesuffix(".zst") for f in files if f.endswith(".zst")}.intersection(files))
    if twice:
        raise UserError(f"data.path={path!r} holds both {twice[0]} and {twice[0]}.zst; leave one out with data.glob")
    return JsonLines(str(root), root, files, text_field, skip_broken)


def _text(line: bytes, field: str) -> tuple[str | None, str]:
    """The text of a line, or None and why there is none."""
    try:
        record = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        return None, f"it is not UTF-8 (byte {e.start} of the line)"
    except json.JSONDecodeError as e:
        return None, f"it is no whole JSON object ({e.msg} at column {e.colno})"
    except (ValueError, RecursionError) as e:
        return None, f"it is no usable JSON ({e})"
    if not isinstance(record, dict):
        return None, f"it is a JSON {type(record).__name__}, not an object with the field data.text_field={field!r}"
    if field not in record:
        return None, f"it has no field data.text_field={field!r}; its fields: {', '.join(record)}"
    text = record[field]
    if not isinstance(text, str):
        return None, f"its field data.text_field={field!r} holds a {type(text).__name__}, not a string"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        return None, f"its text holds half of a surrogate pair (character {e.start})"
    return text, ""


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    pieces: list[bytes] = []
    for block in blocks:
        first, *others = block.split(b"\n")
        pieces.append(first)
        for other in others:
            yield b"".join(pieces)
            pieces = [other]
    if any(pieces):
        yield b"".join(pieces)


def _decompress(file: BinaryIO) -> Iterator[bytes]:
    """The content of all frames of a .zst file. zstandard's own reader takes a truncated file for a whole one."""
    frame, frames = None, 0
    while block := file.read(BLOCK):
        while block:
            if frame is None:
                # The largest window of the format, which `zstd --long=31` makes.
                frame = zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj()
                frames += 1
            try:
                yield frame.decompress(block)
            except zstandard.ZstdError as e:
                raise _DamagedFile(f"the compressed data is damaged here ({e})") from e
            block = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame is not None or not frames:
        raise _DamagedFile("the compressed file is cut short here")
