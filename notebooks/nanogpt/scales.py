"""The scale of every tensor of a model, forward and backward, and a picture of it.

A tensor's scale is its RMS. Module hooks find the tensors, so that a model and its transformed
copies are measured alike: what a watched module takes in and gives out, and its weight.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .model import Block

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WATCHED = (nn.Linear, nn.LayerNorm, nn.Embedding, Block)
VALUE, GRADIENT = "#0072B2", "#D55E00"  # Okabe and Ito's blue and vermilion
RANGES = {
    "e4m3": VALUE,
    "e5m2": GRADIENT,
}  # the formats of simulate_fp8, each in its tensors' colour


@dataclass(frozen=True, kw_only=True)
class Scale:
    """RMS of a tensor and of its gradient; NaN for a gradient that never came."""

    name: str
    value: float
    gradient: float


class _Recorder:
    """Collects tensors and gradients as hooks see them, in the order of the forward pass.

    A tensor that several modules see keeps its first name. The hooks keep tensors and compute
    nothing: a computation inside the forward pass would be transformed like the model's own.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}

    def watch(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        return [
            module.register_forward_pre_hook(lambda _, args: self._add(f"{name} (input)", args[0])),
            module.register_forward_hook(lambda _, args, output: self._add(name, output)),
        ]

    def _add(self, name: str, tensor: Tensor) -> None:
        if tensor.requires_grad and not any(tensor is other for other in self.tensors.values()):
            self.tensors[name] = tensor
            tensor.register_hook(lambda grad: self.gradients.update({name: grad}))


def record_scales(model: nn.Module, idx: Tensor, targets: Tensor) -> list[Scale]:
    """One forward and backward pass of a GPT; activations in order, then weights.

    The gradients of the parameters are None afterwards.
    """
    recorder = _Recorder()
    modules = [(name, m) for name, m in model.named_modules() if isinstance(m, WATCHED)]
    handles = [handle for name, m in modules for handle in recorder.watch(name, m)]
    model.zero_grad(set_to_none=True)
    try:
        _, loss = model(idx, targets)
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    parameters = dict(model.named_parameters())
    tensors = {**recorder.tensors, **parameters}
    gradients = {**recorder.gradients, **{name: p.grad for name, p in parameters.items()}}
    scales = [
        Scale(name=name, value=_rms(tensor), gradient=_rms(gradients.get(name)))
        for name, tensor in tensors.items()
    ]
    model.zero_grad(set_to_none=True)
    return scales


def plot_scales(models: Mapping[str, Sequence[Scale]]) -> Figure:
    """One panel per model, one row per tensor, against what FP8 can represent.

    The bars reach from a format's smallest normal value to its largest and, paler, down to its
    smallest subnormal: what lies left of that is zero once cast.
    """
    from matplotlib.figure import Figure

    rows = max(len(scales) for scales in models.values())
    figure = Figure(figsize=(5.5 * len(models), 2.2 + 0.16 * rows), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(models), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (title, scales) in zip(panels, models.items(), strict=True):
        _draw_scales(axes, scales)
        for i, (name, colour) in enumerate(RANGES.items()):
            _draw_range(axes, name, colour, y=-1.2 - 1.3 * i)
        axes.set_ylim(len(scales) - 0.5, -1.9 - 1.3 * len(RANGES))
        axes.set_title(title, loc="left", fontsize=11)
    return figure


def _draw_scales(axes: Axes, scales: Sequence[Scale]) -> None:
    rows = range(len(scales))
    dots = {"linestyle": "none", "marker": "o", "markersize": 5}
    for row, scale in enumerate(scales):
        axes.plot([scale.value, scale.gradient], [row, row], color="#CCCCCC", linewidth=1)
    axes.plot([s.value for s in scales], rows, color=VALUE, **dots)
    axes.plot([s.gradient for s in scales], rows, color=GRADIENT, **dots)
    axes.set_xscale("log", base=2)
    axes.set_yticks(rows, [scale.name for scale in scales], fontsize=7)
    axes.set_xlabel("RMS of the tensor (blue) and of its gradient (orange)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _draw_range(axes: Axes, name: str, colour: str, *, y: float) -> None:
    """A format's range as a bar at height `y`, and its limits down the panel."""
    from fp8.formats.format import get_format

    format = get_format(name)
    bar = {"color": colour, "linewidth": 9, "solid_capstyle": "butt"}
    axes.plot([format.min_subnormal, format.min_normal], [y, y], alpha=0.2, **bar)
    axes.plot([format.min_normal, format.max], [y, y], alpha=0.55, **bar)
    for value, style in (
        (format.min_subnormal, ":"),
        (format.min_normal, "--"),
        (format.max, "-"),
    ):
        axes.axvline(value, color=colour, linestyle=style, linewidth=0.8, alpha=0.6, zorder=0)
    middle = math.sqrt(format.min_normal * format.max)
    axes.text(middle, y, name, ha="center", va="center", fontsize=8)


def _rms(tensor: Tensor | None) -> float:
    return math.nan if tensor is None else tensor.detach().float().square().mean().sqrt().item()
