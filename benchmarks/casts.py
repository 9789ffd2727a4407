"""The casts of a step: the signal-to-quantization-noise ratio (SQNR) of each, and whether the
exponents of its format reach the values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fp8.casts.counts import CastRecorder, Observed
from fp8.lab.stats import Stats
from fp8.products.range_loss import TOLERANCE, sqnr, without_limits

__all__ = ["SQNR", "CastSeen", "Casts"]

SQNR = {"e4m3": 31.5, "e5m2": 25.5}
"""Format -> its SQNR on normal values in its range, in dB."""


@dataclass(frozen=True)
class CastSeen:
    """One cast. name: of the operand and its layer. sqnr: in dB. own: the format's SQNR on the
    same values if its exponents had no limits. rms: of what is rounded."""

    name: str
    format: str
    sqnr: float
    own: float
    rms: float

    @property
    def inside(self) -> bool:
        """Whether the SQNR is near the format's on normal values, or on these values: a few values
        may lie where the format rounds coarsely, whatever the scale."""
        return self.sqnr >= min(SQNR[self.format], self.own) - TOLERANCE

    def __str__(self) -> str:
        return f"{self.name}: {self.sqnr:.1f} dB of {self.own:.1f}, RMS {self.rms:.2g}"


class Casts(CastRecorder):
    """Records the casts of a model within ``with casts.sampled:``, the backward pass included.
    Operands that are all zeros are left out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, 1)
        self.seen: list[CastSeen] = []
        self.sampled: Any = Stats(self)

    def count(self, layer: str, operand: str, seen: Observed) -> None:
        """Records one cast."""
        x, y = seen.x.detach().double(), seen.y.detach().double()
        if not bool(x.any()):
            return
        scale = 1.0 if seen.scale is None else seen.scale.double()
        own = without_limits(x / scale, seen.format) * scale
        rms = float((x / scale).square().mean().sqrt())
        name = f"{operand} of {layer}"
        self.seen.append(
            CastSeen(name, str(seen.format), sqnr(x, y), sqnr(x, own), rms)
        )

    @property
    def share(self) -> float | None:
        """The share of casts inside; None if there are none."""
        return (
            sum(cast.inside for cast in self.seen) / len(self.seen)
            if self.seen
            else None
        )

    def outside(self) -> list[str]:
        """The casts that are not inside, those that lose most first."""
        outside = [cast for cast in self.seen if not cast.inside]
        return [
            str(cast) for cast in sorted(outside, key=lambda cast: cast.sqnr - cast.own)
        ]
