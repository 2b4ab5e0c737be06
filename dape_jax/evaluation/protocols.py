"""The protocols of an evaluation by name: what each asks of its arguments, what it scores, and how that is called.

last_k: the same last K targets of windows within documents at every length (this project's default).
official: the manner of DAPE's official code: the split as one stream cut into windows, other text at each length. That
    code draws its windows at random, as many as fit a fixed number of batches; here they are spread evenly.
non_overlapping: that of ALiBi (fairseq's evaluation with sample-break-mode none and no context window): the split as
    one stream in segments, every token scored once.

In both sources windows cross the ends of documents with attention over all of them, and so they do here.
"""

import dataclasses

from dape_jax.data.cache import TokenCache
from dape_jax.errors import UserError, nearest
from dape_jax.evaluation.windows import Targets, Windows, choose_targets, segments, stream_windows, windows_before


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How tables and plots name what a protocol measures.

    Fields:
      scored: the scored tokens, with a place for K.
      length: what a length is the length of.
      error_over: the sampling units of the standard error.
      note: what to know of it besides.
    """

    scored: str
    length: str
    error_over: str
    note: str


PROTOCOLS = {
    "last_k": Protocol("the last {k} tokens", "context", "documents", "the same targets at every length"),
    "official": Protocol(
        "the last {k} tokens", "window", "windows", "other text at each length, scored whole where shorter than K"
    ),
    "non_overlapping": Protocol("all tokens", "segment", "segments", "every token once"),
}

OFFICIAL_K = 256
"""K of the official code."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What an evaluation scores.

    Fields:
      protocol: a name of ``PROTOCOLS``.
      split: train, validation or test.
      k: scored tokens of a window; None is all of them.
      cap: the argument that limits what is scored, as a dictionary of its name and value; None is no limit.
      windows: those of each length, in order.
      targets: of last_k, its targets and their documents.
    """

    protocol: str
    split: str
    k: int | None
    cap: dict[str, int | None]
    windows: list[Windows]
    targets: Targets | None = None


def check_protocol(protocol: str) -> str:
    """The name of a protocol, or an error with the nearest one."""
    if protocol not in PROTOCOLS:
        raise UserError(f"--protocol={protocol} is unknown{nearest(protocol, PROTOCOLS)}")
    return protocol


def check_lengths(lengths: list[int], k: int | None, protocol: str = "last_k") -> tuple[list[int], int | None]:
    """Sorted lengths and K.

    K None is the smaller of 256 and the shortest length in last_k, and 256 in official, where a window shorter than
    K is scored whole; in non_overlapping there is no K.
    """
    if not lengths:
        raise UserError("lengths: at least one is needed")
    for length in lengths:
        if not 1 <= length < 2**31:
            raise UserError(f"lengths: {length} is no length; 1 to 2**31 - 1 is needed")
    if len(set(lengths)) != len(lengths):
        raise UserError(f"lengths: {sorted(lengths)} names one twice")
    if protocol == "non_overlapping":
        if k is not None:
            raise UserError(f"k={k}: non_overlapping scores every token once and has no K; leave k out")
    elif protocol == "official":
        k = OFFICIAL_K if k is None else k
        if k < 1:
            raise UserError(f"k={k}: the last k predictions of each window are scored; 1 or more is needed")
    else:
        k = min(256, *lengths) if k is None else k
        if not 1 <= k <= min(lengths):
            message = f"the last k predictions are scored; k is from 1 to the shortest length {min(lengths)}"
            raise UserError(f"k={k}: {message}")
    return sorted(lengths), k


def check_arguments(
    protocol: str, lengths: list[int], k: int | None, max_windows: int | None, max_tokens: int | None
) -> tuple[list[int], int | None]:
    """Sorted lengths and K; refuses what ``protocol`` does not take. Needs no text, so it can come before it."""
    lengths, k = check_lengths(lengths, k, check_protocol(protocol))
    if protocol == "non_overlapping":
        if max_windows is not None:
            raise UserError(
                f"max_windows={max_windows}: non_overlapping scores all text of the split; max_tokens=N scores the "
                "first N tokens of it, the same ones at every length"
            )
        if max_tokens is not None and max_tokens < 1:
            raise UserError(f"max_tokens={max_tokens}: 1 or more is needed; leave it out to score the whole split")
        return lengths, k
    if max_tokens is not None:
        raise UserError(f"max_tokens={max_tokens}: only non_overlapping takes it; {protocol} takes max_windows")
    if max_windows is None or max_windows < 1:
        raise UserError(f"max_windows={max_windows}: 1 or more is needed")
    return lengths, k


def make_plan(
    protocol: str,
    cache: TokenCache,
    split: str,
    lengths: list[int],
    k: int | None = None,
    max_windows: int | None = None,
    max_tokens: int | None = None,
) -> Plan:
    """Chooses what to score.

    Args:
      protocol: a name of ``PROTOCOLS``.
      cache: the tokens.
      split: which documents.
      lengths: inputs of a window.
      k: as ``check_lengths`` says.
      max_windows: of last_k and official, which need it: windows at each length, at most.
      max_tokens: of non_overlapping: only so many tokens, the first of the split; None is all.
    """
    lengths, k = check_arguments(protocol, lengths, k, max_windows, max_tokens)
    if k is None or max_windows is None:
        first, last = cache.split_bounds(split)
        last = last if max_tokens is None else min(last, first + max_tokens)
        windows = [segments(first, last, length) for length in lengths]
        return Plan(protocol, split, None, {"max_tokens": max_tokens}, windows)
    cap: dict[str, int | None] = {"max_windows": max_windows}
    if protocol == "official":
        bounds = cache.split_bounds(split)
        windows = [stream_windows(*bounds, length, k, max_windows) for length in lengths]
        return Plan(protocol, split, k, cap, windows)
    targets = choose_targets(cache, split, lengths[-1], k, max_windows)
    windows = [windows_before(targets.end, length, k) for length in lengths]
    return Plan(protocol, split, k, cap, windows, targets)
