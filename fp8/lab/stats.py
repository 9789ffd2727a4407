"""`fp8.stats`: samples what the casts do to the operands of a model during training."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from torch import nn

from ..casts.counts import COUNTS, CastRecorder, Recording, decibels
from ..common.report import as_table
from ..common.validation import check_module, check_whole, names_of
from ..frame import Stack, close_frame, open_frame
from ..torch_internals.stance import STANCE

__all__ = ["Stats", "StatsRow", "stats"]


@dataclass(frozen=True)
class StatsRow:
    """Statistics of the casts of one operand over all sampled passes.

    Attributes:
        layer: the module whose weight is in the product, or the kind and number of a product of
            activations.
        operand: input, weight or grad; with "again" for its second cast, for its second product.
        format: the format.
        elements: the number of elements cast.
        zero: the share of nonzero elements that became zero.
        subnormal: the share that became a subnormal value of the format.
        saturated: the share with a magnitude beyond the largest value of the format.
        nonfinite: the number of Inf and NaN, counted over all elements of the sampled passes.
        sqnr: signal-to-quantization-noise ratio in dB, without Inf and NaN; inf if nothing was
            rounded, nan if all elements are zero.
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
    """Returned by `stats`. Use it as a context manager around a pass; call ``rows()`` or ``print``
    at any time after one."""

    def __init__(self, recorder: CastRecorder, every: int = 1) -> None:
        self.passes = 0
        self._recorder = recorder
        self._every = every
        self._open = Stack()  # for each open pass of this thread, whether it is sampled

    def __enter__(self) -> Stats:
        with self._recorder.lock:
            sampled = self.passes % self._every == 0
            self.passes += 1
        if sampled:
            STANCE.hold()  # compiled code does not count
            open_frame(self, recording=Recording(self._recorder, Counter()))
        self._open.items.append(sampled)
        return self

    def __exit__(self, *error: object) -> None:
        if self._open.items.pop():
            close_frame(self)
            STANCE.release()

    def rows(self) -> list[StatsRow]:
        """One row per operand, in the order of their first casts; none if the passes had no cast.
        Raises RuntimeError without a pass."""
        if not self.passes:
            raise RuntimeError(_NO_PASS)
        return [
            _row(*key, dict(zip(COUNTS, sums.tolist(), strict=True)))
            for key, sums in list(self._recorder.sums.items())
        ]

    def __str__(self) -> str:
        if not self.passes:
            return _NO_PASS
        rows = self.rows()
        if rows:
            return as_table([names_of(StatsRow), *map(_cells, rows)])
        return _NO_CAST

    __repr__ = __str__


_NO_PASS = (
    "no pass was recorded: run one in the block of fp8.stats, `with seen: model(x)`"
)
_NO_CAST = (
    "no cast in the recorded passes: they ran neither a converted layer nor under "
    "fp8.autocast"
)


def stats(model: nn.Module, *, every: int = 50, sample: int = 1 << 14) -> Stats:
    """Counts what the casts of ``model`` lose, in one of every ``every`` passes.

    A sampled pass runs in eager mode, even if the model is compiled; other passes are not affected.
    Enter the context outside of compiled code, because torch.compile rejects it inside. The
    backward pass may run inside or after the context. A cast under `torch.vmap` counts as that
    of all samples at once.

    Args:
        model: provides the names of layers; not changed. It may be under `fp8.autocast`, converted
            or compiled.
        every: the sampling period in passes; the first pass is sampled.
        sample: the number of evenly spaced elements of an operand used for shares. Inf and NaN are
            counted over all elements.

    Returns:
        A `Stats`, to be used as a context manager around a pass.

    Raises:
        TypeError: if ``model`` is not a module, or a number not whole.
        ValueError: for numbers below 1.
    """
    check_module("stats", model)
    check_whole("every", every)
    check_whole("sample", sample)
    return Stats(CastRecorder(model, sample), every)


def _row(layer: str, operand: str, format: str, sums: dict[str, float]) -> StatsRow:
    sampled = sums["sampled"]
    sqnr = math.nan
    if sums["signal"]:
        sqnr = decibels(sums["signal"], sums["noise"])
    return StatsRow(
        layer,
        operand,
        format,
        elements=int(sums["elements"]),
        zero=sums["zero"] / sampled,
        subnormal=sums["subnormal"] / sampled,
        saturated=sums["saturated"] / sampled,
        nonfinite=int(sums["nonfinite"]),
        sqnr=sqnr,
    )


def _cells(row: StatsRow) -> list[str]:
    values = dict(vars(row), sqnr=f"{row.sqnr:.1f} dB")
    for name in ("zero", "subnormal", "saturated"):
        values[name] = f"{values[name]:.3%}"
    return list(map(str, values.values()))
