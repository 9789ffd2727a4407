"""One step of a recorded model under its plan: measures factors and gradients.

The copy runs forward and backward once, with the model's own loss, or with unit normal gradients at
its outputs. In the forward pass, op rules whose results differ from RMS 1 by more than `REACH` are
corrected by a power of two. The results of regions get the power of two nearest to 1/RMS.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from functools import partial
from statistics import median_high
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node

import fp8.products
from fp8.common.step import Loss, starts

from ..capture.kinds import PRODUCTS, RECURRENT, canonical
from ..capture.probe import on_its_own
from ..capture.record import Calls, Key, Place, Slot, tensors_in
from ..capture.values import has_scale, norm_of, rms_of
from ..plan.actions import Norm, Plan, Step
from ..plan.model_plan import read, written
from ..plan.planner import Planned
from ..run.border import results_changed
from ..run.replay import Replay
from .ranks import agreed, agreed_once, is_alone

REACH = 1.5
"""The allowed error of log2(RMS). [1/4, 4] allows 2; 0.5 is left for variation between batches.

A rule is corrected, and a product gets its own gauge, if the error is larger.
"""

ROUNDING = 0.75
"""A gradient is taken for zero if its norm is below ``eps**ROUNDING`` of that of the terms of its
sum (``eps`` of the dtype). In float32, those of `benchmarks.strangers` that are zero in exact
arithmetic, as float64 shows, are up to ``eps**0.76``; all others, but for two models, are from
``eps**0.748``.
"""


@dataclass
class Measured:
    """log2 of RMS values. gradients: of the results of calls. parameters: of the gradients of
    parameters. operands: of the arguments of products.

    rounding: log2 of the norm of the rounding errors of each gradient of a result. corrections:
    place of a call -> exponent of a factor of its result, shared by all loop iterations. again: the
    modules that the backward pass runs again. derives: "" if hooks of the model take gradients in
    it. arriving: of what arrives from outside at each of the model's results.
    """

    gradients: dict[Key, float] = field(default_factory=dict)
    rounding: dict[Key, float] = field(default_factory=dict)
    parameters: dict[str, float] = field(default_factory=dict)
    operands: dict[tuple[Key, Slot], float] = field(default_factory=dict)
    corrections: dict[Place, int] = field(default_factory=dict)
    again: dict[str, bool] = field(default_factory=dict)
    derives: dict[str, bool] = field(default_factory=dict)
    arriving: dict[Slot, float] = field(default_factory=dict)

    def shared(self, name: str) -> Measured:
        """As `agreed_once`: those of the first process of the job, of others where it has none."""
        if is_alone():
            return self
        found = read(Measured, json.loads(agreed(name, json.dumps(written(self)))))
        shared = Measured(*(getattr(self, f.name) | getattr(found, f.name) for f in fields(self)))
        shared.corrections = agreed_once(f"{name}/corrections", shared.corrections)
        return shared


class Actual(NamedTuple):
    """Measurements from a step of the model itself. gradients: log2 of the RMS, by call. outside:
    as in `Plan`, for the new plan. loss: of the output, if known instead of gradients."""

    gradients: Mapping[Key, float]
    outside: int | None
    loss: Loss | None = None


class Watching(Replay):
    """Executes a plan and measures the gradients of the results of its calls. keys: the calls to
    measure; None for all."""

    def __init__(self, plan: Plan, keys: Collection[Key] | None, *rest: Any) -> None:
        super().__init__(plan, *rest)
        self._keys = keys
        #: Sums over the backward passes.
        self.norms: dict[Key, Norm] = {}
        self._key: Key | None = None

    def _next(self, kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
        step = super()._next(kind, args, kwargs)
        self._key = (self._path[-1], kind, self.counts.get((self._path[-1], kind), 0) - 1)
        if self._placed is not None:
            self._key = self._placed.key
        return step

    def _called(
        self, step: Step | None, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        output = super()._called(step, function, args, kwargs)
        key, self._key = self._key, None  # the next call may not be in the plan
        if key is None or not (self._keys is None or key in self._keys):
            return output
        if key[1] in PRODUCTS and (step is None or step.end is None):
            output = on_its_own(output, args, kwargs)
        output = self._seen(key, output)
        products = products_within(output, (args, kwargs)) if key[1] in RECURRENT else []
        for node in products:
            node.register_prehook(partial(self._note, key))
        for _, tensor in () if products else tensors_in(output):
            if tensor.requires_grad and has_scale(tensor):
                tensor.register_hook(lambda grad: self._note(key, (grad,)))
        return output

    def _seen(self, key: Key, output: Any) -> Any:
        """The result of a call, as the model shall read it."""
        return output

    def _note(self, key: Key, grads: tuple[Tensor | None, ...]) -> None:
        """Notes a gradient of a call's result, or of the products within."""
        for grad in grads:
            if grad is None or self._path:
                continue  # not a gradient that the model takes itself
            try:
                norm = norm_of(grad.detach()).item()
            except RuntimeError:  # no values inside vmap
                continue
            eps = torch.finfo(grad.dtype).eps ** ROUNDING
            own = norm**2, grad.numel(), (eps * norm) ** 2
            known = self.norms.get(key, Norm(0, 0, 0))
            self.norms[key] = Norm(*map(sum, zip(known, own, strict=True)))


def sizes(norms: Mapping[Key, Norm]) -> dict[Key, float]:
    """log2 of the RMS of each measured gradient that is finite and not zero."""
    return _roots({key: n.square / max(1, n.numel) for key, n in norms.items()})


def _roots(squares: Mapping[Key, float]) -> dict[Key, float]:
    """log2 of the square roots of numbers, of those that are finite and not zero."""
    return {key: math.log2(x) / 2 for key, x in squares.items() if 0 < x < math.inf}


def products_within(output: Any, given: Any) -> list[Node]:
    """The products between the arguments and the results of a call, which recurrent layers and
    cells have: their casts see the gradients of the gates."""
    ends = {t.grad_fn for _, t in tensors_in(given)}
    todo, found = [t.grad_fn for _, t in tensors_in(output)], dict[Node | None, None]()
    while todo:
        node = todo.pop()
        if node is not None and node not in found and node not in ends:
            found[node] = None
            todo.extend(following for following, _ in node.next_functions)
    nodes = [node for node in found if node is not None]
    of = [str(getattr(node, "_forward_cls", Function).backward.__module__) for node in nodes]
    return [n for n, name in zip(nodes, of, strict=True) if name.startswith(fp8.products.__name__)]


class Measuring(Watching):
    """Corrects the factors of a plan in the forward pass, and measures the operands of products.
    known: corrections measured before. at_settled_length: whether attention that is scaled for
    another length is normalised to RMS 1, as it has at that length."""

    def __init__(
        self,
        planned: Planned,
        known: Mapping[Place, int],
        at_settled_length: bool,
        *rest: Any,
    ) -> None:
        super().__init__(planned.plan, None, *rest)
        self._rest = (planned, known, at_settled_length, *rest)
        nodes = planned.flow.nodes
        self._checked = {nodes[i].key: nodes[i].place for i in planned.checked}
        self._unruled = {nodes[i].key for i in planned.unruled}
        self._writing = {nodes[i].key for i in planned.checked if (0,) in nodes[i].written}
        self._products = {nodes[i].key: bias for i, bias in planned.products.items()}
        self._attends = {nodes[i].key for i in planned.settled if at_settled_length}
        self.found = Measured(corrections=dict(known))
        self._passes: dict[Place, list[int]] = defaultdict(list)

    def again(self) -> Measuring:
        """A copy that shares the measurements, for recomputation in the backward pass."""
        other = Measuring(*self._rest)
        other.found, other.norms = self.found, self.norms
        return other

    def _called(
        self, step: Step | None, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        if function == Tensor.register_hook:
            args = (args[0], partial(self._hooked, args[1]))
        if self._key is not None and self._key in self._products:
            self._measure_operands(self._key, step, *canonical(function, args, kwargs))
        if self._key not in self._writing:
            return super()._called(step, function, args, kwargs)
        output = super()._called(step, function, (args[0].clone(), *args[1:]), kwargs)
        return args[0].copy_(output)

    def _hooked(self, hook: Callable[[Tensor], Any], grad: Tensor) -> Any:
        """Calls a hook of the model."""
        with _Derivatives(self.found.derives):
            return hook(grad)

    def _measure_operands(self, key: Key, step: Step | None, args: Any, kwargs: Any) -> None:
        factors = {slot: forward for slot, forward, _ in (() if step is None else step.slots)}
        for slot, tensor in (*tensors_in(args), *tensors_in(kwargs)):
            size = rms_of(tensor) * abs(factors.get(slot, 1.0)) if has_scale(tensor) else 0.0
            if slot != self._products[key] and 0 < size < math.inf:
                self.found.operands[key, slot] = math.log2(size)

    def _seen(self, key: Key, output: Any) -> Any:
        """The result times its correction."""
        attends = key in self._checked or key in self._attends
        if not (attends and isinstance(output, Tensor) and has_scale(output)):
            return output
        place = self._checked.get(key)
        exponent = None if place is None else self.found.corrections.get(place)
        if exponent is None:
            size = math.log2(rms_of(output))
            exponent = -round(size) if key in self._unruled or abs(size) > REACH else 0
            if place is not None:
                self._passes[place].append(exponent)
        return output * 2.0**exponent if exponent else output

    def finish(self, actual: Mapping[Key, float]) -> Measured:
        """Returns the measurements, after the backward pass. actual: gradients of some calls in a
        step of the model itself; all others are shifted accordingly."""
        for place, exponents in self._passes.items():
            self.found.corrections[place] = median_high(exponents)
        found = self.found
        found.gradients = sizes(self.norms)
        found.rounding = _roots({key: n.rounding for key, n in self.norms.items()})
        known = found.gradients
        moves = [size - known[key] for key, size in actual.items() if key in known]
        move = median_high(moves) if moves else 0.0
        for name in ("gradients", "rounding", "parameters", "arriving"):
            setattr(found, name, {key: size + move for key, size in getattr(found, name).items()})
        found.gradients |= actual
        return found


class _Derivatives(Calls):
    """Notes whether `torch.autograd.grad` is called."""

    def __init__(self, found: dict[str, bool]) -> None:
        super().__init__()
        self._found = found

    def observe(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        if function is torch.autograd.grad:
            self._found[""] = True
        return function(*args, **kwargs)


def backward(
    found: Measured, output: Any, parameters: Mapping[str, Tensor], loss: Loss | None
) -> bool:
    """Computes the gradients of a model's loss, or of its outputs in a seeded normal direction, and
    measures those of ``parameters``. loss: as in `Actual`. Returns whether there is a loss."""

    def seen(slot: Slot, tensor: Tensor) -> Tensor:
        view = tensor[...]
        if view.requires_grad:
            view.register_hook(lambda grad: found.arriving.update({slot: math.log2(rms_of(grad))}))
        return view

    ends, gradients = starts(results_changed(output, seen), loss)
    named = {n: p for n, p in parameters.items() if p.requires_grad}
    if not (ends and named):
        return False
    torch.autograd.backward(ends, gradients)
    for name, parameter in named.items():
        grad = parameter.grad
        size = 0.0 if grad is None else norm_of(grad).item() / math.sqrt(max(1, grad.numel()))
        if 0 < size < math.inf:
            found.parameters[name] = math.log2(size)
    return gradients[0] is None
