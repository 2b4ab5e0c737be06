"""Building a token cache as a stream: memory does not grow with the text, only by some bytes for each document.

Tokens go to one temporary file for each split as they are made; at the end the three are joined. The disk must hold
the tokens twice for that moment.
"""

import contextlib
import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
from tqdm import tqdm

from dape_jax.data.splits import SPLITS, SplitAssigner
from dape_jax.data.text import Document, Source
from dape_jax.data.tokenizer import Tokenizer
from dape_jax.errors import UserError

BATCH_CHARACTERS = 2**20
BATCH_DOCUMENTS = 2**10
"""Text that is encoded at once is about this much, or one document."""

COPY_BYTES = 2**22
KINDS = ("tokens", "names", "sizes")


def build(source: Source, tokenizer: Tokenizer, identity: dict, directory: Path, show_progress: bool) -> None:
    """Writes tokens.npy, documents.npy, names.jsonl, left_out.jsonl and manifest.json into the folder ``directory``."""
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    assigner = SplitAssigner(identity["validation_fraction"], identity["test_fraction"], source.own_splits)
    left_out: Counter[str] = Counter(empty=0, broken=0)
    unknown = 0
    progress = tqdm(
        total=source.size, desc="tokenizing", unit=source.unit, unit_scale=source.unit == "B", disable=not show_progress
    )
    with contextlib.ExitStack() as stack:
        stack.enter_context(progress)
        parts = {split: _open_part(directory, split, stack) for split in SPLITS}
        left_out_file = stack.enter_context((directory / "left_out.jsonl").open("w"))
        documents = tokens = 0
        for document, ids in _encode(source.documents(), tokenizer):
            if len(ids):
                if (ids == tokenizer.end_of_document).any():
                    raise UserError(
                        f"{document.name}: its text contains the token {tokenizer.end_of_document} that ends "
                        "documents; take it out of the text, or use a tokenizer whose text never gives it"
                    )
                unknown += 0 if tokenizer.unknown is None else int((ids == tokenizer.unknown).sum())
                parts[assigner.add(document.name, document.split)].add(
                    document.name, np.append(ids, tokenizer.end_of_document).astype(dtype)
                )
                documents, tokens = documents + 1, tokens + len(ids) + 1
            else:
                reason = "broken" if document.text is None else "empty"
                left_out[reason] += 1
                left_out_file.write(json.dumps({"name": document.name, "reason": document.broken or reason}) + "\n")
            progress.update(document.size)
            progress.set_postfix_str(f"{documents:,} documents, {tokens:,} tokens", refresh=False)
    if not documents:
        broken = f" ({left_out['broken']} are broken and left out)" if left_out["broken"] else ""
        raise UserError(f"every document of {source.name} is empty{broken}")
    counts = _join(directory, dtype, _pieces(parts, assigner.final_splits()))
    manifest = {
        **identity,
        **counts,
        "left_out": dict(left_out),
        "unknown_tokens": unknown,
    }
    (directory / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")


def sha256(array: np.ndarray) -> str:
    """Of the array's numbers."""
    return hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()


def _encode(documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[tuple[Document, np.ndarray]]:
    batch: list[Document] = []
    characters = 0

    def encoded() -> Iterator[tuple[Document, np.ndarray]]:
        return zip(batch, tokenizer.encode_batch([document.text or "" for document in batch]), strict=True)

    for document in documents:
        batch.append(document)
        characters += len(document.text or "")
        if characters >= BATCH_CHARACTERS or len(batch) >= BATCH_DOCUMENTS:
            yield from encoded()
            batch, characters = [], 0
    yield from encoded()


@dataclasses.dataclass
class _Part:
    """Documents of one split in temporary files: tokens, names, and the number of bytes of both for each document."""

    tokens: BinaryIO
    names: BinaryIO
    sizes: BinaryIO
    documents: int = 0

    def add(self, name: str, ids: np.ndarray) -> None:
        line = json.dumps(name).encode() + b"\n"
        self.tokens.write(ids.data)
        self.names.write(line)
        self.sizes.write(np.asarray([ids.nbytes, len(line)], np.int64).data)
        self.documents += 1


def _open_part(directory: Path, split: str, stack: contextlib.ExitStack) -> _Part:
    tokens, names, sizes = (stack.enter_context(_part(directory, split, kind).open("wb")) for kind in KINDS)
    return _Part(tokens, names, sizes)


def _part(directory: Path, split: str, kind: str) -> Path:
    return directory / f"{split}.{kind}.part"


_Piece = tuple[str, int, int]
"""Documents ``first`` to before ``last`` of a split's temporary files."""


def _pieces(parts: dict[str, _Part], final: list[tuple[str, str]] | None) -> dict[str, list[_Piece]]:
    """What each split is joined from."""
    if final is None:
        return {split: [(split, 0, part.documents)] for split, part in parts.items()}
    pieces: dict[str, list[_Piece]] = {split: [] for split in parts}
    index: Counter[str] = Counter()
    for given, split in final:
        pieces[split].append((given, index[given], index[given] + 1))
        index[given] += 1
    return pieces


def _join(directory: Path, dtype: np.dtype, pieces: dict[str, list[_Piece]]) -> dict:
    """Joins the temporary files, deletes them, and returns what the manifest says of the result."""
    sizes = {split: np.fromfile(_part(directory, split, "sizes"), np.int64).reshape(-1, 2) for split in SPLITS}
    ends = {split: np.concatenate([[[0, 0]], np.cumsum(n, axis=0)]) for split, n in sizes.items()}
    order = [piece for split in SPLITS for piece in pieces[split]]
    last = np.cumsum(np.concatenate([sizes[split][i:j, 0] for split, i, j in order]) // dtype.itemsize)
    documents = np.stack([np.concatenate([[0], last[:-1]]), last], axis=1)
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (int(last[-1]),)}
    hashes = {}
    for column, (kind, name) in enumerate((("tokens", "tokens.npy"), ("names", "names.jsonl"))):
        digest = hashlib.sha256()
        with (directory / name).open("wb") as out:
            if kind == "tokens":
                np.lib.format.write_array_header_1_0(out, header)
            for split, i, j in order:
                for block in _blocks(_part(directory, split, kind), *ends[split][[i, j], column].tolist()):
                    digest.update(block)
                    out.write(block)
        hashes[kind] = digest.hexdigest()
        for split in SPLITS:
            _part(directory, split, kind).unlink()
    np.save(directory / "documents.npy", documents)
    for split in SPLITS:
        _part(directory, split, "sizes").unlink()
    counts = [sum(j - i for _, i, j in pieces[split]) for split in SPLITS]
    bounds = np.concatenate([[0], np.cumsum(counts)]).tolist()
    return {
        "tokens": int(last[-1]),
        "tokens_sha256": hashes["tokens"],
        "documents_sha256": sha256(documents),
        "names_bytes": (directory / "names.jsonl").stat().st_size,
        "splits": {
            split: {
                "documents": [bounds[i], bounds[i + 1]],
                "tokens": int(documents[bounds[i + 1] - 1, 1] - documents[bounds[i], 0]),
            }
            for i, split in enumerate(SPLITS)
        },
    }


def _blocks(path: Path, start: int, end: int) -> Iterator[bytes]:
    """Bytes ``start`` to before ``end`` of a file, in blocks."""
    with path.open("rb") as file:
        file.seek(start)
        while start < end:
            block = file.read(min(COPY_BYTES, end - start))
            start += len(block)
            yield block
