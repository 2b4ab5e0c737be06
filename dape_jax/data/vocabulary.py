"""Training a byte-level BPE vocabulary on the train documents of a source."""

from collections.abc import Iterator

from tqdm import tqdm

from dape_jax.data.splits import SplitAssigner
from dape_jax.data.text import Source
from dape_jax.data.tokenizer import END_OF_DOCUMENT, byte_level
from dape_jax.errors import UserError

SMALLEST = 257
"""The 256 bytes and the end of a document."""


def train_documents(
    source: Source, validation_fraction: float, test_fraction: float, show_progress: bool = True
) -> Iterator[str]:
    """Yields the text of the documents that a token cache of the same source and fractions has in its train split."""
    assigner = SplitAssigner(validation_fraction, test_fraction, source.own_splits)
    for document in source.documents():  # until the splits are settled, which is soon
        if document.text:
            assigner.add(document.name, document.split)
        if assigner.settled:
            break
    final = assigner.final_splits()
    again = SplitAssigner(validation_fraction, test_fraction, source.own_splits)
    progress = tqdm(
        total=source.size, desc="reading", unit=source.unit, unit_scale=source.unit == "B", disable=not show_progress
    )
    with progress:
        index = 0
        for document in source.documents():
            if document.text:
                split = again.add(document.name, document.split)
                if (split if final is None else final[index][1]) == "train":
                    yield document.text
                index += 1
            progress.update(document.size)


def train_bpe(texts: Iterator[str], vocab_size: int, show_progress: bool = True) -> str:
    """The ``tokenizer.json`` of a byte-level BPE vocabulary with GPT-2's splitting into words.

    Args:
      texts: documents.
      vocab_size: ids, the 256 bytes and ``<|endoftext|>``, which is id 0, included.
      show_progress: whether the library prints its progress.

    Raises:
      UserError: the texts have no pair left to merge before the vocabulary is full.
    """
    from tokenizers import models, pre_tokenizers, trainers

    if vocab_size < SMALLEST:
        raise UserError(f"vocab_size={vocab_size}: {SMALLEST} or more is needed, for 256 bytes and the end of document")
    tokenizer = byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() < vocab_size:
        raise UserError(
            f"vocab_size={vocab_size}: the train documents have pairs for {tokenizer.get_vocab_size()} only; "
            "ask for that many or fewer, or give more text"
        )
    return tokenizer.to_str(pretty=True)
