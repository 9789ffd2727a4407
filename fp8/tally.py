"""What a cast did to an operand, counted: the numbers that `fp8.stats` collects.

A recorder is open while a sampled pass runs. The products of that pass get a name, which goes with
the spec of each of their casts as a string, the backward ones included; a cast whose spec has one
hands what it did to the recorder.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from .formats import Format

__all__ = ["COUNTS", "Recorder", "labelled", "observe", "product_name"]

COUNTS = ("elements", "sampled", "zero", "subnormal", "saturated", "nonfinite", "signal", "noise")
"""What is added up for an operand; shares are of the sampled elements, nonfinite of all."""


class _Open(threading.local):
    """The recorders whose pass runs in this thread, innermost last."""

    def __init__(self) -> None:
        self.recorders: list[Recorder] = []


OPEN = _Open()

_TOKENS = itertools.count()
_RECORDERS: weakref.WeakValueDictionary[str, Recorder] = weakref.WeakValueDictionary()
"""Token of a recorder -> the recorder: backward may run when no pass is open any more."""


class Recorder:
    """Sums of COUNTS for each operand: (layer, operand, format) -> float64 (8,)."""

    def __init__(self, model: nn.Module, sample: int) -> None:
        self.sample = sample
        self.sums: dict[tuple[str, str, str], Tensor] = {}
        self.unnamed: Counter[str] = Counter()
        self.token = str(next(_TOKENS))
        _RECORDERS[self.token] = self
        self._model = model

    def layers(self) -> dict[int, str]:
        """id of a parameter -> the name of the module that has it."""
        found: dict[int, str] = {}
        for name, parameter in self._model.named_parameters():
            found.setdefault(id(parameter), name.rpartition(".")[0] or "(model)")
        return found


def product_name(kind: str, weight: Tensor | None = None) -> str:
    """A name for the casts of a product: "" where no pass is sampled."""
    if not OPEN.recorders:
        return ""
    recorder = OPEN.recorders[-1]
    layer = None if weight is None else recorder.layers().get(id(weight))
    if layer is None:
        recorder.unnamed[kind] += 1
        layer = f"{kind} {recorder.unnamed[kind]}"
    return f"{recorder.token}|{layer}"


def labelled(spec: tuple[Any, ...], name: str, operand: str) -> tuple[Any, ...]:
    """The spec, whose last value is a label, with that of an operand of the product ``name``."""
    return (*spec[:-1], f"{name}|{operand}") if name and spec else spec


def observe(label: str, x: Tensor, y: Tensor, scale: Tensor | None, format: Format) -> None:
    """Adds to a recorder what became of ``x``: ``y``, with ``scale`` for each element or for all.

    Inf and NaN are looked for in all of x, the rest in a sample of evenly spaced elements.
    """
    token, layer, operand = label.split("|")
    recorder = _RECORDERS.get(token)
    if recorder is None or x.numel() == 0:
        return
    step = -(-x.numel() // recorder.sample) | 1  # odd, so that it meets all columns
    xs, ys = (t.detach().flatten()[::step].double() for t in (x, y))
    low, high = torch.ops.aten.aminmax.default(x.detach())
    clean = bool((low.isfinite() & high.isfinite()).item())  # as a rule, and quickly
    finite = xs.isfinite() & ys.isfinite()  # a scale of eight bits is NaN with one of its values
    xs, ys = torch.where(finite, xs, 0.0), torch.where(finite, ys, 0.0)
    unit: Any = 1.0
    if scale is not None:
        unit = scale.double() if scale.dim() == 0 else scale.flatten()[::step].double()
    counts = (
        torch.full((), x.numel(), device=x.device),
        torch.full((), xs.numel(), device=x.device),
        ((ys == 0) & (xs != 0)).sum(),
        ((ys != 0) & (ys.abs() < unit * format.min_normal)).sum(),
        (xs.abs() > unit * format.max).sum(),
        xs.new_zeros(()) if clean else x.numel() - x.isfinite().sum(),
        xs.square().sum(),
        (xs - ys).square().sum(),
    )
    key = (layer, operand, str(format))
    total = torch.stack([count.double() for count in counts])
    recorder.sums[key] = recorder.sums[key] + total if key in recorder.sums else total
