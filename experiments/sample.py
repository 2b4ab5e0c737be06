"""Samples text from the checkpoint of a run, shown as it is written.

python -m experiments.sample --workdir=DIR [--prompt=TEXT | --prompt_file=FILE] [--length=200] [--temperature=0.8]

The prompt is read whole and each token is then one step with a cache. Without a prompt a document begins. It ends with
the end of the document, or after --length tokens.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from absl import flags

from dape_jax import config as config_lib
from dape_jax import sampling, sharding
from dape_jax.data.tokenizer import Tokenizer, load_tokenizer
from dape_jax.errors import UserError
from dape_jax.training.checkpoint import Checkpoints, require_step
from dape_jax.training.model import abstract_params
from dape_jax.training.stop import StopFlag, Stopped, deferred_signals
from dape_jax.training.workdir import check_tokenizer, load_config
from experiments import command

_WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.")
_PROMPT = flags.DEFINE_string("prompt", None, "Text to go on from.")
_PROMPT_FILE = flags.DEFINE_string("prompt_file", None, "A UTF-8 file with the text to go on from.")
_LENGTH = flags.DEFINE_integer("length", 200, "Tokens to sample at most.")
_SAMPLES = flags.DEFINE_integer("samples", 1, "How many, one after the other.")
_TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "Divides the logits; 0 takes the most probable token.")
_TOP_K = flags.DEFINE_integer("top_k", None, "Draw from so many of the most probable tokens only.")
_TOP_P = flags.DEFINE_float("top_p", 1.0, "Draw from the fewest tokens that together have this probability.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the choices.")
_STEP = flags.DEFINE_integer("step", None, "Checkpoint; default the latest.")
_TOKENIZER = flags.DEFINE_string("tokenizer", None, "Where the run's tokenizer lies now; default data.tokenizer.")
_USAGE = "python -m experiments.sample --workdir=DIR [--prompt=TEXT] [--length=200] [--temperature=0.8]"


def main(_: list[str]) -> None:
    directory = command.workdir(_WORKDIR.value)
    options = sampling.Options(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value)
    for flag in (_LENGTH, _SAMPLES):
        if flag.value < 1:
            raise UserError(f"--{flag.name}={flag.value}: 1 or more is needed")
    config = load_config(directory)
    if config.data.source == config_lib.CHOMSKY:
        raise UserError(f"--workdir={directory} is a run on the task {config.data.task}; sampling needs one on text")
    step = require_step(checkpoints := Checkpoints(directory / "checkpoints"), directory, _STEP.value)
    name = _TOKENIZER.value or config.data.tokenizer
    coder = load_tokenizer(name)
    check_tokenizer(directory, name, coder.describe())
    text = _prompt()
    prompt = coder.encode(text) if text else np.asarray([coder.end_of_document])
    # One row cannot be split over devices; the parameters are, over all that there are of one host.
    devices = jax.local_devices() if config.mesh.fsdp > 1 else jax.local_devices()[:1]
    mesh = sharding.make_mesh(1, len(devices), devices)
    model = config_lib.transformer(config, coder.vocab_size, jax.default_backend())
    params = checkpoints.restore_params(step, abstract_params(model, mesh), config_lib.to_dict(config))
    with jax.set_mesh(mesh), deferred_signals() as stop:
        for i in range(_SAMPLES.value):
            key = jax.random.fold_in(jax.random.key(_SEED.value), i)
            tokens = sampling.generate(model, params, prompt[None], _LENGTH.value, key, options)
            _show(text, tokens, coder, stop)


def _prompt() -> str:
    if _PROMPT_FILE.value is None:
        return _PROMPT.value or ""
    if _PROMPT.value is not None:
        raise UserError("--prompt and --prompt_file: give one of them")
    try:
        return Path(_PROMPT_FILE.value).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"--prompt_file={_PROMPT_FILE.value} is no UTF-8 text: {e}") from e
    except OSError as e:
        raise UserError(f"--prompt_file={_PROMPT_FILE.value} cannot be read: {e.strerror or e}") from e


def _show(text: str, tokens: Iterator[np.ndarray], coder: Tokenizer, stop: StopFlag) -> None:
    """Writes the prompt and, as they come, the tokens; the rate goes to the error output."""
    stream, count, started = sampling.TextStream(coder), 0, 0.0
    for token in tokens:
        if not count:  # which compiles and reads the prompt
            started = time.monotonic()
            print(text, end="", flush=True)
        count += 1
        if stop.signal_number:
            raise Stopped(stop.signal_number, "in the middle of a sample")
        if int(token[0]) == coder.end_of_document:
            break
        print(stream.push(int(token[0])), end="", flush=True)
    print(stream.finish(), flush=True)
    rate = f", {(count - 1) / (time.monotonic() - started):.0f} tokens/s" if count > 1 else ""
    print(f"[{count} tokens{rate}]", file=sys.stderr)


if __name__ == "__main__":
    command.run(main, _USAGE)
