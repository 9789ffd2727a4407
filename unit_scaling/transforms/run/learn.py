"""Learns the plan of a call: records one copy of the model, then measures a second one.

Both copies run forward only, share the model's parameters and have their own buffers. They have no
hooks of a user, unless the forward fails without. What they write into parameters is undone, and
random states are restored.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median_high
from typing import Any

import torch
from torch import Tensor, nn

from fp8.casts.measuring import uncast
from fp8.casts.operands import static_exponent
from fp8.common.step import detached, restored, seeded
from fp8.common.threads import Setting, apart

from ...parameter import restore_own_tags
from ...rules.table import find_op
from ..folding import find_ties
from ..install import Args, Given, Kwargs
from ..plan.plan import CallRow, Step, Steps, Tie
from ..plan.planner import Planner, by_place, step_by_rule
from ..plan.weights import keep_values, tagged_weights
from ..record.calls import CallNode, Recorder, Slot, tensors_in
from ..record.copies import recording_copy
from ..record.kinds import PRODUCTS, RECURRENT, canonical, is_added
from ..record.place import Place
from ..record.values import all_zero, has_scale, rms_of
from .replay import RUNNING, Replay, take

REACH = 1.5
"""The allowed error of log2(RMS). [1/4, 4] allows 2; 0.5 is left for variation between batches."""


@dataclass(frozen=True)
class Learned:
    """What a recording adds to a plan; the fields are those of `ModelPlan` and `Decided`."""

    steps: dict[Place, Steps]
    rows: list[CallRow]
    inner: frozenset[str]
    ties: tuple[Tie, ...]


def learned(transform: Any, module: nn.Module, path: str, given: Given) -> Learned:
    """Records and measures a call of ``module``, which is at ``path``, and decides on its calls."""
    restore_own_tags(module)
    weights = tagged_weights(module, path)
    with apart(), torch.inference_mode(False), torch.enable_grad(), _SILENT, uncast():
        try:
            recording, hooked = _record(transform, module, path, given, False), False
        except Exception:  # the forward may read what a hook of another object stores
            recording, hooked = _record(transform, module, path, given, True), True
        nodes = recording.nodes
        replaced = frozenset(transform.kinds[f] for f in transform.replacements)
        changed = recording.changed
        outputs = () if path else recording.outputs
        planner = Planner(nodes, transform.plan, weights, outputs, replaced, changed)
        decided = planner.decided()
        if not transform.plan.covers(path):
            kept = {name: name in decided.kept for name in sorted(weights.scaled)}
            kept = transform.agreed(f"{path}/kept", kept)
            added = transform.agreed(f"{path}/added", decided.added)
            keep_values(module, path, [n for n, keeps in kept.items() if keeps], added)
        steps = by_place(nodes, decided.steps)
        loops = planner.loops
        measured = _measure(transform, module, path, given, steps, loops, hooked)
    agreed = transform.agreed(f"{path}/measured", measured)
    exponents: dict[Place | None, dict[Slot, float]] = defaultdict(dict)
    for (place, slot), exponent in agreed.items():
        if exponent:
            exponents[place][slot] = exponent
    steps_of = {
        i: corrected(s, exponents[nodes[i].place], nodes[i].place in loops)
        for i, s in decided.steps.items()
    }
    rows = [
        CallRow(*name.rpartition(".")[::2], KEPT, WHY_ADDED if name in decided.added else WHY_KEPT)
        for name in sorted(decided.kept)
    ]
    rows += _rows(decided.rows, nodes, exponents)
    ties: tuple[Tie, ...] = ()
    if not path and transform.unit_scaled:
        ties = find_ties(nodes, steps_of, recording.buffers, recording.outputs)
    return Learned(by_place(nodes, steps_of), rows, decided.inner, ties)


UNSEEN = "unit_scale has not seen this call yet"

KEPT = "keeps its values"
"""What the report says of a weight that no product reads, and why."""

WHY_KEPT = "calls read it that are no products, or its rows make the output by formulas alone"
WHY_ADDED = "added to values: learns as a bias"


def _without_warnings() -> Any:
    quiet = warnings.catch_warnings()
    quiet.__enter__()
    warnings.simplefilter("ignore")
    return quiet


# Suppresses warnings while recording; they are shown when the model runs. Filters are per process.
_SILENT = Setting(_without_warnings)


@contextmanager
def _unchanged(copy: nn.Module) -> Iterator[restored]:
    """Restores random states, and the parameters, which ``copy`` shares with its model, with their
    gradients: a model may call ``backward`` itself. Yields what is written into parameters."""
    parameters = list(copy.parameters())
    devices = sorted({p.device.index or 0 for p in parameters if p.is_cuda})
    gradients = [p.grad for p in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        with seeded(None, devices), restored(parameters) as mode:
            yield mode
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


def _record(transform: Any, module: nn.Module, path: str, given: Given, hooked: bool) -> Recorder:
    copy, (args, kwargs) = _copy(module, hooked), detached(given)
    names = {id(p): name for name, p in copy.named_parameters(prefix=path)}
    inputs = {id(t) for _, t in tensors_in((args, kwargs))}
    running = transform.path.items
    recorder = Recorder(
        transform.kinds,
        names,
        inputs,
        lambda: running[-1] if running else path,
        normalizes=transform.unit_scaled,
    )
    with _unchanged(copy) as mode:
        output = _run(transform, recorder, copy, path, args, kwargs)
        named = copy.named_parameters(prefix=path)
        recorder.changed = frozenset(name for name, p in named if mode.changed(p))
    recorder.buffers = {id(b): name for name, b in copy.named_buffers()}
    recorder.outputs = recorder.nodes_of(output)
    return recorder


def _measure(
    transform: Any,
    module: nn.Module,
    path: str,
    given: Given,
    steps: dict[Place, Steps],
    loops: frozenset[Place | None],
    hooked: bool,
) -> Corrections:
    copy, (args, kwargs) = _copy(module, hooked), detached(given)
    mode = Measuring(transform, (copy, path, (args, kwargs)), steps, loops)
    with _unchanged(copy):
        _run(transform, mode, copy, path, args, kwargs)
    return mode.corrections()


def _copy(module: nn.Module, hooked: bool) -> nn.Module:
    copy = recording_copy(module, hooked)
    vars(copy).pop("forward", None)  # what is set on the instance has called the class's
    restore_own_tags(copy)
    for part in copy.modules():
        vars(part)["recorded"] = threading.get_ident()
    return copy


def _run(transform: Any, mode: Any, copy: nn.Module, path: str, args: Any, kwargs: Any) -> Any:
    RUNNING.items.append(transform)
    transform.path.items.append(path)
    try:
        with mode:
            return copy(*args, **kwargs)
    finally:
        transform.path.items.pop()
        RUNNING.items.pop()


Corrections = dict[tuple[Place, Slot], float]
"""(place, slot) -> log2 of the RMS of an argument; a whole number for an operand of a product."""


class Measuring(Replay):
    """Executes a plan, and measures the operands of products and the terms of residual adds: those
    that are more than `REACH` octaves from RMS 1 have a power of two from then on."""

    def __init__(
        self,
        transform: Any,
        called: Any,
        steps: dict[Place, Steps],
        loops: frozenset[Place | None],
    ) -> None:
        super().__init__(transform, called, transform.plan.steps | steps)
        self._loops = loops
        self._sizes: dict[tuple[Place, Slot], list[float]] = defaultdict(list)
        self._scales: Corrections = {}  # of parameters, by their tags

    def corrections(self) -> Corrections:
        """The exponents of all arguments, of the median of their sizes; 0 near RMS 1."""
        return {k: _exponent(*k, sizes) for k, sizes in self._sizes.items()} | self._scales

    def _unknown(self, place: Place, function: Any, args: Args, kwargs: Kwargs) -> Steps:
        return (None,)  # this copy takes another branch than the recorded one

    def _taken(
        self, place: Place, step: Step | None, function: Any, args: Args, kwargs: Kwargs
    ) -> Any:
        if step is not None and step.op == "replace":
            return super()._taken(place, step, function, args, kwargs)
        args, kwargs = canonical(function, args, kwargs)
        weighted = place[1] in PRODUCTS or (step is not None and bool(step.terms))
        own: dict[Slot, float] = {}
        for slot, tensor in (*tensors_in(args), *tensors_in(kwargs)):
            if weighted:
                own |= self._measured(place, slot, tensor, step is not None)
        step = corrected(step, own, place in self._loops)
        if step is None:
            return super()._taken(place, step, function, args, kwargs)
        return take(replace(step, static=()), function, args, kwargs)

    def _measured(
        self, place: Place, slot: Slot, tensor: Tensor, changes: bool
    ) -> dict[Slot, float]:
        """The exponent of an argument. changes: whether the result depends on it, so that all calls
        at the place have that of the first one."""
        if not has_scale(tensor) or is_added(place[1], slot):
            return {}
        if hasattr(tensor, "mup_scale"):
            self._scales[place, slot] = static_exponent(tensor)
            return {}
        sizes = self._sizes[place, slot]
        if not ((changes and sizes) or all_zero(tensor)):  # zeros have no size yet
            sizes.append(math.log2(rms_of(tensor)))
        return {slot: e} if (e := _exponent(place, slot, sizes)) and changes else {}


def _exponent(place: Place, slot: Slot, sizes: list[float]) -> float:
    """That of the median size. A term of a residual add has its exact size, whose weights are
    those of terms of RMS 1."""
    size = median_high(sizes) if sizes else 0.0
    if place[1] not in PRODUCTS:
        return size
    return round(size) if abs(size) > REACH else 0


def corrected(
    step: Step | None, exponents: dict[Slot, float], in_loop: bool = False
) -> Step | None:
    """The step of a call whose arguments have these sizes. A product casts them at these scales.
    One with a factor brings its result to RMS 1 with them, and so does a residual add. A product
    ``in_loop`` keeps the factor of its rule: another one is the gain of a recurrence."""
    if not exponents:
        return step
    step = step or Step()
    if step.terms:
        sizes = [exponents.get(slot, 0) for slot in ((0,), (1,))]
        terms = tuple(t * 2.0**-e for t, e in zip(step.terms, sizes, strict=True))
        return replace(step, terms=terms)
    static = tuple((slot, int(exponent)) for slot, exponent in exponents.items())
    if step.op in RECURRENT:
        return step  # its products are inside
    if step.op is None:
        return replace(step, static=static)
    factor = step.factor if in_loop else step.factor * 2.0 ** -sum(exponents.values())
    return replace(step, static=static, factor=factor)


def _rows(
    rows: list[CallRow], nodes: list[CallNode], exponents: dict[Place | None, dict[Slot, float]]
) -> list[CallRow]:
    scales: dict[tuple[str, str], list[str]] = defaultdict(list)
    for node in nodes:
        for slot, exponent in exponents[node.place].items() if node.kind in PRODUCTS else ():
            scale = f"argument {slot[0]} cast at scale {2.0**exponent:g}"
            scales[node.path, node.name].append(scale)
    whys = ([row.why, *dict.fromkeys(scales[row.path, row.call])] for row in rows)
    texts = (", ".join(filter(None, why)) for why in whys)
    return [replace(row, why=text) for row, text in zip(rows, texts, strict=True)]


def steps_by_rule(
    place: Place, function: Any, args: Args, kwargs: Kwargs, unit_scaled: bool
) -> tuple[Steps, CallRow]:
    """The steps of a call that no recording shows: the factor of the rule of its op, if one of its
    operands is a weight of RMS 1."""
    path, kind, lines = place
    args, kwargs = canonical(function, args, kwargs)
    factors = [t for s, t in (*tensors_in(args), *tensors_in(kwargs)) if not is_added(kind, s)]
    op = find_op(function)
    scaled = unit_scaled and any(getattr(t, "mup_divisor", None) for t in factors)
    if not scaled or op is None or kind not in PRODUCTS | RECURRENT:
        why = f"not seen in a recording: as it is ({lines})"
        return (None,), CallRow(path, kind, "unchanged", why)
    step = step_by_rule(op, function, args, kwargs)
    return (step,), CallRow(path, kind, "scaled", f"not seen in a recording: by its rule ({lines})")
