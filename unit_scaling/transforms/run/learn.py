"""Learns the plan of a call: records one copy of the model, then measures a second one.

Both run forward only, share the model's parameters, which they leave as they are, and have their
own buffers. They have no hooks of a user, unless the forward fails without.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
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
from ..install import Args, Called, Kwargs, pushed
from ..plan.plan import CallRow, ModelPlan, Step, Steps
from ..plan.planner import Planner, by_place, step_by_rule
from ..plan.weights import demoted, keep_values, named_tags
from ..record.calls import CallNode, Recorder, Slot, tensors_in
from ..record.copies import recording_copy
from ..record.kinds import PRODUCTS, RECURRENT, canonical, is_added
from ..record.place import Place
from ..record.values import has_scale, has_values, is_strided, rms_of
from .replay import RUNNING, Replay, take

REACH = 1.5
"""The allowed error of log2(RMS). [1/4, 4] allows 2; 0.5 is left for variation between batches."""


def learned(transform: Any, called: Called) -> ModelPlan:
    """Records and measures a call, and decides on its calls: what this adds to the plan."""
    module, path, _ = called
    restore_own_tags(module)
    tags = named_tags(module, path)
    is_first = not transform.plan.covers(path)
    with apart(), torch.inference_mode(False), torch.enable_grad(), _SILENT, uncast():
        try:
            recording, hooked = _record(transform, called, False), False
        except Exception:  # the forward may read what a hook of another object stores
            recording, hooked = _record(transform, called, True), True
        nodes = recording.nodes
        replaced = frozenset(transform.kinds[f] for f in transform.replacements)
        outputs = () if path else recording.outputs
        planner = Planner(nodes, transform.plan, tags, outputs, replaced, recording.changed)
        added = planner.added()
        if is_first:
            kept = {name: name in planner.kept for name in sorted(planner.scaled)}
            kept = transform.agreed(f"{path}/kept", kept)
            agreed = transform.agreed(f"{path}/added", added)
            keep_values(module, path, [n for n, keeps in kept.items() if keeps], agreed)
        decided, rows = planner.decided()
        measuring = Measuring(transform, called, by_place(nodes, decided), planner.loops)
        _run(transform, measuring, _copied(called, hooked))
    agreed = transform.agreed(f"{path}/measured", measuring.corrections())
    exponents: dict[Place | None, dict[Slot, float]] = defaultdict(dict)
    for (place, slot), exponent in agreed.items():
        if exponent:
            exponents[place][slot] = exponent
    steps = {
        i: corrected(s, exponents[nodes[i].place], nodes[i].place in measuring.loops)
        for i, s in decided.items()
    }
    addition = ModelPlan(steps=by_place(nodes, steps))
    if is_first:
        addition.rows += demoted(module, path, planner.inner)
    addition.rows += _kept_rows(planner.kept, added)
    addition.rows += _rows(rows, nodes, exponents)
    return addition


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


_SILENT = Setting(_without_warnings)
"""Warnings are shown when the model runs. Filters are per process."""


@contextmanager
def _unchanged(copy: nn.Module) -> Iterator[restored]:
    """Restores random states, parameters and their gradients: a model may call ``backward``.
    Yields what is written into parameters."""
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


def _record(transform: Any, called: Called, hooked: bool) -> Recorder:
    copied = copy, path, given = _copied(called, hooked)
    names = {id(p): name for name, p in copy.named_parameters(prefix=path)}
    running = transform.path.items
    recorder = Recorder(
        transform.kinds,
        names,
        {id(t) for _, t in tensors_in(given)},
        lambda: running[-1] if running else path,
        normalizes=True,
    )
    output, recorder.changed = _run(transform, recorder, copied)
    recorder.outputs = recorder.nodes_of(output)
    return recorder


def _copied(called: Called, hooked: bool) -> Called:
    module, path, given = called
    copy = recording_copy(module, hooked)
    vars(copy).pop("forward", None)  # what is set on the instance has called the class's
    restore_own_tags(copy)
    for part in copy.modules():
        vars(part)["recorded"] = threading.get_ident()
    return copy, path, detached(given)


def _run(transform: Any, mode: Any, called: Called) -> tuple[Any, frozenset[str]]:
    """The output of a copy, and the names of the parameters that it writes into."""
    copy, path, (args, kwargs) = called
    with _unchanged(copy) as written:
        with pushed(RUNNING.items, transform), pushed(transform.path.items, path), mode:
            output = copy(*args, **kwargs)
        named = copy.named_parameters(prefix=path)
        return output, frozenset(name for name, p in named if written.changed(p))


Corrections = dict[tuple[Place, Slot], float]
"""(place, slot) -> log2 of the RMS of an argument; a whole number for an operand of a product."""


class Measuring(Replay):
    """Executes a plan, and measures the operands of products and the terms of residual adds: those
    that are more than `REACH` octaves from RMS 1 have a power of two from then on."""

    def __init__(
        self, transform: Any, called: Called, steps: dict[Place, Steps], loops: Collection[Any]
    ) -> None:
        super().__init__(transform, called, transform.plan.steps | steps)
        self.loops = loops
        self._sizes: dict[tuple[Place, Slot], list[float]] = defaultdict(list)
        self._scales: Corrections = {}  # of parameters, by their tags

    def corrections(self) -> Corrections:
        sizes = {key: _exponent(key[0], sizes) for key, sizes in self._sizes.items()}
        return sizes | self._scales

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
        for slot, tensor in (*tensors_in(args), *tensors_in(kwargs)) if weighted else ():
            own |= self._measured(place, slot, tensor, step is not None)
        step = corrected(step, own, place in self.loops)
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
        zeros = is_strided(tensor) and has_values([tensor]) and not bool(tensor.any())
        if not ((changes and sizes) or zeros):  # which have no size yet
            sizes.append(math.log2(rms_of(tensor)))
        return {slot: e} if (e := _exponent(place, sizes)) and changes else {}


def _exponent(place: Place, sizes: list[float]) -> float:
    """That of the median size: for a product 0 near RMS 1, for a residual add exact."""
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
    if step.op is None:
        return replace(step, static=static)
    factor = step.factor if in_loop else step.factor * 2.0 ** -sum(exponents.values())
    return replace(step, static=static, factor=factor)


def _kept_rows(kept: Collection[str], added: Collection[str]) -> list[CallRow]:
    whys = {name: WHY_ADDED if name in added else WHY_KEPT for name in sorted(kept)}
    return [CallRow(*name.rpartition(".")[::2], KEPT, why) for name, why in whys.items()]


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


def steps_by_rule(place: Place, function: Any, args: Args, kwargs: Kwargs) -> tuple[Steps, CallRow]:
    """The steps of a call that no recording shows: by the rule of its op, if one of its operands is
    a weight of RMS 1."""
    path, kind, lines = place
    args, kwargs = canonical(function, args, kwargs)
    factors = [t for s, t in (*tensors_in(args), *tensors_in(kwargs)) if not is_added(kind, s)]
    op = find_op(function)
    step: Step | None = None
    done, how = "unchanged", "as it is"
    scaled = any(getattr(t, "mup_divisor", None) for t in factors)
    if scaled and op is not None and kind in PRODUCTS | RECURRENT:
        step, done, how = step_by_rule(op, function, args, kwargs), "scaled", "by its rule"
    return (step,), CallRow(path, kind, done, f"not seen in a recording: {how} ({lines})")
