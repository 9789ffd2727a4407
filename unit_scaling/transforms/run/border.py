"""Gradients at the border of a model: the gauges of its results, and gradients from outside.

A gradient that arrives at a result is multiplied by the gauge of the call that computed it. A loss
outside the model may give it any size (division by a count, accumulation steps, a loss scale). One
more power of two, measured at the first backward pass and then fixed, brings it to RMS 1. Gradients
of the model's inputs are divided by it again: they are the true ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import Node

from fp8.common.pitfalls import ScaleWarning, show
from fp8.common.step import plain, unfolded

from ...scale import has_gradient, scale_edge
from ..capture.record import Slot, mapped, tensors_in
from ..capture.structure import HELD
from ..capture.values import rms_of
from ..measure.ranks import agreed
from ..plan.actions import Plan
from .varying import Following

_TWICE = (
    "a gradient of a model under unit_scale is computed with create_graph=True: the gradients of "
    "its calls have factors of their own, so second derivatives of this call are not those of the "
    "function. From the next call on, its gradients have no factors, and derivatives are true"
)


def records(anyway: bool = False) -> bool:
    """Whether a backward pass is possible here: gradients are recorded, and not by torch.func.
    anyway: whether it would be possible without `torch.no_grad`."""
    if torch.is_inference_mode_enabled() or not (anyway or torch.is_grad_enabled()):
        return False
    try:
        return torch.empty(0).requires_grad_().requires_grad
    except RuntimeError:
        return False


def _is_settled() -> bool:
    """Whether no backward pass of this call can measure the gradient that arrives."""
    traced = torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
    return traced or not records()


def leaving(
    output: Any, plan: Plan, module: nn.Module, path: str = "", following: Following | None = None
) -> Any:
    """Returns the results of ``module``, at ``path``, that its calls read too, or all of them if
    the gauges are tracked, with a gauge for the gradients that arrive. They are views that cannot
    be written in place. Attributes of modules that no step computes get theirs in place."""
    known = plan.outputs if following is None else plan.ends
    if not torch.is_grad_enabled() or not (known or following):
        return output

    def end(slot: Slot, tensor: Tensor) -> tuple[int, float]:
        exponent, size = known.get(slot, (0, 0.0))
        tracked = None if following is None else following.gauge(tensor)
        return exponent if tracked is None else tracked, size

    def gauged(slot: Slot, tensor: Tensor) -> Tensor:
        if not has_gradient(tensor) or not (slot in known or following):
            return tensor
        exponent, size = end(slot, tensor)
        if _is_settled():
            return scale_edge(tensor, 1.0, 2.0 ** (exponent + (plan.outside or 0)))
        return tensor if is_outside(tensor) else _View.apply(tensor, plan, exponent, size)

    places = [slot[:2] for slot in known if slot and str(slot[0]).endswith(HELD)]
    for slot, tensor in _held(module, path, places):
        if tensor.requires_grad and slot in known and not is_outside(tensor):
            ending(tensor, plan, *end(slot, tensor))

    result = results_changed(output, gauged)
    if following is None:
        return result

    def inner(tensor: Tensor) -> Tensor:
        own = following.gauge(tensor)
        if own is None or tensor.grad_fn is None or is_outside(tensor):
            return tensor
        return tensor if id(tensor) in following.within else _View.apply(tensor, plan, own, 0.0)

    return _replaced_within(result, inner, set())


def returns_other(output: Any, plan: Plan) -> bool:
    """Whether a model has returned tensors with gradients that it did not when it was recorded."""
    given = tensors_in(plain(output)) if plan.ends else ()
    return any(tensor.requires_grad and slot not in plan.ends for slot, tensor in given)


_OUTSIDE = "unit_scale: outside"


def is_outside(tensor: Tensor) -> bool:
    """Whether the gradient at a tensor has its gauge from `ending` already."""
    return tensor.grad_fn is not None and _OUTSIDE in _notes(tensor.grad_fn)


def _notes(node: Node) -> dict[Any, Any]:
    return cast("dict[Any, Any]", node.metadata)  # a property, which torch declares as a method


def ending(output: Any, plan: Plan, exponent: int, size: float) -> Any:
    """Returns the result of a call, with a gauge for the gradient that arrives from outside of the
    model. It may be written in place."""
    if not torch.is_grad_enabled():
        return output
    if _is_settled():
        factor = 2.0 ** (exponent + (plan.outside or 0))
        return mapped(lambda _, t: scale_edge(t, 1.0, factor), output)
    if sum(t.requires_grad for _, t in tensors_in(output)) > 1:
        # One may be computed from another, as the output of an LSTM cell from its state.
        output = mapped(lambda _, t: t[...] if t.requires_grad else t, output)
    for _, tensor in tensors_in(output):
        if tensor.requires_grad:
            # Before the hook: torch 2.13 crashes on a view that was written, with an old grad_fn.
            if tensor.grad_fn is not None:
                _notes(tensor.grad_fn)[_OUTSIDE] = True
            tensor.register_hook(lambda grad: _normalised(grad, plan, exponent, size))
    return output


def ending_call(output: Any, given: tuple[Any, ...], *rest: Any) -> Any:
    """As `ending`, for a call that may have written its result into one of the arguments ``given``;
    one that returns nothing, as ``x[i] = y``, into the first."""
    written = given[0] if output is None else next((t for t in given if t is output), None)
    if written is None:
        return ending(output, *rest)
    if torch.is_grad_enabled() and _is_settled():
        written.copy_(ending(written.clone(), *rest))
    else:
        ending(written, *rest)
    return output


def starting(tensor: Tensor, plan: Plan, exponent: int) -> Tensor:
    """Returns a tensor from outside of the model for a call that gives it a gradient of this gauge,
    as an argument that receives the true gradient."""
    if not has_gradient(tensor) or not torch.is_grad_enabled():
        return tensor

    def factor() -> float:
        return 2.0 ** -(exponent + (plan.outside or 0))

    if _is_settled():
        return scale_edge(tensor, 1.0, factor())
    view = tensor[...]
    view.register_hook(lambda grad: None if grad is None else grad * factor())
    return view[...]  # whose gradient the model may take, without that factor


class _View(Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, plan: Plan, exponent: int, size: float) -> Tensor:
        ctx.rest = plan, exponent, size
        return tensor[...]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _normalised(grad, *ctx.rest), None, None, None


def _normalised(grad: Tensor | None, plan: Plan, exponent: int, size: float) -> Tensor | None:
    """The gradient of a result times its gauge and the factor that brings it to RMS 1."""
    if grad is None:
        return None
    if torch.is_grad_enabled():
        if not plan.true:
            show(ScaleWarning, _TWICE)
        plan.true = True
    if plan.outside is None:
        plan.arriving.exponent = _outside(grad, size, plan.name)
    return grad * 2.0 ** (exponent + (plan.outside or 0))


def entering(given: Any, plan: Plan) -> Any:
    """Returns arguments that receive the true gradients."""
    if not torch.is_grad_enabled() or not any(has_gradient(t) for _, t in tensors_in(given)):
        return given
    return mapped(lambda _, tensor: starting(tensor, plan, plan.entry), given)


def _outside(grad: Tensor, size: float, name: str) -> int | None:
    """What brings a gradient to the RMS ``2**size``; None if it is zero or not finite."""
    try:
        values = grad.detach()
        if not bool(values.any()) or not bool(values.isfinite().all()):
            return None
        exponent = round(size - math.log2(rms_of(values)))
    except RuntimeError:  # no values inside vmap
        return None
    return int(agreed(f"{name} outside", str(exponent)))


def holds(module: nn.Module, path: str, plan: Plan) -> bool:
    """Whether a model keeps a tensor of an earlier run, through which gradients may reach it."""
    return any(tensor.requires_grad for _, tensor in _held(module, path, plan.kept))


def _held(module: nn.Module, path: str, places: Iterable[Slot]) -> Iterator[tuple[Slot, Tensor]]:
    """The tensors among the attributes of modules: `HELD` and the attribute's name."""
    for owner, name in dict.fromkeys(places):
        of = str(owner).removesuffix(HELD)
        if not path or f"{of}.".startswith(f"{path}."):
            part = module.get_submodule(of[len(path) :].removeprefix("."))
            yield from tensors_in(unfolded(getattr(part, str(name), None)), (owner, name))


def results_changed(output: Any, change: Callable[[Slot, Tensor], Tensor]) -> Any:
    """Returns the output of a model with its tensors changed; objects that are no tensors, lists,
    tuples and dicts are changed in place."""
    if isinstance(output, Tensor | tuple) or type(output) in (list, dict):
        return mapped(change, output)
    items = plain(output)
    if isinstance(items, dict):
        for name, value in items.items():
            new = mapped(change, value, (name,))
            if new is not value:
                _set(output, name, new)
    return output


def _replaced_within(value: Any, change: Callable[[Tensor], Tensor], seen: set[int]) -> Any:
    """As `results_changed`, at any depth; those of lists and dicts in place, too."""
    if isinstance(value, Tensor):
        return change(value)
    items = plain(value)
    if isinstance(value, nn.Module | type) or id(value) in seen:
        return value
    if not isinstance(items, dict | list | tuple):
        return value
    seen.add(id(value))
    pairs = dict(items if isinstance(items, dict) else enumerate(items))
    new = {name: _replaced_within(item, change, seen) for name, item in pairs.items()}
    changed = {name: item for name, item in new.items() if item is not pairs[name]}
    if isinstance(value, tuple) and changed:
        return getattr(value, "_make", tuple)(new.values())
    for name, item in changed.items():
        _set(value, name, item)
    return value


def _set(output: Any, name: Any, value: Any) -> None:
    if hasattr(output, "__setitem__"):
        output[name] = value
    else:
        setattr(output, name, value)
