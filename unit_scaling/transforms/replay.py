"""Running a plan: a torch-function mode that does at each call what its step says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from fp8 import matmul
from fp8.autocast import EXPANDED, FIRST_LOOK
from fp8.checkpoint import checkpointed

from ..ops import OPS
from ..scale import scale_bwd, scale_each
from .install import HOOKS
from .plan import Plan, Step
from .record import Key, Slot

__all__ = ["SPECIAL", "PlanMissError", "Replay"]


class PlanMissError(RuntimeError):
    """The model made a call that its plan does not know."""


def _residual_add(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """``(skip + tau * branch) / sqrt(1 + tau**2)``.

    The branch's gradient is not scaled here but where the branch leaves (`Step.slots`): in
    between it keeps unit scale whatever tau is.
    """
    terms = (*args, *(kwargs[name] for name in ("input", "other") if name in kwargs))
    skip, branch = (terms[step.skip], terms[1 - step.skip])
    alpha = kwargs.get("alpha", 1)
    norm = (1 + step.factor**2) ** -0.5
    if alpha != 1:  # alpha multiplies the second term
        skip, branch = (skip, branch * alpha) if step.skip == 0 else (skip * alpha, branch)
    return skip * norm + scale_each(branch, step.factor * norm, 1.0)


def _preserved_linear(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        rows = max(1, input.numel() // max(1, weight.shape[1]))
        if bias is not None:
            bias = scale_bwd(bias, rows**-0.5)
        scales = (step.factor, step.factor, rows**-0.5)
        y = matmul.linear(input, weight, scales=scales)
        return y if bias is None else y + bias.to(y.dtype)

    return linear(*args, **kwargs)


def _preserved_embedding(step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return F.embedding(*args, **kwargs) * step.factor


SPECIAL: dict[str, Callable[[Step, tuple[Any, ...], dict[str, Any]], Tensor]] = {
    "residual_add": _residual_add,
    "preserved_linear": _preserved_linear,
    "preserved_embedding": _preserved_embedding,
}
"""Steps that are not rows of OPS."""


def _scaled(value: Any, slot: Slot, fwd: float, bwd: float) -> Any:
    if not slot:
        return scale_each(value, fwd, bwd)
    first, rest = slot[0], slot[1:]
    if isinstance(value, dict):
        return {**value, first: _scaled(value[first], rest, fwd, bwd)}
    items = list(value)
    items[first] = _scaled(items[first], rest, fwd, bwd)  # type: ignore[index]
    return tuple(items) if isinstance(value, tuple) else items


class Replay(TorchFunctionMode):
    """Executes ``plan``. ``path`` gives the module that is running.

    kinds: the table of `transforms.calls`. replacements: torch function -> what the caller of
    unit_scale wants in its place.
    """

    def __init__(
        self,
        plan: Plan,
        kinds: dict[Callable[..., Any], str],
        replacements: dict[Callable[..., Any], Callable[..., Any]],
        path: list[str],
    ) -> None:
        super().__init__()
        self._steps = plan.steps
        self._kinds = kinds
        self._replacements = replacements
        self._path = path
        self._counts: dict[tuple[str, str], int] = {}
        self._busy = False
        self.latest: Step | None = None  # the step of the call before, for who measures it

    def __enter__(self) -> Replay:
        FIRST_LOOK.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        FIRST_LOOK.pop()
        super().__exit__(*error)

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._busy:
            return function(*args, **kwargs)
        if function is checkpoint:
            return checkpointed(self, *args, **kwargs)
        if function in EXPANDED:
            with self:
                return EXPANDED[function](*args, **kwargs)
        self._busy = True
        try:
            kind = self._kinds.get(function)
            step = None if kind is None else self._next(kind)
            self.latest = step
            if step is None:
                return function(*args, **kwargs)
            return self._execute(step, function, args, kwargs)
        finally:
            self._busy = False

    def _next(self, kind: str) -> Step | None:
        path = self._path[-1]
        if path.endswith(HOOKS):
            return None
        count = self._counts.get((path, kind), 0)
        self._counts[path, kind] = count + 1
        key: Key = (path, kind, count)
        if key not in self._steps:
            raise PlanMissError(f"call {count} of {kind} in {path or 'the model itself'!r}")
        return self._steps[key]

    def _execute(
        self,
        step: Step,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        for slot, fwd, bwd in step.slots:
            if isinstance(slot[0], str):
                kwargs = _scaled(kwargs, slot, fwd, bwd)
            else:
                args = _scaled(args, slot, fwd, bwd)
        if step.op is None:
            return function(*args, **kwargs)
        if step.op == "replace":
            return self._replacements[function](*args, **kwargs)
        if step.op in SPECIAL:
            return SPECIAL[step.op](step, args, kwargs)
        if step.op == "linear_readout":
            return OPS["linear_readout"].fn(*args, **kwargs)
        op = OPS[step.op]
        return op.call(args, kwargs, func=function, constraint=step.constraint)


def is_torch_function(function: Any) -> bool:
    """Whether a call of ``function`` passes through torch-function modes."""
    return callable(function) and function in _overridable()


def _overridable() -> set[Any]:
    table = torch.overrides.get_overridable_functions()
    return {function for functions in table.values() for function in functions}
