"""Products that the mode of `fp8.autocast` does not cast: those of operators of other libraries and
of the backward passes of autograd functions, each with a warning; and those of a compiled graph,
where they are cast.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function

from ..common.compiler import eager_only, taken_as_constant
from ..common.pitfalls import RecipeWarning, show
from ..common.threads import frames, in_reentrant

OPERATORS = (type(torch.ops.aten.mm), type(torch.ops.aten.mm.default))
"""The types of operators of torch.ops: of one, and of one of its overloads."""

_OWN = str(Path(__file__).parents[1])


def warn_of_operator(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> None:
    """Warns of an operator of another library that may compute a product, of two floating-point
    tensors or more. ATen's operators are how these packages call torch without casts."""
    if not isinstance(function, OPERATORS):
        return
    given = [
        t for t in (*args, *kwargs.values()) if isinstance(t, Tensor) and t.is_floating_point()
    ]
    if len(given) > 1:
        _show_operator(str(function))


@taken_as_constant
def _show_operator(name: str) -> bool:
    if not name.startswith(("aten.", "fp8.")):
        show(RecipeWarning, _OPERATOR.format(name))
    return True


def warned(result: Any, args: tuple[Any, ...]) -> Any:
    """``result``, of a product of ``args`` without gradients. Warns if the forward pass of an
    autograd function computes it, but for a reentrant checkpoint, which runs its layers again."""
    if torch.compiler.is_dynamo_compiling() or in_reentrant():
        return result
    if any(isinstance(t, Tensor) and t.grad_fn is not None for t in args):
        name = function_around()
        if name:
            show(RecipeWarning, _BACKWARD.format(name))
    return result


@eager_only(False)
def is_from_graph() -> bool:
    """Whether code that Inductor has generated makes the running call of torch: of a graph that was
    compiled under the open blocks."""
    for frame in frames():
        if not frame.f_code.co_filename.startswith(_OWN):
            return "extern_kernels" in frame.f_globals
    return False


def function_around(end: str = "") -> str:
    """The autograd function that makes the running call, perhaps through others; "" if none. end:
    the name of a Python function beyond which callers are not looked at."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != end:
        if found := function_of(frame):
            return found
        frame = frame.f_back
    return ""


def function_of(frame: FrameType) -> str:
    """The autograd function whose ``forward`` runs in ``frame``; "" if the frame runs none. From
    torch 2.14 on, ``apply`` has no frame."""
    code = frame.f_code
    name = _name_of(code)
    if not name:
        return ""
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    if isinstance(first, BackwardCFunction):  # ctx, of a class that may have inherited forward
        name = type(first).__name__.removesuffix("Backward")
    return f"the autograd function {name}"


@cache
def _name_of(code: CodeType) -> str:
    """The name of the autograd function whose ``forward`` has this code; "" if none has."""
    classes: list[type] = [Function]
    while classes:
        kind = classes.pop()
        forward = getattr(vars(kind).get("forward"), "__func__", None)
        if forward is not None and getattr(inspect.unwrap(forward), "__code__", None) is code:
            return kind.__name__
        classes += kind.__subclasses__()
    return ""


_OPERATOR = (
    "{} is an operator that fp8.autocast does not know: if it computes products, they are not cast"
)
_BACKWARD = (
    "{} computes its gradients itself: products of its backward pass are cast if it runs layers "
    "again there, and not otherwise"
)
