"""The band of a noisy quantity of a training run, whose noise is multiplicative."""

from __future__ import annotations

import math
import statistics
from collections import deque
from itertools import pairwise

WINDOW = 128
"""The values that a band is measured on, as in OLMo-core's SkipStepOptimizer, which also takes 6
standard deviations of the loss and of the gradient norm."""
RECENT = 32
"""The last values that the median of a falling quantity is one of; of 128, it is far above a loss
that falls fast."""
LEAST = 16
"""The number of values below which there is no band."""
SIGMAS = 6.0
FACTOR = 2.0
"""The least upper limit, as a multiple of the usual value. Of 60 healthy runs of 500 steps
(benchmarks.problems; high precision, "tensor" and "static"), with a warm-up, a rate drop, noisier
data and a bad batch every 41 steps, none has four successive losses above the limit, nor above
that of 4 sigmas, nor three; most have single ones. None has eight successive gradient norms above
it, nor above that of 4 sigmas."""
FLOOR = 0.01
"""A quantity below this share of its largest first value is usual: a square error that reaches
zero moves by orders of magnitude there, with its gradient (from 1e-8 to 6e-7, with AdamW)."""
NORMAL = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""


class Band:
    """The upper limit of usual values: the median, plus 6 robust standard deviations or a factor of
    2, whichever is more; of logarithms, while all values are positive.

    Both are of the last 128 values. Spikes among these do not widen the band, as they widen one of
    means.

    Args:
        falls: whether the quantity only falls, as a loss. The median is then the lowest one so far
            of 32 values, and the deviation that of successive differences: a slow rise, which a
            window follows, leaves the band, and a fast fall does not widen it. Gradient norms may
            rise for good.
    """

    def __init__(self, falls: bool) -> None:
        self._falls = falls
        self.clear()

    def clear(self) -> None:
        """Begins anew."""
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._lowest, self._first = math.inf, 0.0

    @property
    def limit(self) -> float:
        """The largest usual value; Inf while there are fewer than 16."""
        if len(self._values) < LEAST:
            return math.inf
        usual = self._lowest if self._falls else statistics.median(self._values)
        if min(usual, *self._values) <= 0:
            spread = self._deviation(list(self._values))
            return usual + max(SIGMAS * spread, (FACTOR - 1) * abs(usual))
        spread = self._deviation([math.log(x) for x in self._values])
        # The exponential of more is no float.
        limit = usual * max(FACTOR, math.exp(min(SIGMAS * spread, 700.0)))
        return max(limit, FLOOR * self._first)

    def _deviation(self, values: list[float]) -> float:
        """The robust standard deviation."""
        if self._falls:
            # That of a difference is sqrt(2) times as large.
            steps = [abs(after - before) for before, after in pairwise(values)]
            return NORMAL * statistics.median(steps) / math.sqrt(2)
        median = statistics.median(values)
        return NORMAL * statistics.median(abs(x - median) for x in values)

    def add(self, value: float) -> bool:
        """Adds a finite value. Returns whether it is above the limit of those before it."""
        above = value > self.limit
        self._values.append(value)
        if len(self._values) >= LEAST:
            recent = statistics.median(list(self._values)[-RECENT:])
            if self._lowest == math.inf:
                self._first = max(self._values)
            self._lowest = min(self._lowest, recent)
        return above
