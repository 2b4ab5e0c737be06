"""The token cache: one memory-mapped array of all tokens, a table of documents, and a manifest.

    <directory>/tokens.npy      all tokens, documents one after the other, each followed by its end-of-document id;
                                the train documents first, then validation, then test
    <directory>/documents.npy   int64 [n, 2]: first token and one past the last, the end-of-document id included
    <directory>/names.jsonl     the documents' names in the same order, a JSON string a line
    <directory>/left_out.jsonl  name and reason of every document that is not in it: empty, or broken
    <directory>/manifest.json   source, tokenizer, splits, counts, hashes

Whole documents are held out; ``dape_jax.data.splits`` says which.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from dape_jax.data import build
from dape_jax.data.splits import SPLITS, assign_splits
from dape_jax.data.text import Source
from dape_jax.data.tokenizer import Tokenizer
from dape_jax.errors import UserError

__all__ = ["SPLITS", "TokenCache", "assign_splits", "open_cache", "open_or_build"]

FORMAT = 2


@dataclasses.dataclass(frozen=True)
class TokenCache:
    """An open cache.

    Fields:
      directory: where it lies.
      manifest: as read from manifest.json.
      tokens: memory-mapped ids [n].
      documents: int64 [documents, 2], first token and one past the last.
    """

    directory: Path
    manifest: dict
    tokens: np.ndarray
    documents: np.ndarray

    def names(self, first: int, last: int) -> list[str]:
        """Names of documents ``first`` to before ``last``."""
        with (self.directory / "names.jsonl").open("rb") as file:
            return [json.loads(line) for line in itertools.islice(file, first, last)]

    def split_documents(self, split: str) -> tuple[list[str], np.ndarray]:
        """Names and bounds [n, 2] of the documents of a split."""
        first, last = self.manifest["splits"][split]["documents"]
        return self.names(first, last), self.documents[first:last]

    def split_bounds(self, split: str) -> tuple[int, int]:
        """First token of a split and one past its last."""
        first, last = self.manifest["splits"][split]["documents"]
        return int(self.documents[first, 0]), int(self.documents[last - 1, 1])

    def left_out(self) -> str:
        """One line that counts the documents that are not in it; "" if there are none."""
        counts = {reason: n for reason, n in self.manifest["left_out"].items() if n}
        if not counts:
            return ""
        listed = " and ".join(f"{n:,} {reason}" for reason, n in counts.items())
        return f"left out: {listed} documents, listed in {self.directory / 'left_out.jsonl'}"


def open_or_build(
    source: Source,
    tokenizer: Tokenizer,
    cache_dir: Path,
    validation_fraction: float,
    test_fraction: float,
    show_progress: bool = True,
) -> TokenCache:
    """Opens the cache of this source, tokenizer and split below ``cache_dir``, and builds it first if there is none."""
    identity = {
        "format": FORMAT,
        "source": source.describe(),
        "tokenizer": tokenizer.describe(),
        "validation_fraction": validation_fraction,
        "test_fraction": test_fraction,
    }
    key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    directory = cache_dir / key
    if not (directory / "manifest.json").exists():
        try:
            cache_dir.mkdir(parents=True, exist_ok=True)
            with _whole_or_nothing(directory) as partial:
                build.build(source, tokenizer, identity, partial, show_progress)
        except OSError as e:
            raise UserError(f"data.cache_dir={str(cache_dir)!r} cannot be written: {e.strerror or e}") from e
    return open_cache(directory)


def open_cache(directory: Path) -> TokenCache:
    """Opens a cache and checks its parts against the manifest."""
    try:
        manifest = json.loads((directory / "manifest.json").read_text())
        tokens = np.load(directory / "tokens.npy", mmap_mode="r")
        documents = np.load(directory / "documents.npy")
        names_bytes = (directory / "names.jsonl").stat().st_size
    except (OSError, ValueError, EOFError) as e:
        raise UserError(f"the token cache {directory} is damaged ({e}); delete it to have it rebuilt") from e
    whole = (
        len(tokens) == manifest["tokens"]
        and build.sha256(documents) == manifest["documents_sha256"]
        and names_bytes == manifest["names_bytes"]
    )
    if not whole:
        raise UserError(f"the token cache {directory} does not match its manifest; delete it to have it rebuilt")
    return TokenCache(directory, manifest, tokens, documents)


@contextlib.contextmanager
def _whole_or_nothing(directory: Path) -> Iterator[Path]:
    """A temporary folder beside ``directory`` that takes its place at the end, unless something fails before."""
    partial = Path(tempfile.mkdtemp(prefix=f"{directory.name}.partial-", dir=directory.parent))
    try:
        yield partial
        if not (directory / "manifest.json").exists():  # another process may have been faster
            shutil.rmtree(directory, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.replace(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
