"""Statistics of casts, for `fp8.stats` and for a check of the first pass without scales.

The products of a recorded pass get a name, which their lowered casts report with. A `CastLossCheck`
observes the 1st, 2nd, 4th, 8th, ... product of each weight, and products without one after it.
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
from ..formats.format import Format
from ..frame import FRAMES
from ..torch_internals.pipelining import in_shape_inference
from ..torch_internals.running_calls import recomputes
from ..warnings import RecipeWarning, ScaleWarning, warn_once

if TYPE_CHECKING:
    from ..recipes.recipe import Recipe

COUNTS = (
    "elements",
    "sampled",
    "zero",
    "subnormal",
    "saturated",
    "nonfinite",
    "signal",
    "noise",
)
"""What is summed for an operand. Shares are of the sampled elements; nonfinite is counted over all.
signal and noise: squares of the elements and of their errors."""


class _Latest(threading.local):
    """The check of the last product of this thread that was observed since a block was opened."""

    check: CastLossCheck | None = None


LATEST = _Latest()

_TOKENS = itertools.count()
_RECORDERS: weakref.WeakValueDictionary[str, CastRecorder | CastLossCheck] = (
    weakref.WeakValueDictionary()
)
"""Token -> recorder. The backward pass may run after the recorded pass is closed."""


class Observed(NamedTuple):
    """An operand before and after its cast. scale: of each element, or of all. static: measured."""

    x: Tensor
    y: Tensor
    scale: Tensor | None
    format: Format
    static: bool = False


def stride(x: Tensor, sample: int) -> int:
    """The distance of about ``sample`` evenly spaced elements; odd, to reach all columns."""
    return -(-x.numel() // sample) | 1


def _sampled(x: Tensor, step: int) -> Tensor:
    """Every ``step``-th element, float64; 0-dim if ``x`` is, as the scale of all elements."""
    return (x.detach() if x.ndim == 0 else x.detach().flatten()[::step]).double()


class CastRecorder:
    """Sums of COUNTS for each operand: (layer, operand, format) -> float64."""

    def __init__(self, model: nn.Module, sample: int) -> None:
        self.sample = sample
        self.sums: dict[tuple[str, str, str], Tensor] = {}
        self.lock = threading.Lock()  # protects sums
        self.token = str(next(_TOKENS))
        _RECORDERS[self.token] = self
        self._model = model

    def layer_of(self, weight: Tensor | None) -> str | None:
        """The name of the module of a weight or a view; of one of several stacks, its own."""
        owner = weight
        if weight is not None and weight._base is not None:
            owner = weight._base
        if (path := _path_of(owner, self._model)) is None:
            return None
        module, _, attribute = path.rpartition(".")
        stack = owner is not None and owner.ndim == 3 and attribute != "weight"
        if stack:
            return path
        return module or "(model)"

    def count(self, layer: str, operand: str, cast: Observed) -> None:
        if operand in ("input", "weight") and recomputes():
            return
        x, y, scale, format, static = cast
        step = stride(x, self.sample)
        low, high = torch.ops.aten.aminmax.default(x.detach())
        # The usual case costs one check.
        clean = bool((low.isfinite() & high.isfinite()).item())
        xs, ys = (_sampled(t.flatten(), step) for t in (x, y))
        # A NaN E8M0 scale makes its whole tile NaN.
        finite = xs.isfinite() & ys.isfinite()
        xs, ys = torch.where(finite, xs, 0.0), torch.where(finite, ys, 0.0)
        unit: Any = 1.0 if scale is None else _sampled(scale, step)
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
        if static:
            _check_scale(layer, operand, xs / unit, format, self._model)
        with self.lock:
            self.sums[key] = self.sums[key] + total if key in self.sums else total


class Recording(NamedTuple):
    """A recorder in a pass. unnamed: kind of a product -> the number of those without a weight."""

    recorder: CastRecorder
    unnamed: Counter[str]


def _path_of(weight: Tensor | None, model: nn.Module) -> str | None:
    return next((path for path, p in model.named_parameters() if p is weight), None)


def _check_scale(
    layer: str, operand: str, units: Tensor, format: Format, about: Any
) -> None:
    """Warns, once for ``about``, of a static scale far from the RMS of its operand, ``units``."""
    try:
        ratio = math.sqrt(float(units.square().mean()))
    except RuntimeError:
        return
    low, high = min(format.min_normal, 1 / DRIFT), max(format.max / PEAK, DRIFT)
    if 0 < ratio < math.inf and not low <= ratio <= high:
        text = _DRIFTED.format(operand, layer, ratio, low, high)
        warn_once(ScaleWarning, text, about, "static")


PEAK = 7.0
"""The RMS of the largest elements, above which an operand saturates. At the lower end of the range
of RMS, the smallest normal number, subnormal numbers cost 2.5 dB of the SQNR."""
DRIFT = 64.0
"""How far the RMS may be from the scale in any format; the range of e4m3."""
_DRIFTED = (
    "the RMS of the {} of {} is {:.2g} times its static scale, which fp8.calibrate or the first "
    "step has set, outside of [{:.2g}, {:.2g}]: call fp8.calibrate again, with the loss of "
    "training, the factor of a GradScaler included"
)

LOST = 0.1
"""The lost share of an operand, beyond that of a standard normal one, above which a `CastLossCheck`
warns: of a normal operand with an RMS below 2**-7 (e4m3) or 2**-14 (e5m2). Modules of unit_scaling
lose up to 0.06, of the gradients of queries and keys in e5m2."""
LEAST = 1024
"""The minimum number of nonzero elements for a share."""
_SAMPLE = 1 << 14


class CastLossCheck:
    """Warns once about what casts without a scale lose, and about drift from a static scale."""

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe
        self.unnamed: Counter[str] = Counter()
        self.worst, self.what = 0.0, ""
        self.warned = False
        self.token = str(next(_TOKENS))
        _RECORDERS[self.token] = self

    def count(self, layer: str, operand: str, cast: Observed) -> None:
        x, y, scale, format, static = cast
        if x.is_meta:
            return
        step = stride(x, _SAMPLE)
        if static and scale is not None:
            _check_scale(
                layer, operand, _sampled(x, step) / _sampled(scale, step), format, self
            )
        if self.warned or scale is not None:
            return
        xs, ys = (t.detach().flatten()[::step].float() for t in (x, y))
        used = xs.isfinite() & (xs != 0)
        lost = (used, used & (ys == 0), used & (xs.abs() > format.max))
        try:
            elements, zero, saturated = torch.stack(
                [mask.sum() for mask in lost]
            ).tolist()
        except RuntimeError:
            return
        if elements >= LEAST:
            of_normal = math.erf(format.min_subnormal / 2 / math.sqrt(2))
            name = operand.removesuffix(" again")
            kinds = ((zero, of_normal, "become zero"), (saturated, 0.0, "saturate"))
            for count, usual, what in kinds:
                share = count / elements
                text = f"{share:.0%} of the {name} of {layer} {what} in {format}"
                self.worst, self.what = max(
                    (self.worst, self.what), (share - usual, text)
                )
        if operand.startswith("grad") and self.worst > LOST:
            self.warned = True
            warn_once(RecipeWarning, _FLUSHED.format(self.what, self.recipe), self)


_FLUSHED = (
    "{}, which recipe {!r} casts without a scale. It is for modules and losses of unit_scaling; "
    'recipe "tensor" has a scale for each tensor, and fp8.stats counts what is lost of each'
)

_ALIVE: deque[CastLossCheck] = deque(maxlen=64)
"""Keeps the latest ones alive: the backward pass runs after the block."""
_CHECK_OF: weakref.WeakKeyDictionary[nn.Module, CastLossCheck | None] = (
    weakref.WeakKeyDictionary()
)
"""Models whose layers have names -> the check of these."""
_CHECKED = "fp8_checked"
"""The parameter attribute that counts its products: recipe -> number."""
_CHECKED_LINES: set[tuple[str, int, str]] = set()
"""(file, line, recipe) of the calls of products without a weight that were observed."""
_PACKAGE = str(Path(__file__).parents[1])


def forget_checks(model: nn.Module) -> None:
    """Registers ``model``, so that warnings use its layer names, and observes its layers again."""
    _CHECK_OF[model] = None
    for parameter in model.parameters():
        vars(parameter).pop(_CHECKED, None)


def _check_without(recipe: str) -> CastLossCheck | None:
    """Returns the check of the previous product, or a new one if this line of code has not been
    observed."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    line = (frame.f_code.co_filename, frame.f_lineno, recipe)
    if LATEST.check is None and line not in _CHECKED_LINES:
        LATEST.check = _kept(CastLossCheck(recipe))
    _CHECKED_LINES.add(line)
    return LATEST.check


def _check_of(weight: nn.Parameter, recipe: str) -> tuple[CastLossCheck | None, str]:
    """The check of the product of a weight, or None, and the name of the layer or ""."""
    products = vars(weight).setdefault(_CHECKED, {})
    products[recipe] = number = products.get(recipe, 0) + 1
    if number & (
        number - 1
    ):  # scales that no step changes are looked at again, ever more rarely
        return None, ""
    for model in list(_CHECK_OF):
        if (path := _path_of(weight, model)) is not None:
            check = _CHECK_OF[model] = _CHECK_OF[model] or CastLossCheck(recipe)
            return check, repr(path.rpartition(".")[0] or type(model).__name__)
    if number > 1:
        return None, ""
    last = LATEST.check
    goes_on = last is not None and last.recipe == recipe and not last.warned
    return (last if goes_on else _kept(CastLossCheck(recipe))), ""


def _kept(check: CastLossCheck) -> CastLossCheck:
    """``check``, which no model in _CHECK_OF keeps alive."""
    _ALIVE.append(check)
    return check


def is_sampled(name: str) -> bool:
    """Whether a name belongs to a product in a pass of `fp8.stats`."""
    return bool(name and FRAMES.items[-1].recording)


def _numbered(unnamed: Counter[str], kind: str) -> str:
    unnamed[kind] += 1
    return f"{kind} {unnamed[kind]}"


def product_name(
    kind: str, weight: Tensor | None = None, recipe: Recipe | None = None
) -> str:
    """A name for the casts of a product; "" if nothing records them."""
    recording: Recording | None = FRAMES.items[-1].recording
    if recording is not None:
        recorder, unnamed = recording
        return (
            f"{recorder.token}|{recorder.layer_of(weight) or _numbered(unnamed, kind)}"
        )
    if recipe is None or not recipe.fixed:
        return ""
    return _checked_name(kind, weight, recipe)


@eager_only("")
def _checked_name(kind: str, weight: Tensor | None, recipe: Recipe) -> str:
    if not torch.is_grad_enabled() or in_shape_inference():
        return ""
    if isinstance(weight, nn.Parameter):
        check, layer = _check_of(weight, recipe.name)
        LATEST.check = check
    else:
        check, layer = _check_without(recipe.name), ""
    if check is None or check.warned:
        return ""
    if not layer:
        layer = _numbered(check.unnamed, kind)
        layer += "" if weight is None else f" (weight {tuple(weight.shape)})"
    return f"{check.token}|{layer}"


def observe(label: str, cast: Observed) -> None:
    """Reports a cast to its recorder."""
    x, y, scale, format, static = cast
    if label.split("|")[0] in _RECORDERS and x.numel():
        scale = None if scale is None else scale.detach()
        _Report.apply(label, format, static, x.detach(), y.detach(), scale)


class _Report(Function):
    """Under `torch.vmap` it reports once, with the operands of all samples."""

    @staticmethod
    def forward(
        label: str,
        format: Format,
        static: bool,
        x: Tensor,
        y: Tensor,
        scale: Tensor | None,
    ) -> Tensor:
        token, layer, operand = label.split("|")
        _RECORDERS[token].count(layer, operand, Observed(x, y, scale, format, static))
        return x.new_empty((0,))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: Any, *inputs: Any) -> tuple[Tensor, None]:
        def of_all(t: Any, dim: int | None) -> Any:
            if t is None or dim is None:
                if t is None:
                    return t
                return t.expand(info.batch_size, *t.shape)
            return t.movedim(dim, 0)

        x, y, scale = map(of_all, inputs[3:], in_dims[3:])
        if scale is not None:  # of each sample, or of each element
            scale = scale.reshape(
                scale.shape + (1,) * (x.dim() - scale.dim())
            ).expand_as(x)
        return _Report.apply(*inputs[:3], x, y, scale), None
