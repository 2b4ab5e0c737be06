"""Tokenizers: text to integer ids, with an id that ends every document and that no text contains."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from dape_jax.errors import UserError, nearest

if TYPE_CHECKING:
    import tokenizers

END_OF_DOCUMENT = "<|endoftext|>"
END_TOKENS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
"""What vocabularies call the end of a document, the first that is there counts."""


class Tokenizer(Protocol):
    """What the data pipeline needs of a tokenizer.

    Attributes:
      vocab_size: number of ids, the end of a document included.
      end_of_document: the id that follows every document's last token.
      unknown: the id that stands for what the vocabulary cannot express, if there is one.
    """

    vocab_size: int
    end_of_document: int
    unknown: int | None

    def encode(self, text: str) -> np.ndarray:
        """Ids of one document, without its end."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of several documents, on several cores where the tokenizer can."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Text of ids; what is no text (the end of a document, broken UTF-8) is replaced by U+FFFD."""
        ...

    def describe(self) -> dict:
        """What identifies the tokenizer in a cache's manifest: equal descriptions give equal ids.

        ``name`` is for reports; ``end_of_document`` says which id ends documents and whether the vocabulary has it
        ("own") or it was appended.
        """
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8, and 256 for the end of a document."""

    vocab_size = 257
    end_of_document = 256
    unknown: int | None = None

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: np.ndarray) -> str:
        # 0xff never occurs in UTF-8, so it becomes the replacement character.
        return bytes(int(i) if i < 256 else 0xFF for i in ids).decode("utf-8", errors="replace")

    def describe(self) -> dict:
        return {
            "name": "bytes",
            "vocab_size": self.vocab_size,
            "end_of_document": {"id": self.end_of_document, "token": None, "origin": "appended"},
        }


class SubwordTokenizer:
    """A tokenizer of the Hugging Face ``tokenizers`` library.

    Text is always encoded as text: special tokens written in it are split like any other characters, nothing is
    added before or after, and truncation and padding of the file are switched off.
    """

    def __init__(self, tokenizer: "tokenizers.Tokenizer", sha256: str):
        """``sha256``: of the content of the files it was made from."""
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        self._tokenizer = tokenizer
        self._sha256 = sha256
        ids = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(ids.values(), default=-1) + 1  # ids may have gaps
        self._end_token = next((token for token in END_TOKENS if token in ids), None)
        if self._end_token is None:
            self.end_of_document = self.vocab_size
            self.vocab_size += 1
        else:
            self.end_of_document = ids[self._end_token]
        unknown = getattr(tokenizer.model, "unk_token", None)
        self.unknown = None if unknown is None else ids.get(unknown)

    def encode(self, text: str) -> np.ndarray:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        try:
            encoded = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as e:  # the library raises plain Exception, for instance for a missing unknown token
            raise UserError(f"data.tokenizer: {self.describe()['name']} cannot encode the text: {e}") from e
        return [np.asarray(x.ids, np.uint32) for x in encoded]

    def decode(self, ids: np.ndarray) -> str:
        ids = np.asarray(ids)
        ends = np.flatnonzero((ids == self.end_of_document) | (ids >= self.vocab_size))
        pieces = np.split(ids, np.stack([ends, ends + 1], axis=1).ravel())
        # Every second piece is one id that is no text.
        return "".join("\ufffd" if i % 2 else self._tokenizer.decode(p.tolist(), skip_special_tokens=False)
                       for i, p in enumerate(pieces))  # fmt: skip

    def describe(self) -> dict:
        return {
            "name": f"{type(self._tokenizer.model).__name__} {self.vocab_size} ({self._sha256[:8]})",
            "vocab_size": self.vocab_size,
            "sha256": self._sha256,
            "end_of_document": {
                "id": self.end_of_document,
                "token": self._end_token,
                "origin": "appended" if self._end_token is None else "own",
            },
        }


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a configuration.

    Args:
      name: "bytes"; a ``tokenizer.json`` of the Hugging Face ``tokenizers`` library; or a folder that holds one, or
        GPT-2's ``encoder.json`` and ``vocab.bpe``, itself or in a folder below it.
    """
    if name == "bytes":
        return ByteTokenizer()
    path = Path(name).expanduser()
    if path.is_file():
        return _from_json(path)
    if path.is_dir():
        for folder in (path, *sorted(p for p in path.iterdir() if p.is_dir())):
            if (folder / "tokenizer.json").is_file():
                return _from_json(folder / "tokenizer.json")
            if (folder / "encoder.json").is_file() and (folder / "vocab.bpe").is_file():
                return _gpt2(folder / "encoder.json", folder / "vocab.bpe")
        raise UserError(f"data.tokenizer={name!r} holds neither tokenizer.json nor encoder.json with vocab.bpe")
    if "/" in name or name.endswith(".json"):
        raise UserError(f"data.tokenizer={name!r} does not exist; give 'bytes', a tokenizer.json, or a folder with one")
    raise UserError(
        f"data.tokenizer={name!r} is unknown{nearest(name, ['bytes'])}; a path of a tokenizer.json would also do"
    )


def byte_level(model: "tokenizers.models.Model") -> "tokenizers.Tokenizer":
    """A tokenizer with GPT-2's treatment of text: its splitting into words, and bytes as characters."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _from_json(path: Path) -> SubwordTokenizer:
    from tokenizers import Tokenizer

    try:
        content = path.read_bytes()
        tokenizer = Tokenizer.from_str(content.decode("utf-8"))
        if _drops_unknown_characters(json.loads(content)):
            raise UserError(
                f"data.tokenizer={str(path)!r} has no unknown token, so characters outside its vocabulary would vanish "
                "from the text without a trace; add one (unk_token), or use a byte-level vocabulary"
            )
    except UserError:
        raise
    except OSError as e:
        raise UserError(f"data.tokenizer={str(path)!r} cannot be read: {e.strerror or e}") from e
    except Exception as e:  # the library raises plain Exception
        raise UserError(f"data.tokenizer={str(path)!r} is no tokenizer.json of the tokenizers library: {e}") from e
    return SubwordTokenizer(tokenizer, hashlib.sha256(content).hexdigest())


def _gpt2(vocabulary: Path, merges: Path) -> SubwordTokenizer:
    from tokenizers.models import BPE

    try:
        digest = hashlib.sha256(vocabulary.read_bytes() + b"\0" + merges.read_bytes())
        model = BPE.from_file(str(vocabulary), str(merges))
    except OSError as e:
        raise UserError(f"data.tokenizer={str(vocabulary.parent)!r} cannot be read: {e.strerror or e}") from e
    except Exception as e:  # the library raises plain Exception
        raise UserError(
            f"data.tokenizer={str(vocabulary.parent)!r}: {vocabulary.name} and {merges.name} are no vocabulary: {e}"
        ) from e
    return SubwordTokenizer(byte_level(model), digest.hexdigest())


def _drops_unknown_characters(description: dict) -> bool:
    model = description["model"]
    if model.get("type") != "BPE" or model.get("unk_token") is not None or model.get("byte_fallback"):
        return False
    steps = [description.get("pre_tokenizer"), description.get("normalizer")]
    return '"ByteLevel"' not in json.dumps(steps)
