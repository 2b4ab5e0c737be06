"""Documents from a TensorFlow Datasets dataset that is already prepared, read without TensorFlow.

The dataset must be in a format with random access (ArrayRecord), which ``tfds.data_source`` reads without TensorFlow.
Splits that the dataset itself names validation and test stay what they are; the records of all its other splits are
train documents, of which the hash of the name holds some out for whichever of the two it does not have.
"""

import dataclasses
import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds
from tensorflow_datasets.core import constants
from tensorflow_datasets.core.file_adapters import FileFormat

from dape_jax.data.text import Document, fingerprint
from dape_jax.errors import UserError

OWN_SPLITS = {"validation": "validation", "valid": "validation", "val": "validation", "dev": "validation",
              "test": "test"}  # fmt: skip
"""Names of a dataset's held-out splits, and what they are here."""

BATCH = 256
"""Records read at once."""


@dataclasses.dataclass(frozen=True)
class TfdsDataset:
    """A source of one text feature of a prepared dataset; a document's name is "split:index".

    Fields:
      builder: of the prepared dataset.
      text_field: the feature that holds the text.
      skip_broken: whether a record without text is yielded as a document without text, or refused.
    """

    builder: Any
    text_field: str
    skip_broken: bool
    unit: str = "doc"

    @property
    def name(self) -> str:
        return f"TFDS {self.builder.info.full_name}"

    @property
    def size(self) -> int:
        return sum(split.num_examples for split in self.builder.info.splits.values())

    @property
    def own_splits(self) -> tuple[str, ...]:
        return tuple(sorted({OWN_SPLITS[split] for split in self.builder.info.splits if split in OWN_SPLITS}))

    def describe(self) -> dict:
        splits = self.builder.info.splits
        files = sorted(Path(path) for split in splits.values() for path in split.filepaths)
        try:
            state = fingerprint(files[0].parent, [path.name for path in files])
        except OSError as e:
            raise UserError(f"{e.filename} cannot be read: {e.strerror}; prepare {self.name} again") from e
        return {
            "name": self.name,
            "documents": self.size,
            "fingerprint": state,
            "splits": {name: OWN_SPLITS.get(name, "train") for name in splits},
            "text_field": self.text_field,
            "skip_broken": self.skip_broken,
        }

    def documents(self) -> Iterator[Document]:
        for split in self.builder.info.splits:
            records = self.builder.as_data_source(split=split)
            for first in range(0, len(records), BATCH):
                indices = list(range(first, min(first + BATCH, len(records))))
                try:
                    batch = records.__getitems__(indices)
                except (RuntimeError, ValueError) as e:  # what ArrayRecord raises for a damaged file
                    raise UserError(f"{self.name}: records {first} and on of split {split} cannot be read: {e}") from e
                for index, record in zip(indices, batch, strict=True):
                    yield self._document(split, index, record[self.text_field])

    def _document(self, split: str, index: int, text: bytes | str | None) -> Document:
        name, own, reason = f"{split}:{index}", OWN_SPLITS.get(split), ""
        try:
            if text is None:  # what a truncated file gives
                reason = f"its feature {self.text_field!r} holds nothing"
            elif isinstance(text, bytes):
                text = text.decode("utf-8")
        except UnicodeDecodeError as e:
            reason = f"its text is not UTF-8 (byte {e.start})"
        if reason and not self.skip_broken:
            raise UserError(
                f"{self.name}, record {index} of split {split}: {reason}; prepare the dataset again, or leave broken "
                "records out, counted, with data.skip_broken=True"
            )
        return Document(name, None if reason else str(text), 1, own, reason)


def tfds_dataset(path: str, text_field: str, skip_broken: bool) -> TfdsDataset:
    """The prepared dataset of a folder or of a name such as "my_dataset:1.0.0" or "my_dataset/config".

    Names are looked up where TFDS keeps its datasets: ``$TFDS_DATA_DIR`` or ``~/tensorflow_datasets``. Nothing is
    downloaded.
    """
    if not path:
        raise UserError("data.path is empty; data.source=tfds needs a name such as my_dataset:1.0.0, or the folder of "
                        "a prepared dataset")  # fmt: skip
    builder = _from_folder(path) if Path(path).expanduser().is_dir() else _from_name(path)
    info = builder.info
    available = info.available_file_formats()
    if not available.intersection(FileFormat.with_random_access()):
        raise UserError(
            f"data.path={path!r} is prepared as {'/'.join(sorted(f.value for f in available)) or 'no known format'}, "
            "which cannot be read without TensorFlow; prepare it with file_format='array_record'"
        )
    features = info.features or {}
    texts = [name for name, feature in features.items() if isinstance(feature, tfds.features.Text)]
    if text_field not in texts:
        raise UserError(
            f"data.text_field={text_field!r} is no text feature of {path!r}; its text features: "
            f"{', '.join(texts) or 'none'}"
        )
    return TfdsDataset(builder, text_field, skip_broken)


def _from_folder(path: str) -> Any:
    root = Path(path).expanduser()
    if not (root / "dataset_info.json").is_file():
        below = sorted(file.parent for file in root.glob("*/**/dataset_info.json"))
        hint = f"; {below[0]} is one" if below else ""
        raise UserError(f"data.path={path!r} is no folder of a prepared TFDS dataset (no dataset_info.json){hint}")
    try:
        return tfds.builder_from_directory(root)
    except (ValueError, KeyError, ImportError, tfds.core.DatasetNotFoundError) as e:
        raise UserError(f"data.path={path!r} is no readable TFDS dataset: {_first_line(e)}") from e


def _from_name(path: str) -> Any:
    where = Path(constants.DATA_DIR).expanduser()
    prepare = "prepare it with file_format='array_record', or give the folder of a prepared dataset as data.path"
    if path.startswith(("/", "~", ".")):
        raise UserError(f"data.path={path!r} does not exist; give the folder of a prepared TFDS dataset, or a name")
    try:
        builder = tfds.builder(path, data_dir=where, try_gcs=False)
    except tfds.core.DatasetNotFoundError as e:
        name = path.partition(":")[0]
        versions = sorted(file.parent.name for file in (where / name).glob("*/dataset_info.json"))
        known = difflib.get_close_matches(name, tfds.list_builders(with_community_datasets=False), n=1, cutoff=0.6)
        hint = f" (prepared there: {', '.join(versions)})" if versions else ""
        hint = hint or (f" (did you mean {known[0]!r}?)" if known else "")
        raise UserError(
            f"data.path={path!r} is no dataset that TFDS knows without TensorFlow, nor prepared in {where}{hint}; "
            f"{prepare}"
        ) from e
    except (AssertionError, ImportError, ValueError) as e:  # a version or configuration that the builder lacks
        raise UserError(f"data.path={path!r} cannot be opened by TFDS: {_first_line(e)}; {prepare}") from e
    if not builder.is_prepared():
        raise UserError(f"data.path={path!r} is not prepared in {where}; {prepare}")
    return builder


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
