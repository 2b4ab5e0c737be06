"""Tokenizers: text to integer ids, with one more id that ends every document."""

from typing import Protocol

import numpy as np

from dape_jax.errors import UserError, nearest


class Tokenizer(Protocol):
    """What the data pipeline needs of a tokenizer.

    Attributes:
      vocab_size: number of ids, the end of a document included.
      end_of_document: the id that follows every document's last token.
    """

    vocab_size: int
    end_of_document: int

    def encode(self, text: str) -> np.ndarray:
        """Ids of one document, without its end."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """Text of ids; what is no text (the end of a document, broken UTF-8) is replaced by U+FFFD."""
        ...

    def describe(self) -> dict:
        """What identifies the tokenizer in a cache's manifest: equal descriptions give equal ids."""
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8, and 256 for the end of a document."""

    vocab_size = 257
    end_of_document = 256

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        # 0xff never occurs in UTF-8, so it becomes the replacement character.
        return bytes(int(i) if i < 256 else 0xFF for i in ids).decode("utf-8", errors="replace")

    def describe(self) -> dict:
        return {"name": "bytes", "vocab_size": self.vocab_size}


TOKENIZERS = {"bytes": ByteTokenizer}


def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of a configuration name."""
    if name not in TOKENIZERS:
        raise UserError(f"data.tokenizer={name!r} is unknown{nearest(name, TOKENIZERS)}")
    return TOKENIZERS[name]()
