"""Trains a byte-level BPE vocabulary on the train documents of a configuration's text and writes a tokenizer.json.

python -m experiments.train_tokenizer --config=configs/X.py --output=FILE.json --vocab_size=N [--config.data.F=value]

Train with it by --config.data.tokenizer=FILE.json and the same data fields: the same documents are then held out.
"""

import contextlib
import os
from pathlib import Path

from absl import flags

from dape_jax import config as config_lib
from dape_jax.data import vocabulary
from dape_jax.errors import UserError
from dape_jax.training.run import load_text
from experiments import command

_OUTPUT = flags.DEFINE_string("output", None, "The tokenizer.json to write.")
_VOCAB_SIZE = flags.DEFINE_integer("vocab_size", None, "Ids, with the 256 bytes and the end of a document.")
_USAGE = "python -m experiments.train_tokenizer --config=configs/X.py --output=FILE.json --vocab_size=N"


def main(_: list[str]) -> None:
    if not _OUTPUT.value or _VOCAB_SIZE.value is None:
        raise UserError(f"--{'vocab_size' if _OUTPUT.value else 'output'} is missing; usage: {_USAGE}")
    output = Path(_OUTPUT.value).expanduser()
    if output.suffix != ".json":
        raise UserError(f"--output={output}: a name that ends in .json is needed")
    if output.exists():
        raise UserError(f"--output={output} exists; delete it first or name another file")
    config = config_lib.from_mapping(command.config())
    source = load_text(config)
    texts = vocabulary.train_documents(source, config.data.validation_fraction, config.data.test_fraction)
    partial = output.with_suffix(".partial")
    try:
        partial.touch()  # before the long work, in case it cannot be written
        partial.write_text(vocabulary.train_bpe(texts, _VOCAB_SIZE.value))
        os.replace(partial, output)
    except OSError as e:
        raise UserError(f"--output={output} cannot be written: {e.strerror or e}") from e
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()
    print(f"{output}: {_VOCAB_SIZE.value:,} ids from the train documents of {source.name}")


if __name__ == "__main__":
    command.run(main, _USAGE, config=True)
