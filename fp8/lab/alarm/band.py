"""The band of a noisy quantity of a training run, whose noise is multiplicative."""

from __future__ import annotations

import math
import statistics
from collections import deque

WINDOW = 128
"""The values that a band is measured on, as in OLMo-core's SkipStepOptimizer, which also takes 6
standard deviations of the loss and of the gradient norm."""
LEAST = 16
"""The number of values below which there is no band."""
SIGMAS = 6.0
FACTOR = 2.0
"""The least upper limit, as a multiple of the usual value. Of 60 healthy runs of 500 steps
(benchmarks.problems; high precision, "tensor" and "static"), with a warm-up, a rate drop, noisier
data and a bad batch every 41 steps, no two successive losses are above the limit, at 4 sigmas
either; single ones are, in 27 of the runs. No eight successive gradient norms are."""
NORMAL = 1.4826
"""The standard deviation of a normal distribution over its median absolute deviation."""


class Band:
    """The upper limit of usual values: the median, plus 6 robust standard deviations or a factor of
    2, whichever is more; of logarithms, while all values are positive.

    Median and median absolute deviation are those of the last 128 values: spikes among them do
    not widen the band, as they widen one of means.

    Args:
        is_level: whether the median is the lowest one so far, so that a slow rise, which a window
            follows, leaves the band. Losses fall; gradient norms may rise for good.
    """

    def __init__(self, is_level: bool) -> None:
        self._is_level = is_level
        self.clear()

    def clear(self) -> None:
        """Begins anew."""
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._lowest = math.inf

    @property
    def limit(self) -> float:
        """The largest usual value; Inf while there are fewer than 16."""
        if len(self._values) < LEAST:
            return math.inf
        logs = min(self._values) > 0
        values = [math.log(x) for x in self._values] if logs else list(self._values)
        median = statistics.median(values)
        spread = NORMAL * statistics.median(abs(x - median) for x in values)
        center = median
        if self._is_level:
            usual = math.exp(median) if logs else median
            self._lowest = min(self._lowest, usual)
            center = self._lowest
            if logs and center > 0:
                center = math.log(center)
        if logs:
            return math.exp(min(center + max(SIGMAS * spread, math.log(FACTOR)), 700.0))
        return center + max(SIGMAS * spread, (FACTOR - 1) * abs(center))

    def add(self, value: float) -> bool:
        """Adds a finite value. Returns whether it is above the limit of those before it."""
        above = value > self.limit
        self._values.append(value)
        return above
