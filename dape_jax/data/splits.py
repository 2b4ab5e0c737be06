"""Which documents are held out: a function of each document's name, with two exceptions that are written down here.

A document's split depends on a hash of its name and nothing else, so adding documents moves no other one. The
exceptions: a source may bring its own validation or test documents, which stay there; and a split that would be empty
takes the one document whose hash is nearest to its range.
"""

import hashlib
from collections.abc import Mapping, Sequence

from dape_jax.errors import UserError

SPLITS = ("train", "validation", "test")


def hash_position(name: str) -> float:
    """A number from 0 to below 1 that spreads names evenly."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:8]) / 2**64


def hashed_split(name: str, validation_fraction: float, test_fraction: float) -> str:
    """The split of a document by its name alone."""
    x = hash_position(name)
    return "test" if x < test_fraction else "validation" if x < test_fraction + validation_fraction else "train"


def assign_splits(
    names: Sequence[str], validation_fraction: float, test_fraction: float, fixed: Mapping[str, str] | None = None
) -> list[str]:
    """The split of each document. Every split gets a document; at least 3 are needed.

    Args:
      names: all different.
      validation_fraction, test_fraction: of the documents whose split is not fixed.
      fixed: splits that the source itself gives to some of the names.
    """
    if len(names) < len(SPLITS):
        raise UserError(f"the text has {len(names)} documents; at least 3 are needed, one for each of {SPLITS}")
    fixed = fixed or {}
    split = {name: fixed.get(name) or hashed_split(name, validation_fraction, test_fraction) for name in names}
    for wanted in ("test", "validation", "train"):
        if wanted not in split.values():
            free = [name for name in names if name not in fixed]
            # From the largest split, the document whose hash is nearest to the wanted range.
            largest = max(SPLITS, key=[split[name] for name in free].count)
            candidates = [name for name in free if split[name] == largest]
            if not candidates:
                raise UserError(f"the text has no {wanted} documents, and all others have a split of their own")
            split[(max if wanted == "train" else min)(candidates, key=hash_position)] = wanted
    return [split[name] for name in names]


class SplitAssigner:
    """``assign_splits`` for documents that come one by one, without keeping their names.

    Names are kept only until every split has a document, since from then on the hash alone decides.
    """

    def __init__(self, validation_fraction: float, test_fraction: float, own_splits: Sequence[str] = ()):
        """``own_splits``: what the source holds out by itself, so that the hash does not."""
        self._fractions = (
            0.0 if "validation" in own_splits else validation_fraction,
            0.0 if "test" in own_splits else test_fraction,
        )
        self._seen: list[tuple[str, str]] = []
        self._fixed: dict[str, str] = {}
        self._missing = set(SPLITS)

    @property
    def settled(self) -> bool:
        """Whether every split has a document, so that no split given so far will change."""
        return not self._missing

    def add(self, name: str, own_split: str | None = None) -> str:
        """The split of the next document; final unless ``final_splits`` says otherwise in the end."""
        split = own_split or hashed_split(name, *self._fractions)
        if self._missing:
            self._seen.append((name, split))
            if own_split:
                self._fixed[name] = own_split
            self._missing.discard(split)
            if not self._missing:
                self._seen, self._fixed = [], {}
        return split

    def final_splits(self) -> list[tuple[str, str]] | None:
        """None if all splits stand as given; else, for every document in order, the one given and the final one."""
        if self.settled:
            return None
        final = assign_splits([name for name, _ in self._seen], *self._fractions, self._fixed)
        return [(given, split) for (_, given), split in zip(self._seen, final, strict=True)]
