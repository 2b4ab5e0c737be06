"""Sources of documents: where text comes from, and what identifies it.

A source knows its documents by name, reads them one by one, and has a fingerprint that changes when any of them
does, so that a token cache is made once for each state of the text.
"""

import dataclasses
import hashlib
import os
import platform
import sysconfig
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

from dape_jax.errors import UserError, nearest


@dataclasses.dataclass(frozen=True)
class Source:
    """Documents on disk, each read whole.

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

    def documents(self) -> Iterator[tuple[str, str]]:
        """Yields name and text of every document in the order of ``files``."""
        for file in self.files:
            yield file, self.read(self.root / file)

    def describe(self) -> dict:
        """Name, number of documents, and a hash over every file's name, size and time of change."""
        digest = hashlib.sha256()
        for file in self.files:
            status = os.stat(self.root / file)
            digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        return {"name": self.name, "documents": len(self.files), "fingerprint": digest.hexdigest()}


def python_standard_library() -> Source:
    """The source of the running Python's standard library, its tests left out: text that needs no download."""
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = _files(root, "**/*.py", lambda path: not left_out.intersection(path.parts))
    if not files:
        raise UserError(f"data.source=stdlib: this Python has no library sources in {root}; use data.source=folder")

    def read(path: Path) -> str:
        with tokenize.open(path) as file:  # honours the encoding that a module declares
            return file.read()

    return Source(f"Python {platform.python_version()} standard library", root, files, read)


def folder(path: str, glob: str) -> Source:
    """Every file below ``path`` that matches ``glob``, as one UTF-8 document each; hidden files are left out."""
    root = Path(path).expanduser()
    if not path:
        raise UserError("data.path is empty; data.source=folder needs the path of a folder of text files")
    if not root.exists():
        raise UserError(f"data.path={path!r} does not exist; give the path of a folder of text files")
    if not root.is_dir():
        raise UserError(f"data.path={path!r} is a file; give the folder that holds it")
    files = _files(root, glob, lambda path: not any(part.startswith(".") for part in path.parts))
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

    return Source(str(root), root, files, read)


def _files(root: Path, glob: str, keep: Callable[[Path], bool]) -> tuple[str, ...]:
    try:
        found = [path.relative_to(root) for path in root.glob(glob) if path.is_file()]
    except (ValueError, NotImplementedError) as e:
        raise UserError(f"data.glob={glob!r} is no usable pattern ({e}); '**/*.txt' is one") from e
    return tuple(sorted(path.as_posix() for path in found if keep(path)))


def load_source(source: str, path: str, glob: str) -> Source:
    """The source of a configuration: "stdlib", or "folder" with its path and pattern."""
    if source == "stdlib":
        return python_standard_library()
    if source == "folder":
        return folder(path, glob)
    raise UserError(f"data.source={source!r} is unknown{nearest(source, ('stdlib', 'folder'))}")
