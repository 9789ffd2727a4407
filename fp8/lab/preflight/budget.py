"""The time of a preflight, by the wall clock."""

from __future__ import annotations

import time

MARGIN = 1.3
"""What an expected time is multiplied by: runs of the same length differ where other programs run
too."""


class Budget:
    """seconds: for everything, from now on."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.perf_counter() + seconds

    @property
    def left(self) -> float:
        """Seconds that are left; may be negative."""
        return self._end - time.perf_counter()

    def allows(self, seconds: float) -> bool:
        """Whether something that is expected to take ``seconds`` ends in time."""
        return MARGIN * seconds < self.left

    def part(self, share: float) -> Budget:
        """A share of the whole, from now on, but no more than what is left."""
        return Budget(min(share * self.seconds, self.left))
