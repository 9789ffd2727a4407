"""`fp8.stats`: what the casts do to the operands of a model, sampled while it trains."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import astuple, dataclass, fields
from typing import Any

from torch import nn

from ..casts.counts import COUNTS, OPEN, Recorder
from ..common.mixin import check_module
from ..common.report import as_table
from ..common.threads import Stack
from ..modes.autocast import STANCE

__all__ = ["Stats", "StatsRow", "stats"]


@dataclass(frozen=True)
class StatsRow:
    """What the casts of one operand did, in all sampled passes.

    layer: the module whose weight is in the product, or the kind and number of a product of
    activations. operand: input, weight or grad; with "again" where it is cast once more for the
    second product that it is in. elements: how many were cast.
    zero: share that became zero and was not. subnormal: share that became a subnormal of the
    format. saturated: share whose magnitude exceeds the largest value of the format.
    nonfinite: how many were Inf or NaN; all elements of the pass were looked at.
    sqnr: signal to quantization noise in dB, Inf and NaN left out; inf where nothing was rounded,
    nan where all is zero.
    """

    layer: str
    operand: str
    format: str
    elements: int
    zero: float
    subnormal: float
    saturated: float
    nonfinite: int
    sqnr: float


class Stats:
    """Made by `stats`. ``with`` it around a pass; ``rows()`` and ``print`` at any time."""

    def __init__(self, model: nn.Module, every: int, sample: int) -> None:
        self.every = every
        self.passes = 0
        self._recorder = Recorder(model, sample)
        self._open = Stack()  # whether each pass of this thread is sampled

    def __enter__(self) -> Stats:
        with self._recorder.lock:
            sampled = self.passes % self.every == 0
            self.passes += 1
        if sampled:
            STANCE.hold()
            OPEN.recorders.append((self._recorder, Counter()))
        self._open.items.append(sampled)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._open.items.pop():
            mine = [r is self._recorder for r, _ in OPEN.recorders]
            del OPEN.recorders[len(mine) - 1 - mine[::-1].index(True)]
            STANCE.release()

    def reset(self) -> None:
        """Forgets what was counted; the next pass is sampled."""
        self._recorder.sums.clear()
        self.passes = 0

    def rows(self) -> list[StatsRow]:
        """One row for each operand, in the order of their first cast."""
        return [
            _row(*key, dict(zip(COUNTS, sums.tolist(), strict=True)))
            for key, sums in list(self._recorder.sums.items())
        ]

    def __str__(self) -> str:
        cells = [[field.name for field in fields(StatsRow)], *map(_cells, self.rows())]
        return as_table(cells)

    __repr__ = __str__


def stats(model: nn.Module, *, every: int = 50, sample: int = 1 << 14) -> Stats:
    """Counts what the casts of ``model`` lose, in one of ``every`` passes.

    model: names the layers; it is left as it is, and may be under `fp8.autocast`, converted or
    compiled. every: passes of which the first is sampled. sample: of how many elements of an
    operand, evenly spaced, the shares are taken; Inf and NaN are looked for in all.

    A sampled pass runs eagerly, also where it is compiled, and the others as ever: there is nothing
    in them. The block is around the call of compiled code: the compiler refuses it inside. The
    backward pass may be run inside or after it. Not for torch.func transforms.
    Raises TypeError for what is not a module, ValueError for numbers below 1.

    >>> import torch, fp8
    >>> layer = torch.nn.Linear(4, 4, bias=False)
    >>> seen = fp8.stats(layer)
    >>> for _ in range(3):
    ...     with seen, fp8.autocast("unit"):
    ...         y = layer(torch.tensor([[1.0, 1e-4, 1e4, float("inf")]]))
    >>> row = seen.rows()[0]
    >>> row.layer, row.operand, row.zero, row.saturated, row.nonfinite, row.elements
    ('(model)', 'input', 0.25, 0.25, 1, 4)
    """
    check_module("stats", model)
    for name, value in (("every", every), ("sample", sample)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number from 1, got {value!r}")
    return Stats(model, every, sample)


def _row(layer: str, operand: str, format: str, sums: dict[str, float]) -> StatsRow:
    sampled, signal, noise = sums["sampled"], sums["signal"], sums["noise"]
    sqnr = math.inf if noise == 0 else 10 * math.log10(signal / noise)
    return StatsRow(
        layer=layer,
        operand=operand,
        format=format,
        elements=int(sums["elements"]),
        zero=sums["zero"] / sampled,
        subnormal=sums["subnormal"] / sampled,
        saturated=sums["saturated"] / sampled,
        nonfinite=int(sums["nonfinite"]),
        sqnr=sqnr if signal else math.nan,
    )


def _cells(row: StatsRow) -> list[str]:
    layer, operand, format, elements, *shares, nonfinite, sqnr = astuple(row)
    percent = [f"{share:.3%}" for share in shares]
    return [layer, operand, format, str(elements), *percent, str(nonfinite), f"{sqnr:.1f} dB"]
