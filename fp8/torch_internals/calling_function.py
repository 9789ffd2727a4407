"""The autograd function whose ``forward`` makes a call.

Works around: torch has no name for it, and from 2.14 on its ``apply`` has no frame.
"""

from __future__ import annotations

import inspect
from functools import cache
from types import CodeType, FrameType

from torch.autograd.function import BackwardCFunction, Function

from .running_calls import python_frames


def function_around() -> str:
    """The autograd function that makes the running call, perhaps through others; "" if none."""
    return next(filter(None, map(function_of, python_frames())), "")


def function_of(frame: FrameType) -> str:
    """The autograd function whose ``forward`` runs in ``frame``; "" for none."""
    code = frame.f_code
    name = _name_of(code)
    if not name:
        return ""
    if code.co_argcount:
        ctx = frame.f_locals.get(code.co_varnames[0])
        # The class may have inherited forward.
        if isinstance(ctx, BackwardCFunction):
            name = type(ctx).__name__.removesuffix("Backward")
    return f"the autograd function {name}"


@cache
def _name_of(code: CodeType) -> str:
    """The name of the autograd function whose ``forward`` has this code; "" if none has."""
    classes: list[type] = [Function]
    while classes:
        kind = classes.pop()
        forward = getattr(vars(kind).get("forward"), "__func__", None)
        if (
            forward is not None
            and getattr(inspect.unwrap(forward), "__code__", None) is code
        ):
            return kind.__name__
        classes += kind.__subclasses__()
    return ""
