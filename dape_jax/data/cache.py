"""The token cache: one memory-mapped array of all tokens, a table of documents, and a manifest.

    <directory>/tokens.npy      all tokens, documents one after the other, each followed by its end-of-document id;
                                the train documents first, then validation, then test
    <directory>/documents.npy   int64 [n, 2]: first token and one past the last, the end-of-document id included
    <directory>/manifest.json   source, tokenizer, splits, names of documents, hashes

Whole documents are held out. A document's split depends on a hash of its name and nothing else, so adding documents
moves no other one between splits; only a split that would be empty takes the nearest document of the train split.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dape_jax.data.text import Source
from dape_jax.data.tokenizer import Tokenizer
from dape_jax.errors import UserError

FORMAT = 1
SPLITS = ("train", "validation", "test")


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

    def split_documents(self, split: str) -> tuple[list[str], np.ndarray]:
        """Names and bounds [n, 2] of the documents of a split."""
        first, last = self.manifest["splits"][split]["documents"]
        return self.manifest["names"][first:last], self.documents[first:last]

    def split_bounds(self, split: str) -> tuple[int, int]:
        """First token of a split and one past its last."""
        _, bounds = self.split_documents(split)
        return int(bounds[0, 0]), int(bounds[-1, 1])


def assign_splits(names: Sequence[str], validation_fraction: float, test_fraction: float) -> list[str]:
    """The split of each document, from a hash of its name. Every split gets a document; at least 3 are needed."""
    if len(names) < len(SPLITS):
        raise UserError(f"the text has {len(names)} documents; at least 3 are needed, one for each of {SPLITS}")
    position = {name: int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) / 2**64 for name in names}
    split = {}
    for name, x in position.items():
        held_out = "test" if x < test_fraction else "validation" if x < test_fraction + validation_fraction else "train"
        split[name] = held_out
    for wanted in ("test", "validation", "train"):
        if wanted not in split.values():
            # From the largest split, the document whose hash is nearest to the wanted range.
            largest = max(SPLITS, key=list(split.values()).count)
            candidates = [name for name in names if split[name] == largest]
            split[(max if wanted == "train" else min)(candidates, key=lambda name: position[name])] = wanted
    return [split[name] for name in names]


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
                _build(source, tokenizer, identity, partial, show_progress)
        except OSError as e:
            raise UserError(f"data.cache_dir={str(cache_dir)!r} cannot be written: {e.strerror or e}") from e
    return open_cache(directory)


def open_cache(directory: Path) -> TokenCache:
    """Opens a cache and checks its parts against the manifest."""
    try:
        manifest = json.loads((directory / "manifest.json").read_text())
        tokens = np.load(directory / "tokens.npy", mmap_mode="r")
        documents = np.load(directory / "documents.npy")
    except (OSError, ValueError, EOFError) as e:
        raise UserError(f"the token cache {directory} is damaged ({e}); delete it to have it rebuilt") from e
    if len(tokens) != manifest["tokens"] or _sha256(documents) != manifest["documents_sha256"]:
        raise UserError(f"the token cache {directory} does not match its manifest; delete it to have it rebuilt")
    return TokenCache(directory, manifest, tokens, documents)


def _build(source: Source, tokenizer: Tokenizer, identity: dict, directory: Path, show_progress: bool) -> None:
    texts, empty = {}, []
    progress = tqdm(
        source.documents(), total=len(source.files), desc="tokenizing", unit="doc", disable=not show_progress
    )
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    for name, text in progress:
        ids = tokenizer.encode(text)
        if len(ids):
            texts[name] = np.append(ids, tokenizer.end_of_document).astype(dtype)
        else:
            empty.append(name)
    if not texts:
        raise UserError(f"every document of {source.name} is empty")
    splits = assign_splits(list(texts), identity["validation_fraction"], identity["test_fraction"])
    order = sorted(range(len(texts)), key=lambda i: SPLITS.index(splits[i]))
    names = [list(texts)[i] for i in order]
    ends = np.cumsum([len(texts[name]) for name in names], dtype=np.int64)
    documents = np.stack([np.concatenate([[0], ends[:-1]]), ends], axis=1).astype(np.int64)
    tokens = np.concatenate([texts[name] for name in names])
    counts = [splits.count(split) for split in SPLITS]
    bounds = np.concatenate([[0], np.cumsum(counts)]).tolist()
    manifest = {
        **identity,
        "tokens": len(tokens),
        "tokens_sha256": _sha256(tokens),
        "documents_sha256": _sha256(documents),
        "empty_documents_left_out": empty,
        "splits": {
            split: {
                "documents": [bounds[i], bounds[i + 1]],
                "tokens": int(documents[bounds[i + 1] - 1, 1] - documents[bounds[i], 0]),
            }
            for i, split in enumerate(SPLITS)
        },
        "names": names,
    }
    np.save(directory / "tokens.npy", tokens)
    np.save(directory / "documents.npy", documents)
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=1))


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


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
