"""Stopping on a signal, at a point where nothing is lost.

A signal only sets a flag; whoever holds the flag polls it between steps and between batches. On several processes a
signal may reach only some of them, or at different steps, so ``agreed`` compares the flags of all.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import jax
import numpy as np
from jax.experimental import multihost_utils


class Stopped(RuntimeError):
    """The work ended early because a signal asked for it, with everything saved that its message says."""

    def __init__(self, signal_number: int, message: str):
        super().__init__(f"stopped by {signal.Signals(signal_number).name} {message}")
        self.status = 128 + signal_number
        """Exit status, as shells give it to a command that a signal ended: 143 for SIGTERM, 130 for SIGINT."""


class StopFlag:
    """Which signal has asked to stop: 0 for none so far."""

    signal_number: int = 0


def agreed(value: int) -> int:
    """The largest ``value`` of all processes, each of which must call this at the same point of the program."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.process_allgather(np.int32(value)).max())


@contextlib.contextmanager
def deferred_signals() -> Iterator[StopFlag]:
    """While it is open, SIGTERM and the first SIGINT set the flag; a second SIGINT raises KeyboardInterrupt.

    Python delivers signals to the main thread only; opened in another one, this changes nothing.
    """
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():
        yield flag
        return

    def handle(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT and flag.signal_number:
            raise KeyboardInterrupt
        flag.signal_number = flag.signal_number or number

    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
