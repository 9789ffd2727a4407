"""Statistics of casts, for `fp8.stats`, for the watch of converted layers, and for a check of the
first pass without scales.

The products of a recorded pass get a name, which their casts report with. A `CastLossCheck`
observes the 1st, 2nd, 4th, 8th, ... product of each weight, and products without one after it.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
import weakref
from collections import Counter, deque
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from ..common.compiler import compiled_as, eager_only
from ..formats.format import Format
from ..frame import FRAMES
from ..recipes.scaling import largest_magnitude
from ..torch_internals.pipelining import in_shape_inference
from ..torch_internals.running_calls import recomputes
from ..warnings import RecipeWarning, warn_once

if TYPE_CHECKING:
    from ..recipes.recipe import Recipe

aten = torch.ops.aten

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


OPERANDS = (
    "input",
    "weight",
    "grad",
    "input again",
    "weight again",
    "grad again",
)
"""The casts of a product, in the rows of its statistics. "again": the second cast of an operand."""


STATISTICS = (
    "elements",
    "scale",
    "square",
    "largest",
    "zero",
    "saturated",
    "nonfinite",
    "noise",
)
"""The entries of `statistics`. elements: the number of nonzero ones in the sample, Inf and NaN
included. scale: in force
before the pass; NaN if tiles have their own. square: the mean square. largest: the largest
magnitude, Inf or NaN if the operand has one. zero: the share of the nonzero elements that become
zero. saturated, nonfinite: shares of all. noise: the mean square of the errors."""

SAMPLE = 1 << 14
"""The number of elements that eager code looks at."""


class Observed(NamedTuple):
    """An operand before and after its cast.

    Attributes:
        x, y: before, and after; of one shape.
        scale: of each element, or of all; None for 1.
        format: the format of the cast.
        before: the static scale until this pass, which may set it anew; None for ``scale``.
    """

    x: Tensor
    y: Tensor
    scale: Tensor | None
    format: Format
    before: Tensor | None = None


def stride(x: Tensor, sample: int) -> int:
    """The distance of about ``sample`` evenly spaced elements; odd, to reach all columns."""
    return -(-x.numel() // sample) | 1


# In a graph, which looks at all elements, float64 has half of the lanes: a pass that looks took
# 1.57 times as long as one that does not, and takes 1.11 times as long (benchmarks.steps).
@compiled_as(lambda x: x if x.dtype == torch.float64 else x.float())
def wide(x: Tensor) -> Tensor:
    """``x`` in float64, or float32 on devices without it, and in graphs unless it is float64."""
    if x.device.type == "mps":
        return x.float()
    return x.double()


def sampled(x: Tensor, step: int) -> Tensor:
    """Every ``step``-th element, `wide`; 0-dim if ``x`` is, as the scale of all elements."""
    x = x.detach()
    if x.ndim == 0:
        return wide(x)
    return wide(x.flatten()[::step])


def _samples(cast: Observed, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Every ``step``-th element before and after the cast, 0 where one of both is not finite, and
    where both are."""
    xs, ys = sampled(cast.x.flatten(), step), sampled(cast.y.flatten(), step)
    # A NaN E8M0 scale makes its whole tile NaN.
    finite = xs.isfinite() & ys.isfinite()
    return torch.where(finite, xs, 0.0), torch.where(finite, ys, 0.0), finite


@compiled_as(lambda x: 1)
def _step(x: Tensor) -> int:
    return stride(x, SAMPLE)


def statistics(cast: Observed) -> Tensor:
    """`STATISTICS` of a cast, float32. In eager code shares and squares are those of a sample; in
    a graph, where they fuse with the cast and sizes may be dynamic, of all elements."""
    step = _step(cast.x)
    largest = wide(largest_magnitude(cast.x.detach()))
    xs, ys, finite = _samples(cast, step)
    scale = cast.scale if cast.before is None else cast.before
    shown, unit = torch.full_like(largest, torch.nan), torch.ones_like(xs)
    if scale is None or scale.ndim == 0:
        shown = torch.ones_like(largest) if scale is None else wide(scale.detach())
        unit = shown
    elif cast.before is None:
        unit = sampled(scale.expand_as(cast.x).flatten(), step)
    smallest, most = cast.format.min_subnormal / 2, cast.format.max
    magnitude, nonzero = xs.abs(), xs != 0
    lost = (ys == 0) & nonzero
    if cast.before is not None:  # what passes since the last look have lost
        lost = (magnitude <= unit * smallest) & nonzero
    used = wide(nonzero | ~finite).sum()
    parts = (
        used,
        shown,
        xs.square().mean(),
        largest,
        wide(lost).sum() / used.clamp(min=1),
        wide(magnitude > unit * most).mean(),
        wide(~finite).mean(),
        (xs - ys).square().mean(),
    )
    return torch.stack(parts).float()


class Look(NamedTuple):
    """Where the casts of a product write their statistics.

    Attributes:
        table: of the product.
        is_spot: whether casts write only if a few elements are out of the range of the format.
        in_graph: whether a graph is traced, which writes the largest of these elements.
    """

    table: Tensor
    is_spot: bool
    in_graph: bool


class Row(NamedTuple):
    """A row of the statistics of a product. before: the static scale before the pass, 0 if it was
    not set."""

    look: Look
    operand: str
    before: Tensor | None = None


def _operand(row: Row) -> str:
    """The operand in `OPERANDS`."""
    return row.operand.replace("other", "weight")


def note(row: Row, cast: Observed) -> None:
    """Writes the statistics of a cast."""
    operand = _operand(row)
    before = row.before
    if before is not None and cast.scale is not None:
        before = torch.where(before > 0, before, cast.scale)
    values = statistics(cast._replace(before=before))
    if not _is_transformed(values):
        _tell(row.look.table, operand, values)
        row.look.table[OPERANDS.index(operand)][: len(STATISTICS)].copy_(values)


SPOTS = 1 << 10
"""About the number of elements that are checked in each pass."""
MARGIN = 2.0
"""The largest element of a healthy pass may exceed the range of a scale that was measured in an
earlier one, as under recipe "delayed"."""


def _steps(shape: torch.Size) -> list[int]:
    """The steps of the grid of `spots`, also for sizes that a graph does not know. They are odd, to
    reach the columns of all heads and groups, whose sizes are powers of two."""
    count = 2 * math.ceil(SPOTS ** (1 / max(len(shape), 1)))
    return [2 * (size // count) + 1 for size in shape]


def spots(x: Tensor) -> Tensor:
    """Some elements of ``x``, on a grid; a view."""
    return x[tuple(slice(None, None, step) for step in _steps(x.shape))]


@cache
def _grid(
    shape: torch.Size, stride: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape and the strides of `spots`."""
    few = spots(torch.empty_strided(shape, stride, device="meta"))
    return few.shape, few.stride()


def write_spot(row: Row, x: Tensor, scale: Tensor | None) -> None:
    """Writes the largest of the spots of ``x``, not empty, in units of the scale; in a graph."""
    largest = spots(x.detach()).abs().amax().float()
    if scale is not None:
        largest = largest / scale
    spot = row.look.table[OPERANDS.index(_operand(row))][len(STATISTICS)]
    # NaN stands for what is not written.
    spot.copy_(torch.fmax(spot, largest.nan_to_num(nan=math.inf, posinf=math.inf)))


def passes(x: Tensor, scale: Tensor | None, range: tuple[float, float]) -> bool:
    """Whether the spots of ``x``, not empty, in units of the scale, are in a range of
    `range_of_spots`; in eager code, each training pass of a cast with a scale of an earlier pass.
    Reading them would wait for another device than a CPU."""
    if x.device.type != "cpu":
        return True
    try:
        grid = _grid(x.shape, x.stride())
        # A third of the time of slices.
        largest = float(x.detach().as_strided(*grid, x.storage_offset()).abs().amax())
        if scale is not None:
            largest /= float(scale)
    except RuntimeError:  # under vmap
        return True
    return range[0] <= largest <= range[1] or largest == 0


@cache
def range_of_spots(format: Format) -> tuple[float, float]:
    """What the largest of the spots is in between, in units of the scale, unless it is 0: below,
    all of them become zero; above, or for a NaN, there is more to be seen."""
    return format.min_normal, MARGIN * format.max


@eager_only(False)
def _is_transformed(values: Tensor) -> bool:
    """Whether a transform of torch.func computes many values of what a layer has one of."""
    return torch.func.debug_unwrap(values) is not values


@eager_only()
def _tell(table: Tensor, operand: str, values: Tensor) -> None:
    """Warns at once of what an eager pass on a CPU loses."""
    tell, product = table.fp8_seen_by  # type: ignore[attr-defined]
    layer = tell()
    if values.device.type == "cpu" and layer is not None:
        layer(product, operand, values.tolist())


LOST = 0.1
"""The lost share of an operand, beyond that of a standard normal one, above which it is named.
Modules of unit_scaling lose up to 0.06, of the gradients of queries and keys in e5m2."""
LEAST = 1024
"""The number of nonzero elements below which shares are not judged."""


def decibels(signal: float, noise: float) -> float:
    """The ratio of two second moments in dB; Inf without noise, -Inf without signal."""
    if noise == 0:
        return math.inf
    if signal / noise > 0:
        return 10 * math.log10(signal / noise)
    return -math.inf


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
        if operand in ("input", "weight", "other") and recomputes():
            return
        x, scale, format = cast.x, cast.scale, cast.format
        step = stride(x, self.sample)
        # The usual case costs one check.
        clean = bool(largest_magnitude(x.detach()).isfinite())
        xs, ys, _ = _samples(cast, step)
        unit: Any = 1.0 if scale is None else sampled(scale, step)
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
        with self.lock:
            self.sums[key] = self.sums[key] + total if key in self.sums else total


class Recording(NamedTuple):
    """A recorder in a pass. unnamed: kind of a product -> the number of those without a weight."""

    recorder: CastRecorder
    unnamed: Counter[str]


def _path_of(weight: Tensor | None, model: nn.Module) -> str | None:
    return next((path for path, p in model.named_parameters() if p is weight), None)


class CastLossCheck:
    """Warns once about what casts without a scale lose, in products outside of converted layers."""

    def __init__(self, recipe: str) -> None:
        self.recipe = recipe
        self.unnamed: Counter[str] = Counter()
        self.worst, self.what = 0.0, ""
        self.warned = False
        self.token = str(next(_TOKENS))
        _RECORDERS[self.token] = self

    def count(self, layer: str, operand: str, cast: Observed) -> None:
        x, y, format = cast.x, cast.y, cast.format
        if x.is_meta or self.warned or cast.scale is not None:
            return
        step = stride(x, SAMPLE)
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


Label = str | Row
"""Where a cast is reported: "" for nowhere, the name of a recorder and an operand, or a row."""


def place(name: str, look: Look | None, operand: str) -> Label:
    """Where the cast of an operand is reported. name: of its product, for a recorder. look: its
    statistics, if it is looked at."""
    if name:
        return f"{name}|{operand}"
    if look is None:
        return ""
    return Row(look, operand)


def observe(label: Label, cast: Observed) -> None:
    """Reports a cast."""
    if not cast.x.numel():
        return
    if isinstance(label, Row):
        note(label, cast)
    elif label.split("|")[0] in _RECORDERS:
        x, y, scale = cast.x.detach(), cast.y.detach(), cast.scale
        scale = None if scale is None else scale.detach()
        _Report.apply(label, cast.format, x, y, scale)


class _Report(Function):
    """Under `torch.vmap` it reports once, with the operands of all samples."""

    @staticmethod
    def forward(
        label: str,
        format: Format,
        x: Tensor,
        y: Tensor,
        scale: Tensor | None,
    ) -> Tensor:
        token, layer, operand = label.split("|")
        _RECORDERS[token].count(layer, operand, Observed(x, y, scale, format))
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

        x, y, scale = map(of_all, inputs[2:], in_dims[2:])
        if scale is not None:  # of each sample, or of each element
            scale = scale.reshape(
                scale.shape + (1,) * (x.dim() - scale.dim())
            ).expand_as(x)
        return _Report.apply(*inputs[:2], x, y, scale), None
