"""Which steps stand out from those before them: reported, never acted upon."""

import collections
import statistics

WINDOW = 128
"""Steps that a step is compared with."""
FEWEST = 16
"""Steps before a first comparison."""
DEVIATIONS = 8.0
"""Standard deviations above the median, which noise that is normal never reaches in a run."""
SMALLEST_DEVIATION = 0.005
"""Smallest standard deviation assumed, relative to the median: a plateau has hardly any noise of its own."""
WATCHED = ("loss", "grad_norm")


class SpikeDetector:
    """Compares each step's loss and gradient norm with the median and the median absolute deviation of recent ones.

    Both are robust: a spike in the window moves the threshold of later steps hardly at all.
    """

    def __init__(self) -> None:
        self._recent = {name: collections.deque[float](maxlen=WINDOW) for name in WATCHED}

    def thresholds_exceeded(self, line: dict) -> dict[str, float]:
        """The threshold of each value of a metrics line that is above it; the line then counts as recent."""
        exceeded = {}
        for name, recent in self._recent.items():
            if len(recent) >= FEWEST and line[name] > (limit := threshold(recent)):
                exceeded[name] = limit
            recent.append(line[name])
        return exceeded


def threshold(recent: collections.deque[float]) -> float:
    """Median plus ``DEVIATIONS`` standard deviations, these from the median absolute deviation."""
    middle = statistics.median(recent)
    # 1.4826 times the median absolute deviation is the standard deviation of a normal distribution.
    deviation = 1.4826 * statistics.median([abs(x - middle) for x in recent])
    return middle + DEVIATIONS * max(deviation, SMALLEST_DEVIATION * abs(middle))
