"""Statistics of casts, for `fp8.stats` and for a check of the first pass without scales.

A recorder is open while a sampled pass runs. The products of that pass get a name, which is stored
as a string in the specs of their casts, including those of the backward pass. A cast whose spec has
a name reports to the recorder.

A `Look` is a recorder for recipes that cast without scales. It observes the first product of each
weight that is recorded for a backward pass, and the weightless products that follow it.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import weakref
from collections import Counter, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ..common.compiler import eager_only
from ..common.pitfalls import RecipeWarning, ScaleWarning, warn_once
from ..common.threads import in_shape_inference
from ..formats.format import Format, get_format

if TYPE_CHECKING:
    from ..recipes.recipe import Recipe

COUNTS = (
    *("elements", "sampled", "zero", "subnormal", "saturated", "nonfinite", "signal", "noise"),
    *("blocks", "flushed_blocks", "clipped_blocks", "casts", "unit"),
)
"""What is summed for an operand. Shares are of the sampled elements; nonfinite is counted over all.
signal and noise: squares of the elements and of their errors.
Of blocks with a scale of two levels (NVFP4): how many are not all zeros; how many have a scale
that rounds to zero in e4m3, or one rounded so far down that their largest value is beyond the
format; the casts, and the sum of the base-2 logarithms of their units, the level of the tensor."""


class _Open(threading.local):
    """The recorders whose pass runs in this thread, innermost last, each with a counter of unnamed
    products by kind; and the `Look` at products without a weight."""

    def __init__(self) -> None:
        self.recorders: list[tuple[CastRecorder, Counter[str]]] = []
        self.look: Look | None = None


OPEN = _Open()

_TOKENS = itertools.count()
_RECORDERS: weakref.WeakValueDictionary[str, CastRecorder | Look] = weakref.WeakValueDictionary()
"""Token -> recorder. The backward pass may run after the recorded pass is closed."""


class Blocks(NamedTuple):
    """The blocks of a cast with scales of two levels: the largest magnitude and the scale of each,
    and the unit of the scales, that of the tensor."""

    amax: Tensor
    scale: Tensor
    unit: Tensor

    def counts(self, format: Format) -> list[Tensor]:
        """The last five of `COUNTS`."""
        amax, scale, unit = (t.detach().double() for t in self)
        exact = amax / format.max / unit
        used = (amax > 0) & amax.isfinite()
        smallest = get_format("e4m3").min_subnormal
        return [
            used.sum(),
            (used & (exact <= smallest / 2)).sum(),
            (used & (amax > scale * format.max * (1 + 2.0**-20))).sum(),
            torch.ones_like(unit).sum(),
            unit.log2().sum(),
        ]


class Observed(NamedTuple):
    """An operand before and after its cast. scale: of each element, or of all. static: whether
    `fp8.calibrate` set it. blocks: of a cast with scales of two levels."""

    x: Tensor
    y: Tensor
    scale: Tensor | None
    format: Format
    static: bool = False
    blocks: Blocks | None = None


def stride(x: Tensor, sample: int) -> int:
    """The distance of about ``sample`` evenly spaced elements; odd, to reach all columns."""
    return -(-x.numel() // sample) | 1


class CastRecorder:
    """Sums of COUNTS for each operand: (layer, operand, format) -> float64."""

    def __init__(self, model: nn.Module, sample: int) -> None:
        self.sample = sample
        self.sums: dict[tuple[str, str, str], Tensor] = {}
        self.lock = threading.Lock()  # protects sums
        self.token = str(next(_TOKENS))
        _RECORDERS[self.token] = self
        self._model = model

    def layers(self) -> dict[int, str]:
        """id of a parameter -> the name of the module that owns it; its own name, if it is one of
        several stacks of weights."""
        found: dict[int, str] = {}
        for name, parameter in self._model.named_parameters():
            module, _, own = name.rpartition(".")
            stack = parameter.ndim == 3 and own != "weight"
            found.setdefault(id(parameter), name if stack else module or "(model)")
        return found

    def layer_of(self, weight: Tensor | None) -> str | None:
        """The name in `layers` of a weight or a view of it."""
        if weight is None:
            return None
        found = self.layers()
        return found.get(id(weight)) or found.get(id(weight._base))

    def count(self, layer: str, operand: str, seen: Observed) -> None:
        """Adds the statistics of a cast operand."""
        x, y, scale, format, static, blocks = seen
        step = stride(x, self.sample)
        xs, ys = (t.detach().flatten()[::step].double() for t in (x, y))
        low, high = torch.ops.aten.aminmax.default(x.detach())
        clean = bool((low.isfinite() & high.isfinite()).item())  # fast check; the usual case
        finite = xs.isfinite() & ys.isfinite()  # a NaN E8M0 scale makes its whole tile NaN
        xs, ys = torch.where(finite, xs, 0.0), torch.where(finite, ys, 0.0)
        unit: Any = 1.0 if scale is None else _at(scale, step)
        counts = (
            torch.full((), x.numel(), device=x.device),
            torch.full((), xs.numel(), device=x.device),
            ((ys == 0) & (xs != 0)).sum(),
            ((ys != 0) & (ys.abs() < unit * format.min_normal)).sum(),
            (xs.abs() > unit * format.max).sum(),
            xs.new_zeros(()) if clean else x.numel() - x.isfinite().sum(),
            xs.square().sum(),
            (xs - ys).square().sum(),
            *(blocks.counts(format) if blocks else [xs.new_zeros(())] * 5),
        )
        key = (layer, operand, str(format))
        total = torch.stack([count.double() for count in counts])
        if static:
            _check_scale(layer, operand, xs / unit, self._model)
        with self.lock:
            self.sums[key] = self.sums[key] + total if key in self.sums else total


def _at(scale: Tensor, step: int) -> Tensor:
    """The scale, float64, of every ``step``-th element; 0-dim if all have the same."""
    return (scale if scale.ndim == 0 else scale.flatten()[::step]).double()


def _check_scale(layer: str, operand: str, units: Tensor, about: Any) -> None:
    """Warns, once for ``about``, if a static scale factor is far from the RMS of its operand.
    units: elements divided by it. Does nothing for values that cannot be read (fake tensors)."""
    try:
        ratio = math.sqrt(float(units.square().mean()))
    except RuntimeError:
        return
    if 0 < ratio < math.inf and not 1 / DRIFT <= ratio <= DRIFT:
        warn_once(ScaleWarning, _DRIFTED.format(operand, layer, ratio), about, "static")


DRIFT = 64.0
"""The factor, up or down, between the RMS of an operand and its static scale beyond which
`fp8.stats` and the first backward pass warn: 6 of the 18 octaves of e4m3, of which 8 are above the
RMS that calibration sets.
"""
_DRIFTED = (
    "the RMS of the {} of {} is {:.2g} times the scale that fp8.calibrate has set, beyond "
    "[2**-6, 2**6]: call fp8.calibrate again, with the loss of training, the factor of a "
    "GradScaler included"
)

LOST = 0.1
"""The lost share of an operand, beyond that of a standard normal one (e4m3: 0.0008 become zero,
e5m2: 0.000006), above which a `Look` warns. Half of the smallest number of e4m3 is 2**-10, of e5m2
2**-17: a normal operand loses this share if its RMS is below 2**-7 or 2**-14. In unit-scaled models
a GELU or the product of two standard normals loses less than 0.01 in e4m3. The gradients of queries
and keys, the smallest at initialization, lose up to 0.06 in e5m2.
"""
LEAST = 1024
"""The minimum number of nonzero elements for a share."""
_SAMPLE = 1 << 14


class Look:
    """Warns once about values lost by operands that are cast without a scale, when their first
    gradient is cast, and about an operand far from its static scale. recipe: its name."""

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe
        self.unnamed: Counter[str] = Counter()
        self.worst, self.what = 0.0, ""
        self.warned = False
        self.token = str(next(_TOKENS))
        _RECORDERS[self.token] = self
        _LATEST.append(self)

    def count(self, layer: str, operand: str, seen: Observed) -> None:
        """As `CastRecorder.count`. Does nothing for values that cannot be read (fake tensors)."""
        x, y, scale, format, static, _ = seen
        if x.is_meta:
            return
        if static and scale is not None:
            step = stride(x, _SAMPLE)
            xs = x.detach().flatten()[::step].double()
            _check_scale(layer, operand, xs / _at(scale, step), self)
        if self.warned or scale is not None:
            return
        try:
            used, zero, saturated = _lost(x, y, format)
        except RuntimeError:
            return
        if used >= LEAST:
            usual = math.erf(format.min_subnormal / 2 / math.sqrt(2))
            for share, beyond, what in (
                (zero / used, zero / used - usual, "become zero"),
                (saturated / used, saturated / used, "saturate"),
            ):
                which = operand.removesuffix(" again")
                text = f"{share:.0%} of the {which} of {layer} {what} in {format}"
                self.worst, self.what = max((self.worst, self.what), (beyond, text))
        if operand.startswith("grad") and self.worst > LOST:
            self.warned = True
            warn_once(RecipeWarning, _FLUSHED.format(self.what, self.recipe), self)


_FLUSHED = (
    "{}, which recipe {!r} casts without a scale. It is for unit-scaled models and their losses; "
    'recipe "tensor" has a scale for each tensor, and fp8.stats counts what is lost of each'
)

_LATEST: deque[Look] = deque(maxlen=64)
"""Keeps the latest ones alive: the backward pass runs after the block."""
_OF_MODELS: weakref.WeakKeyDictionary[nn.Module, Look | None] = weakref.WeakKeyDictionary()
"""Models whose layers have names -> the `Look` at them."""
_PLACES: set[tuple[str, int, str]] = set()
"""(file, line, recipe) of the blocks that were already observed for products without a weight."""
_LOOKED = "fp8_looked"
"""The parameter attribute that holds the recipes under which its product was observed."""
_OWN = str(Path(__file__).parents[1])


def _lost(x: Tensor, y: Tensor, format: Format) -> list[float]:
    """The numbers of sampled elements that are finite and nonzero; of these, become zero;
    saturate."""
    step = stride(x, _SAMPLE)
    xs, ys = (t.detach().flatten()[::step].float() for t in (x, y))
    used = xs.isfinite() & (xs != 0)
    counts = (used, used & (ys == 0), used & (xs.abs() > format.max))
    return torch.stack([count.sum() for count in counts]).tolist()


def forget_looks(model: nn.Module) -> None:
    """Registers ``model``, so that warnings use its layer names, and observes its layers again."""
    _OF_MODELS[model] = None
    for parameter in model.parameters():
        vars(parameter).pop(_LOOKED, None)


def look_here(recipe: Recipe | None) -> Look | None:
    """The `Look` at products without a weight for a block that is being opened. None if that line
    of the caller's code was already observed, or if the recipe's scales follow the operands."""
    if recipe is None or not recipe.fixed:
        return None
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    place = (frame.f_code.co_filename, frame.f_lineno, recipe.name)
    if place in _PLACES or not torch.is_grad_enabled() or in_shape_inference():
        return None
    _PLACES.add(place)
    return Look(recipe.name)


def _look_at(weight: Tensor | None, recipe: str) -> tuple[Look | None, str]:
    """The `Look` at the product of a weight, or None, and the name of the layer or ""."""
    if not isinstance(weight, nn.Parameter):
        return OPEN.look, ""
    seen = vars(weight).get(_LOOKED, ())
    if recipe in seen or not torch.is_grad_enabled() or in_shape_inference():
        OPEN.look = None
        return None, ""
    setattr(weight, _LOOKED, (*seen, recipe))
    for model in list(_OF_MODELS):
        for name, parameter in model.named_parameters():
            if parameter is weight:
                look = _OF_MODELS[model] = _OF_MODELS[model] or Look(recipe)
                OPEN.look = look
                return look, repr(name.rpartition(".")[0] or type(model).__name__)
    OPEN.look = OPEN.look or Look(recipe)
    return OPEN.look, ""


def is_sampled(name: str) -> bool:
    """Whether a name belongs to a product in a pass of `fp8.stats`."""
    return bool(name and OPEN.recorders)


def product_name(kind: str, weight: Tensor | None = None, recipe: Recipe | None = None) -> str:
    """A name for the casts of a product; "" if nothing records them."""
    if OPEN.recorders:
        recorder, unnamed = OPEN.recorders[-1]
        layer = recorder.layer_of(weight)
        if layer is None:
            unnamed[kind] += 1
            layer = f"{kind} {unnamed[kind]}"
        return f"{recorder.token}|{layer}"
    if recipe is None or not recipe.fixed:
        return ""
    return _counted_name(kind, weight, recipe)


@eager_only("")
def _counted_name(kind: str, weight: Tensor | None, recipe: Recipe) -> str:
    look, layer = _look_at(weight, recipe.name)
    if look is None or look.warned:
        return ""
    if not layer:
        look.unnamed[kind] += 1
        layer = f"{kind} {look.unnamed[kind]}"
        layer += "" if weight is None else f" (weight {tuple(weight.shape)})"
    return f"{look.token}|{layer}"


def observe(label: str, seen: Observed) -> None:
    """Reports a cast to its recorder. Inf and NaN are counted in all elements of the operand, the
    rest in a sample of evenly spaced ones."""
    x, y, scale, format, static, blocks = seen
    if label.split("|")[0] in _RECORDERS and x.numel():
        parts = [None if t is None else t.detach() for t in (x, y, scale, *(blocks or ()))]
        _Seen.apply(label, format, static, *parts)


class _Seen(Function):
    """Reports a cast to its recorder: under `torch.vmap` once, with the operands of all samples."""

    @staticmethod
    def forward(
        label: str, format: Format, static: bool, x: Tensor, y: Tensor, *rest: Tensor | None
    ) -> Tensor:
        token, layer, operand = label.split("|")
        scale, *blocks = rest
        two_levels = Blocks(*blocks) if blocks else None  # type: ignore[arg-type]
        _RECORDERS[token].count(layer, operand, Observed(x, y, scale, format, static, two_levels))
        return x.new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Tensor, None]:
        def of_all(t: Tensor, dim: int | None) -> Tensor:
            return t.expand(info.batch_size, *t.shape) if dim is None else t.movedim(dim, 0)

        given = zip(inputs[3:], in_dims[3:], strict=True)
        found: list[Any] = [t if t is None else of_all(t, dim) for t, dim in given]
        x, y, scale, *blocks = found
        if scale is not None:
            scale = _beside(scale, x).expand_as(x)
        if blocks:
            blocks[2] = _beside(blocks[2], blocks[0])
        return _Seen.apply(*inputs[:3], x, y, scale, *blocks), None


def _beside(scale: Tensor, x: Tensor) -> Tensor:
    """The scales of samples, (samples,) or as ``x``, with as many dimensions as ``x``."""
    return scale.reshape(scale.shape + (1,) * (x.dim() - scale.dim()))
