"""The watch of a converted model: looks at its casts in some passes, names what they lose, and lets
static scales be set anew.

A look is a pass in which every cast of a converted layer writes its `STATISTICS` into a tensor of
the layer, in eager code and in graphs, where `Watch.looks` selects one of two. The host reads them
when the next pass begins, on CPUs at once.

Passes are counted by the steps of an optimizer, which run in eager code also where the model is
compiled, and by eager passes without one.
"""

from __future__ import annotations

import itertools
import math
import sys
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..common.compiler import eager_only
from ..common.dtensor import mesh_of
from ..common.step import in_own_thread, parameters_of
from ..formats.format import Format, get_format
from ..recipes.history import Schedule, histories
from ..recipes.recipe import Recipe
from ..recipes.scaling import MOVED, static_rms
from ..torch_internals.decorators import has_compiler, untraced
from ..torch_internals.running_calls import recomputes
from ..warnings import PitfallWarning, RecipeWarning, ScaleWarning, warn_once
from .counts import (
    LEAST,
    LOST,
    OPERANDS,
    STATISTICS,
    Look,
    decibels,
    range_of_spots,
)

LONGEST = 128
"""The passes from one look to the next after this one. A look adds 0.1 to 0.3 of a step (a GPT
of width 128 on a CPU), all together 0.1 to 0.2 %; a wrong scale lasts no longer than this."""


LAST = sys.maxsize
"""The place of layers that have not run."""

CHECKS = 8
"""Each such pass of a graph checks spots. The kernels that read them take 5 % of the step of a
Llama block, and keep casts from being computed again in its backward pass (benchmarks.forecast)."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a cast did to its operand in one pass.

    Attributes:
        layer: the path of the layer in the model that was converted; with several products, that
            of the product.
        operand: one of `OPERANDS`.
        format: the name of the format.
        step: the pass, from 1.
        scale: in force before the pass; NaN if tiles have their own.
        rms: the root mean square of the operand.
        largest: its largest magnitude; Inf or NaN if it has one.
        zero: the share of its nonzero elements that become zero.
        saturated: the share of elements beyond the largest number of the format.
        nonfinite: the share of elements that are Inf or NaN.
        sqnr: the signal-to-quantization-noise ratio of the cast, in dB; Inf without an error.
    """

    layer: str
    operand: str
    format: str
    step: int
    scale: float
    rms: float
    largest: float
    zero: float
    saturated: float
    nonfinite: float
    sqnr: float


Listener = Callable[[list[Seen]], None]


class Watch:
    """What the converted layers of a model share: when they look. Copies go on like it.

    Attributes:
        step: the number of the pass, from 1.
        model: refers to the model, once it has been converted as a whole.
        layers: layer -> its place in the order of execution, once it has run.
        looks: whether this pass is looked at.
        measures: whether a look measures static scales again; not those of `every` alone, so that
            a record leaves a run as it is.
        every: besides, each ``every``-th pass is; 0: none.
        frozen: whether static scales that are set stay as they are.
        listeners: functions that get the rows of each look.
        checks: whether graphs check spots in this pass; eager code does so in each.
    """

    def __init__(self) -> None:
        self.every, self.frozen = 0, False
        self.listeners: list[Listener] = []
        self.layers: weakref.WeakKeyDictionary[LayerWatch, int] = (
            weakref.WeakKeyDictionary()
        )
        self._places = itertools.count()
        self.model: Callable[[], nn.Module | None] = lambda: None
        self._leader: Callable[[], object | None] | None = None
        self._stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.resume(Schedule())
        _WATCHES.add(self)
        _count_steps()

    def __reduce__(self) -> Any:
        return _watch, (self.frozen, *self.schedule)

    @property
    def schedule(self) -> Schedule:
        """When the next passes look, for `resume`. An eager pass that no optimizer has ended ends
        when the next one begins."""
        step, measures = self.step, self.measures
        if self._leader is not None:
            step += 1
            measures = is_look(step) or self._asked
        return Schedule(step, measures, self._wait, self._asks_from)

    def resume(self, schedule: Schedule) -> None:
        """Looks when the run that had this schedule would have looked."""
        self.step = schedule.step
        self._wait, self._asks_from = schedule.wait, schedule.asks_from
        self._begin(bool(schedule.measures))

    def _begin(self, measures: bool) -> None:
        """Begins the pass of number `step`."""
        self._leader, self._asked = None, False
        self.measures = self.looks = measures
        if self.every and self.step % self.every == 0:
            self.looks = True
        self.checks = self.step % CHECKS == 0 and not self.frozen

    def runs(self, layer: LayerWatch) -> None:
        """A layer runs in a pass that is looked at."""
        if self.layers[layer] == LAST:
            self.layers[layer] = next(self._places)

    @property
    def is_open(self) -> bool:
        """Whether casts have written since the last reading. Does not synchronize."""
        tables = (table for layer in list(self.layers) for _, table in layer.tables())
        return any(vars(table)["fp8_read_at"] != table._version for table in tables)

    def holds(self, parameters: Iterable[Tensor]) -> bool:
        """Whether one of the parameters is of the model; of a copy, of its layers."""
        roots = [self.model()]
        if roots == [None]:
            roots = [layer.layer() for layer in list(self.layers)]
        own = {id(p) for root in roots if root is not None for p in root.parameters()}
        return not own.isdisjoint(map(id, parameters))

    def ask(self) -> None:
        """An operand is out of the range of its scale: the next pass is a look. Each time the
        pause before the next one doubles, up to `LONGEST`: the scale may not be to blame."""
        if self.step >= self._asks_from and not self.frozen:
            self._asked = True
            self._asks_from = self.step + self._wait
            self._wait = min(2 * self._wait, LONGEST)

    def enters(self, layer: LayerWatch) -> None:
        """An eager training pass enters a layer. If no optimizer steps, a pass begins when the
        first layer of the last one runs again."""
        # Before the look at the stack: other layers are the usual case.
        if self._leader is not None and self._leader() is not layer:
            return
        if recomputes():
            return
        if self._leader is not None:
            self.next()
        self._leader = weakref.ref(layer)

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has made a step. Of several ones, a pass is a step of each."""
        if not self._stepped or optimizer in self._stepped:
            self._stepped.clear()
            self.next(optimizer)
        self._stepped.add(optimizer)

    def next(self, optimizer: Optimizer | None = None) -> None:
        """A pass has ended, with the step of an optimizer if one has made it."""
        if self.looks or self._asked or self.checks:
            self.read()
        # The pass measures if it is a look; the question is one call less in the others.
        is_agreed = self.measures and is_look(self.step) and not self.frozen
        if is_agreed and self._is_of(optimizer):
            self.agree()
        self.step += 1
        self._begin(is_look(self.step) or self._asked)

    def _is_of(self, optimizer: Optimizer | None) -> bool:
        """Whether an optimizer, if one has made the step, has parameters of the model. Another one
        may have been collected in one process, and not yet in another, which would wait for it."""
        return optimizer is None or self.holds(parameters_of(optimizer))

    def agree(self) -> None:
        """Sets the static scales of layers whose parameters are DTensors to the largest ones of the
        processes of their mesh. (DistributedDataParallel broadcasts those of the first process.)"""
        scales: dict[Any, list[Tensor]] = {}
        for watched in list(self.layers):
            layer = watched.layer()
            if layer is not None and (mesh := mesh_of(layer)) is not None:
                states = histories(layer, recurse=False).values()
                found = scales.setdefault(mesh, [])
                found += [state for state in states if not state.dim()]
        if not scales:
            return
        from ..common.ranks import take_largest  # not loaded with the core

        for mesh, found in scales.items():
            if found:
                take_largest(found, mesh.get_all_groups())

    def _reads(self, table: Tensor) -> bool:
        """Whether the values of a table are read after this pass. Reading waits for the device."""
        if table.is_meta or type(table) is not Tensor:  # a fake tensor, of a forecast
            return False
        return self.looks or self.checks or table.device.type == "cpu"

    def read(self) -> None:
        """Reads what the last pass has written: warns, and calls the listeners of a look."""
        written = [
            (layer, product, table)
            for layer in sorted(self.layers, key=self.layers.__getitem__)
            for product, table in layer.tables()
            if self._reads(table)
        ]
        if not written:
            return
        devices: dict[torch.device, list[Tensor]] = {}
        for _, _, table in written:
            devices.setdefault(table.device, []).append(table)
        # One transfer from each device.
        values = {
            device: iter(torch.stack(tables).tolist())
            for device, tables in devices.items()
        }
        rows: list[Seen] = []
        for layer, product, table in written:
            numbers = next(values[table.device])
            rows += layer.rows(product, numbers)
            try:
                _clear(table)
            except RuntimeError:  # a transform of torch.func allows no write
                in_own_thread(_clear, table)
        if rows and self.looks:
            for listener in list(self.listeners):
                listener(rows)


def _clear(table: Tensor) -> None:
    table.fill_(torch.nan)
    table.fp8_read_at = table._version  # type: ignore[attr-defined]


def is_look(step: int, every: int = 0) -> bool:
    """Whether a pass is looked at. every: as of a `Watch`."""
    if step % LONGEST == 0 or (every > 0 and step % every == 0):
        return True
    return step < LONGEST and step & (step - 1) == 0


def _watch(frozen: bool, *schedule: int) -> Watch:
    watch = Watch()
    watch.frozen = frozen
    watch.resume(Schedule(*schedule))
    return watch


_WATCHES: weakref.WeakSet[Watch] = weakref.WeakSet()


def _after_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    # Under torch.compile(optimizer.step) the count would become graphs of its own.
    if has_compiler():
        _count_untraced(optimizer)
    else:
        _count(optimizer)


def _count(optimizer: Optimizer) -> None:
    # Other models may train in this process, in other threads: their steps are not those of this
    # one. An optimizer of parameters that no model has (of adapters) steps all.
    watches = list(_WATCHES)
    if len(watches) > 1:
        parameters = parameters_of(optimizer)
        own = [watch for watch in watches if watch.holds(parameters)]
        watches = own or watches
    for watch in watches:
        watch.stepped(optimizer)


_count_untraced = untraced(_count)

_COUNTS: list[object] = []


def _count_steps() -> None:
    if not _COUNTS:
        _COUNTS.append(register_optimizer_step_post_hook(_after_step))


_TABLE = "table_"


class LayerWatch:
    """The watch of one converted layer: its attribute ``fp8_watch``. The statistics of a product
    are in an attribute, because graphs read attributes anew.

    Attributes:
        name: the path of the layer.
        layer: returns the layer while it lives.
        watch: that of its model.
        recipe: the name of its recipe.
        formats: operand -> format, of its recipe.
        has_scales, is_static: whether all of its casts have scales, and whether one is static.
    """

    def __init__(self, name: str, watch: Watch) -> None:
        self.name = name
        self.formats: dict[str, Format] = {}
        self.has_scales, self.is_static, self.recipe = True, False, ""
        self.layer: Callable[[], nn.Module | None] = lambda: None
        self.join(watch)

    def __reduce__(self) -> Any:
        settings = (self.formats, self.has_scales, self.is_static, self.recipe)
        return _layer_watch, (self.name, self.watch, settings), self.layer()

    def __setstate__(self, layer: nn.Module | None) -> None:
        if layer is not None:
            self.layer = weakref.ref(layer)

    def join(self, watch: Watch) -> None:
        """Looks when ``watch`` does, which reads the statistics from now on."""
        self.watch = watch
        watch.layers[self] = LAST

    def under(self, recipe: Recipe) -> None:
        """Takes the formats of a recipe, which the layer runs under from now on."""
        again = (recipe.grad_weight[1], recipe.grad_input[1], recipe.grad_weight[0])
        casts = (recipe.input, recipe.weight, recipe.grad, *again)
        present = {n: cast for n, cast in zip(OPERANDS, casts, strict=True) if cast}
        self.recipe = recipe.name
        self.formats = {n: get_format(cast.format) for n, cast in present.items()}
        self.has_scales = all(c.scaling != "unit" for c in present.values())
        self.is_static = any(c.scaling == "static" for c in present.values())

    def add(self, product: str, device: torch.device) -> Tensor:
        """Adds, or replaces, the statistics of a product."""
        with torch.inference_mode(False):
            table = torch.full(
                (len(OPERANDS), len(STATISTICS) + 1), torch.nan, device=device
            )
        table.fp8_read_at = table._version  # type: ignore[attr-defined]
        table.fp8_seen_by = weakref.WeakMethod(self.saw), product  # type: ignore[attr-defined]
        setattr(self, _TABLE + product, table)
        return table

    def drop(self) -> None:
        """Forgets all statistics."""
        for product, _ in self.tables():
            delattr(self, _TABLE + product)

    def look(
        self, product: str, x: Tensor, is_spot: bool, in_graph: bool
    ) -> Look | None:
        """Where a product of ``x`` writes its statistics; None in a graph that would have to add
        them."""
        table: Tensor | None = getattr(self, _TABLE + product, None)
        if table is None or table.device != x.device:
            table = self._added(product, x)
        if table is None:
            return None
        return Look(table, is_spot, in_graph)

    @eager_only()
    def _added(self, product: str, x: Tensor) -> Tensor | None:
        """A new table for a product of ``x``, in eager code."""
        if x.is_meta:
            return None
        return self.add(product, x.device)

    def tables(self) -> list[tuple[str, Tensor]]:
        """The products, and their statistics."""
        return [
            (name.removeprefix(_TABLE), table)
            for name, table in vars(self).items()
            if name.startswith(_TABLE)
        ]

    def rows(self, product: str, numbers: list[list[float]]) -> list[Seen]:
        """The rows of what was written into a table, of which ``numbers`` are the values."""
        rows = []
        for operand, (*values, spot) in zip(OPERANDS, numbers, strict=True):
            if not all(map(math.isnan, values)):
                rows.append(self.saw(product, operand, values))
                continue
            format = self.formats.get(operand)
            if format is not None and spot > 0:  # NaN: nothing was written
                low, high = range_of_spots(format)
                if not low <= spot <= high:
                    self.watch.ask()
        return rows

    def saw(self, product: str, operand: str, values: list[float]) -> Seen:
        """The row of what a cast has written. Warns of what is lost."""
        if not self.watch.looks:  # its spots were out of range
            self.watch.ask()
        named = dict(zip(STATISTICS, values, strict=True))
        elements = named.pop("elements")
        square, noise = named.pop("square"), named.pop("noise")
        sqnr = decibels(square, noise)
        if noise and not 0 < square < math.inf:  # beyond the range of float32
            sqnr = math.nan
        format = self.formats.get(operand)
        row = Seen(
            layer=".".join(filter(None, (self.name, product.strip("_")))),
            operand=operand,
            format="" if format is None else str(format),
            step=self.watch.step,
            rms=math.sqrt(square),
            sqnr=sqnr,
            **named,
        )
        if elements >= LEAST:
            self._warn(row)
        return row

    def _warn(self, row: Seen) -> None:
        """Warns, once, of an operand that loses more than `LOST`, or is far from its scale."""
        format = self.formats.get(row.operand)
        if format is None or not (what := loss(row, format, self.is_static)):
            return
        kind: type[PitfallWarning] = RecipeWarning
        todo = _SPREAD
        if not self.has_scales:
            todo = _UNSCALED.format(self.recipe)
        elif self.is_static and is_stale(row, format):
            kind = ScaleWarning
            todo = _FROZEN if self.watch.frozen else _STALE
        where = f"recipe {self.recipe!r}, pass {row.step}"
        text = f"{what} in {format} ({where}, scale {row.scale:.3g}, RMS {row.rms:.2g}). {todo}"
        warn_once(kind, text, self, "lost")


def _layer_watch(name: str, watch: Watch, settings: Any) -> LayerWatch:
    layer = LayerWatch(name, watch)
    layer.formats, layer.has_scales, layer.is_static, layer.recipe = settings
    return layer


PEAK = 7.0
"""The RMS of the largest elements, above which an operand saturates."""
LEAST_RANGE = 16
"""The octaves of a format below which zeros and saturation are not judged: in e2m1, of 4 octaves, a
normal operand loses more than `LOST` at any scale. e4m3 has 18."""
DRIFT = 64.0
"""How far the RMS may be from a scale in any format; the range of e4m3."""


def loss(row: Seen, format: Format, is_static: bool) -> str:
    """What is lost of an operand, in words; "" if that is little. is_static: whether its scale is
    not that of its values now, and is compared with these."""
    of_normal = math.erf(format.min_subnormal / 2 / math.sqrt(2))
    of = f"of the {row.operand} of {row.layer!r}"
    shares = [(row.nonfinite, f"{row.nonfinite:.0%} {of} are Inf or NaN")]
    if math.log2(format.max / format.min_subnormal) > LEAST_RANGE:
        zero = f"{row.zero:.0%} {of} become zero"
        saturated = f"{row.saturated:.0%} {of} saturate"
        shares += [(row.zero - of_normal, zero), (row.saturated, saturated)]
    share, what = max(shares)
    if share > LOST:
        return what
    if not is_static:
        return ""
    ratio = row.rms / row.scale
    low, high = min(format.min_normal, 1 / DRIFT), max(format.max / PEAK, DRIFT)
    if 0 < ratio < math.inf and not low <= ratio <= high:
        return f"the RMS {of} is {ratio:.2g} times its static scale"
    return ""


def is_stale(row: Seen, format: Format) -> bool:
    """Whether the scale is not that of the operand now: zeros at the scale of its RMS come of its
    spread."""
    ratio = row.rms / (row.scale * static_rms(format))
    return not 2.0**-MOVED <= ratio <= 2 or row.saturated > row.zero


_UNSCALED = (
    "Recipe {!r} casts without a scale: it is for modules and losses of unit_scaling; recipe "
    '"tensor" has a scale for each tensor'
)
_FROZEN = (
    "Its scales are frozen: call fp8.calibrate again, with the loss of training, the factor of a "
    "GradScaler included"
)
_STALE = (
    "The scale was that of an earlier pass, and is set anew where its values have moved. If they "
    'keep moving, recipe "tensor" has a new scale in each pass; if the loss of fp8.calibrate was '
    "another one, call it with that of training, the factor of a GradScaler included"
)
_SPREAD = (
    "Its values spread beyond the range of the format: take scales of smaller tiles (recipe "
    '"row", "block" or "mxfp8"), or leave the layer in high precision by a policy'
)


def watches_of(model: nn.Module) -> list[Watch]:
    """The watches of a model, parts of which may have been converted on their own. Raises
    ValueError if nothing in it is converted."""
    layers = [vars(module).get("fp8_watch") for module in model.modules()]
    watches = {id(layer.watch): layer.watch for layer in layers if layer is not None}
    if not watches:
        name = type(model).__name__
        raise ValueError(f"no layer of {name} is converted: call fp8.convert first")
    return list(watches.values())


def skip_look(model: nn.Module) -> None:
    """Lets the next pass of a model be one without a look, as nearly all are."""
    for module in model.modules():
        layer = vars(module).get("fp8_watch")
        if layer is not None:
            layer.watch.looks = False


def watch_of(model: nn.Module) -> Watch:
    """The first of `watches_of`."""
    return watches_of(model)[0]
