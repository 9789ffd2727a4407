"""The kurtosis of activations, and its growth over a run in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Mapping

ACTIVATIONS = ("input", "query", "key", "value")
"""The operands whose kurtosis is watched."""
NORMAL, WATCHED = 3.0, 32
"""The kurtosis of normal data, and the casts after which it is watched.

FOG (arXiv:2505.20524): the kurtosis of queries, keys and values grows slower than the logarithm of
the tokens, and faster several times as many tokens before the loss diverges. For a + b log(t) with
a, b >= 0 the mean over the second half of the casts is at most 1.7 times that over the first one
from 32 casts on: 2 is beyond that, and 2 * 3 beyond what normal data sampled anew does."""


def kurtosis(sums: Mapping[str, float]) -> float:
    """The uncentred kurtosis, mean x^4 / (mean x^2)^2, of sums of `fp8.casts.counts.COUNTS`; NaN
    without elements that are not zero. That of normal data is 3."""
    return sums["sampled"] * sums["fourth"] / sums["signal"] ** 2 if sums["signal"] else math.nan


class Halves:
    """The means of the first and the second half of a sequence, of fewer than 2 * WATCHED numbers.

    Each number is the sum of a run of values. The length of all runs doubles when there are
    2 * WATCHED of them. A run counts when it is complete: at most 1/WATCHED of the values do not.
    """

    def __init__(self) -> None:
        self._length = self._missing = 1
        self._sums: list[float] = []
        self._last = 0.0

    def add(self, value: float) -> None:
        """Appends a value."""
        self._last += value
        self._missing -= 1
        if self._missing:
            return
        self._sums.append(self._last)
        if len(self._sums) == 2 * WATCHED:
            pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
            self._sums = [first + second for first, second in pairs]
            self._length *= 2
        self._last, self._missing = 0.0, self._length

    def means(self) -> tuple[float, float] | None:
        """The means of both halves; None for fewer than WATCHED values."""
        half = len(self._sums) // 2
        if half < WATCHED // 2:
            return None
        first, second = math.fsum(self._sums[:half]), math.fsum(self._sums[-half:])
        return first / (half * self._length), second / (half * self._length)
