"""`fp8.stats`: samples what the casts do to the operands of a model during training. `dump`: writes
the operands of chosen products to files, before and after their casts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import asdict, dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..casts.counts import COUNTS, OPEN, CastRecorder, Observed
from ..common.libraries import need
from ..common.mixin import check_module
from ..common.report import as_table
from ..common.threads import Stack
from ..modes.autocast import STANCE

if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = ["Dump", "Sampler", "Stats", "StatsRow", "dump", "stats"]


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
    blocks: int = 0
    flushed_blocks: float = 0.0
    clipped_blocks: float = 0.0
    unit: float = math.nan


class Sampler:
    """A context manager around a pass, which is recorded if ``takes`` says so of its number."""

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
        TypeError: if ``model`` is not a module.
        ValueError: for numbers below 1.
    """
    check_module("stats", model)
    for name, value in (("every", every), ("sample", sample)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number from 1, got {value!r}")
    return Stats(CastRecorder(model, sample), every)


def _row(layer: str, operand: str, format: str, sums: dict[str, float]) -> StatsRow:
    sampled, signal, noise = sums["sampled"], sums["signal"], sums["noise"]
    sqnr = math.inf if noise == 0 else 10 * math.log10(signal / noise)
    values: dict[str, Any] = {name: int(sums[name]) for name in ("elements", "nonfinite")}
    values |= {name: sums[name] / sampled for name in ("zero", "subnormal", "saturated")}
    values["sqnr"] = sqnr if signal else math.nan
    if sums["casts"]:
        blocks = int(sums["blocks"])
        values |= {"blocks": blocks, "unit": 2 ** (sums["unit"] / sums["casts"])}
        values |= {n: sums[n] / (blocks or 1) for n in ("flushed_blocks", "clipped_blocks")}
    return StatsRow(layer, operand, format, **values)


def _cells(row: StatsRow) -> list[str]:
    shares = ("zero", "subnormal", "saturated", "flushed_blocks", "clipped_blocks")
    values = asdict(row)
    shown = {name: f"{values[name]:.3%}" for name in shares}
    shown |= {"sqnr": f"{row.sqnr:.1f} dB", "unit": f"{row.unit:.3g}"}
    return [shown.get(name, str(value)) for name, value in values.items()]


# Dumps


class _DumpRecorder(CastRecorder):
    """Keeps copies of the operands that match a pattern, until `write`."""

    def __init__(self, model: nn.Module, patterns: tuple[str, ...]) -> None:
        super().__init__(model, 1)
        self.seen: set[str] = set()
        self.tensors: dict[str, Tensor] = {}
        self.open = False
        self._patterns = patterns

    def count(self, layer: str, operand: str, seen: Observed) -> None:
        name = f"{layer}.{operand.replace(' ', '_')}"
        self.seen.add(name)
        if not any(fnmatchcase(n, p) for n in (layer, name) for p in self._patterns):
            return
        if not self.open:
            raise RuntimeError(f"dump: {name} is cast after its block: put backward inside")
        number = sum(key.startswith(f"{name}.before") for key in self.tensors) + 1
        last = f".{number}" if number > 1 else ""
        self.tensors[f"{name}.before{last}"] = _copy(seen.x)
        self.tensors[f"{name}.after{last}"] = _copy(seen.y)
        if seen.scale is not None and not seen.scale.dim():
            self.tensors[f"{name}.scale{last}"] = _copy(seen.scale)


def _copy(x: Tensor) -> Tensor:
    return x.detach().to("cpu", copy=True).contiguous()


class Dump(Sampler):
    """Returned by `dump`. Use it as a context manager around a forward and backward pass. files:
    those written so far."""

    def __init__(
        self, model: nn.Module, patterns: tuple[str, ...], steps: Container[int], to: Path
    ) -> None:
        self._mine = _DumpRecorder(model, patterns)
        super().__init__(self._mine, lambda number: number in steps)
        self.files: list[Path] = []
        self._patterns = patterns
        self._to = to

    def __enter__(self) -> Dump:
        super().__enter__()
        self._mine.open = self._open.items[-1]
        return self

    def __exit__(self, *error: Any) -> None:
        recorded, self._mine.open = self._mine.open, False
        super().__exit__(*error)
        tensors, self._mine.tensors = self._mine.tensors, {}
        if not recorded or error[0] is not None:
            return
        if not tensors:
            names = sorted(self._mine.seen)
            raise ValueError(
                f"dump: no cast operand matches {', '.join(map(repr, self._patterns))}; the "
                f"pass had {', '.join(names[:8]) or 'none'}{', ...' if len(names) > 8 else ''}"
            )
        self._to.mkdir(parents=True, exist_ok=True)
        step = self.passes - 1
        path = self._to / f"step-{step:06d}.safetensors"
        need("safetensors").save_file(tensors, path, {"step": str(step)})
        self.files.append(path)


def dump(
    model: nn.Module,
    pattern: str | Iterable[str],
    *,
    steps: Container[int] = range(1),
    to: str | Path,
) -> Dump:
    """Writes the operands of the products of ``model`` that match, in the given steps, to files.

    Each recorded step becomes ``to/step-000010.safetensors``, with the tensors
    ``LAYER.OPERAND.before`` (as given), ``.after`` (as the product uses it, in the same dtype) and,
    if the operand has one scale factor, ``.scale``. Layers are named as in `stats`; operands are
    input, weight and grad, with "_again" for the cast of their second product. Further casts of the
    same operand in a step end with ".2", ".3": of a layer that is called again, or of the groups
    of a grouped product that have tokens. The tensors are those of this process.

    A recorded step runs in eager mode, as with `stats`; others are not affected. Of nested blocks
    of this kind the innermost one records.

    Args:
        model: provides the names of layers; not changed. It may be under `fp8.autocast`, converted
            or compiled.
        pattern: a glob, or several, on the name of a layer or of an operand: "*.mlp.*",
            "*.down_proj.grad".
        steps: the numbers of the passes to record, from 0; a pass is one use of the context.
        to: the folder, created if needed. Files of the same step are replaced.

    Returns:
        A `Dump`, to be used as a context manager around the forward and backward pass of a step.

    Raises:
        TypeError: if ``model`` is not a module, or for steps without ``in``.
        ValueError: if there is no pattern, and at the end of a recorded step in which nothing
            matched.
        RuntimeError: for a matching cast after the block, as long as the `Dump` exists: the
            backward pass belongs inside.
        ImportError: without safetensors.
    """
    check_module("dump", model)
    patterns = (pattern,) if isinstance(pattern, str) else tuple(pattern)
    if not patterns or not all(isinstance(p, str) and p for p in patterns):
        raise ValueError(f"dump needs a pattern of names, got {pattern!r}")
    if not hasattr(steps, "__contains__"):
        raise TypeError(f"steps must be a range or collection of numbers, got {steps!r}")
    need("safetensors")
    return Dump(model, patterns, steps, Path(to))
