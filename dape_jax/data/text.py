"""Sources of documents: where text comes from, and what identifies it.

A source yields its documents one by one, each with a name that stays the same, and has a fingerprint that changes
when any of them does, so that a token cache is made once for each state of the text.
"""

import dataclasses
import hashlib
import os
import platform
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from dape_jax.errors import UserError, nearest


class Document(NamedTuple):
    """One document.

    Fields:
      name: unique within its source.
      text: None for a broken record that ``data.skip_broken`` leaves out.
      size: its share of the source's ``size``.
      split: the split that the source itself puts it in, if any.
      broken: why there is no text.
    """

    name: str
    text: str | None
    size: int
    split: str | None = None
    broken: str = ""


class Source(Protocol):
    """What a token cache is made from.

    Attributes:
      name: for reports.
      size: of all documents, in ``unit``, for the progress bar.
      unit: "doc", or "B" for bytes on disk.
      own_splits: which of "validation" and "test" the source brings itself.
    """

    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    @property
    def unit(self) -> str: ...

    @property
    def own_splits(self) -> Sequence[str]: ...

    def documents(self) -> Iterator[Document]:
        """Yields every document, always in the same order."""
        ...

    def describe(self) -> dict:
        """Name and fingerprint, and whatever else decides what the documents are."""
        ...


@dataclasses.dataclass(frozen=True)
class Files:
    """A source of whole files.

    Fields:
      name: for reports.
      root: folder that document names are relative to.
      files: the documents' names, sorted.
      read: text of one file.
    """

    name: str
    root: Path
    files: tuple[str, ...]
    read: Callable[[Path], str]
    unit: str = "doc"
    own_splits: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return len(self.files)

    def documents(self) -> Iterator[Document]:
        for file in self.files:
            try:
                text = self.read(self.root / file)
            except OSError as e:
                raise UserError(f"{self.root / file} cannot be read: {e.strerror or e}") from e
            yield Document(file, text, 1)

    def describe(self) -> dict:
        """Name, number of documents, and a hash over every file's name, size and time of change."""
        return {
            "name": self.name,
            "documents": len(self.files),
            "fingerprint": fingerprint(self.root, self.files),
        }


def python_standard_library() -> Files:
    """The source of the running Python's standard library, its tests left out: text that needs no download."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = find_files(root, "**/*.py", lambda path: not left_out.intersection(path.parts))
    if not files:
        raise UserError(f"data.source=stdlib: this Python has no library sources in {root}; use data.source=folder")

    def read(path: Path) -> str:
        with tokenize.open(path) as file:  # honours the encoding that a module declares
            return file.read()

    return Files(f"Python {platform.python_version()} standard library", root, files, read)


def folder(path: str, glob: str) -> Files:
    """Every file below ``path`` that matches ``glob``, as one UTF-8 document each; hidden files are left out."""
    root = Path(path).expanduser()
    if not path:
        raise UserError("data.path is empty; data.source=folder needs the path of a folder of text files")
    if not root.exists():
        raise UserError(f"data.path={path!r} does not exist; give the path of a folder of text files")
    if not root.is_dir():
        raise UserError(f"data.path={path!r} is a file; give the folder that holds it")
    files = find_files(root, glob, visible)
    if not files:
        raise UserError(f"data.path={path!r} holds no file that matches data.glob={glob!r}")

    def read(path: Path) -> str:
        data = path.read_bytes()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as e:
            raise UserError(f"{path} is not UTF-8 (byte {e.start}); leave it out with data.glob, now {glob!r}") from e
        if "\0" in text:
            raise UserError(f"{path} is binary (it holds a zero byte); leave it out with data.glob, now {glob!r}")
        return text

    return Files(str(root), root, files, read)


def find_files(root: Path, glob: str, keep: Callable[[Path], bool]) -> tuple[str, ...]:
    """Sorted paths, relative to ``root``, of the files below it that match ``glob`` and that ``keep`` accepts."""
    try:
        found = [path.relative_to(root) for path in root.glob(glob) if path.is_file()]
    except (ValueError, NotImplementedError) as e:
        raise UserError(f"data.glob={glob!r} is no usable pattern ({e}); '**/*.txt' is one") from e
    return tuple(sorted(path.as_posix() for path in found if keep(path)))


def visible(path: Path) -> bool:
    """Whether no part of a relative path is hidden."""
    return not any(part.startswith(".") for part in path.parts)


def fingerprint(root: Path, files: Sequence[str]) -> str:
    """A hash over every file's name, size and time of change."""
    digest = hashlib.sha256()
    for file in files:
        status = os.stat(root / file)
        digest.update(os.fsencode(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n"))
    return digest.hexdigest()


def load_source(source: str, path: str, glob: str, text_field: str = "text", skip_broken: bool = False) -> Source:
    """The source of a configuration: "stdlib", "folder", "jsonl" or "tfds"; see ``DataSection``."""
    # The last two load libraries that the first two do without.
    if source == "stdlib":
        return python_standard_library()
    if source == "folder":
        return folder(path, glob)
    if source == "jsonl":
        from dape_jax.data.jsonl import json_lines

        return json_lines(path, glob, text_field, skip_broken)
    if source == "tfds":
        from dape_jax.data.tfds import tfds_dataset

        return tfds_dataset(path, text_field, skip_broken)
    raise UserError(f"data.source={source!r} is unknown{nearest(source, ('stdlib', 'folder', 'jsonl', 'tfds'))}")
