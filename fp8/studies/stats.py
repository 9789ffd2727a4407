"""`fp8.stats`: samples what the casts do to the operands of a model during training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from torch import nn

from ..casts.counts import COUNTS, OPEN, CastRecorder
from ..casts.kurtosis import kurtosis
from ..common.mixin import check_module
from ..common.report import as_table
from ..common.threads import Stack
from ..modes.autocast import STANCE

if TYPE_CHECKING:
    from typing_extensions import Self


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
        kurtosis: the mean of fourth powers divided by the square of that of squares: 3 for normal
            data, up to the number of elements where one is large; nan if all elements are zero.
        blocks: with scales of two levels (NVFP4), the number of blocks that are not all zeros; 0
            for other scalings.
        flushed_blocks: the share of blocks whose scale rounds to zero in e4m3: they keep the
            smallest scale, 2**-9 of the tensor's, and their values lose digits or become zero.
        clipped_blocks: the share of blocks whose scale was rounded down so that their largest value
            saturates.
        unit: the float32 scale of the tensor, in units of which the scales of blocks are e4m3: the
            geometric mean over casts; nan for other scalings.
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
    kurtosis: float
    blocks: int = 0
    flushed_blocks: float = 0.0
    clipped_blocks: float = 0.0
    unit: float = math.nan


class Sampler:
    """A context manager around a pass that opens a recorder of casts in some passes.

    recorder: `CastRecorder`. takes: (number of the pass) -> whether it is recorded.
    """

    def __init__(self, recorder: CastRecorder, takes: Callable[[int], bool]) -> None:
        self.passes = 0
        self._recorder = recorder
        self._takes = takes
        self._open = Stack()  # for each open pass of this thread, whether it is sampled

    def __enter__(self) -> Self:
        with self._recorder.lock:
            sampled = self._takes(self.passes)
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


class Stats(Sampler):
    """Returned by `stats`. Use it as a context manager around a pass; call ``rows()`` or ``print``
    at any time."""

    def __init__(self, recorder: CastRecorder, every: int = 1) -> None:
        super().__init__(recorder, lambda number: number % every == 0)

    def reset(self) -> None:
        """Clears the counts; the next pass is sampled."""
        self._recorder.sums.clear()
        self._recorder.kurtoses.clear()
        self.passes = 0

    def rows(self) -> list[StatsRow]:
        """One row per operand, in the order of their first casts."""
        return [
            _row(*key, dict(zip(COUNTS, sums.tolist(), strict=True)))
            for key, sums in list(self._recorder.sums.items())
        ]

    def __str__(self) -> str:
        rows = self.rows()
        names = [field.name for field in fields(StatsRow)]
        shown = len(names) if any(row.blocks for row in rows) else names.index("blocks")
        return as_table([names[:shown], *(_cells(row)[:shown] for row in rows)])

    __repr__ = __str__


def stats(model: nn.Module, *, every: int = 50, sample: int = 1 << 14) -> Stats:
    """Counts what the casts of ``model`` lose, in one of every ``every`` passes.

    A sampled pass runs in eager mode, even if the model is compiled; other passes are not affected.
    Enter the context outside of compiled code, because torch.compile rejects it inside. The
    backward pass may run inside or after the context. torch.func transforms are not supported.

    From 32 sampled casts of an activation on, a `fp8.RecipeWarning` names one whose kurtosis grows
    faster than the logarithm of the passes, which precedes divergence (FOG, arXiv:2505.20524).

    Args:
        model: provides the names of layers; not changed. It may be under `fp8.autocast`, converted
            or compiled.
        every: the sampling period in passes; the first pass is sampled.
        sample: the number of evenly spaced elements of an operand used for shares. Inf and NaN are
            counted over all elements.

    Returns:
        A `Stats`, to be used as a context manager around a pass.

    Raises:
        TypeError: if ``model`` is not a module.
        ValueError: for numbers below 1.

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
    return Stats(CastRecorder(model, sample), every)


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
        kurtosis=kurtosis(sums),
        **_of_blocks(sums),
    )


def _of_blocks(sums: dict[str, float]) -> dict[str, Any]:
    if not sums["casts"]:
        return {}
    shares = {n: sums[n] / (sums["blocks"] or 1) for n in ("flushed_blocks", "clipped_blocks")}
    return {"blocks": int(sums["blocks"]), **shares, "unit": 2 ** (sums["unit"] / sums["casts"])}


def _cells(row: StatsRow) -> list[str]:
    shares = ("zero", "subnormal", "saturated", "flushed_blocks", "clipped_blocks")
    values = asdict(row)
    shown = {name: f"{values[name]:.3%}" for name in shares}
    shown |= {"sqnr": f"{row.sqnr:.1f} dB", "unit": f"{row.unit:.3g}"}
    shown["kurtosis"] = f"{row.kurtosis:.3g}"
    return [shown.get(name, str(value)) for name, value in values.items()]
