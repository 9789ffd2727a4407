"""Calls that run functions among their arguments, as a torch-function mode receives them.

Such a call is an activation checkpoint, an operator of control flow (`torch.cond`, ``while_loop``,
``map``, ``scan``) or a region of `torch.compiler.nested_compile_region`. Torch runs the functions
outside of the mode, so they enter it again, or Python's own control flow takes its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph_placeholder
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ..torch_internals import Arguments, Keywords, TorchFunction

#: What torch.compile calls a mode with in place of a region; it has no public name.
REGION = invoke_subgraph_placeholder

OPERATORS = torch.ops.higher_order
Function = TorchFunction

#: Calls that run their first argument. Tracing, torch 2.11 does not find them in a dict.
CALLERS = (checkpoint, REGION)

#: An operator that runs functions -> their positions among its arguments. Only a graph has a call
#: of a checkpoint or of ``associative_scan``: eager code runs its function at once.
RUNS: dict[Function, tuple[int, ...]] = {
    OPERATORS.cond: (1, 2),
    OPERATORS.while_loop: (0, 1),
    OPERATORS.map_impl: (0,),
    OPERATORS.scan: (0,),
    OPERATORS.associative_scan: (0,),
}


def _while_loop(
    condition: Function, body: Function, carried: Sequence[Any], more: Sequence[Any]
) -> object:
    while condition(*carried, *more):
        carried = body(*carried, *more)
    return tuple(carried)


_IN_PYTHON: dict[Function, Function] = {
    OPERATORS.cond: lambda at, true, false, args: (true if at else false)(*args),
    OPERATORS.while_loop: _while_loop,
}


def in_python(function: Function, args: Arguments) -> Function | None:
    """Returns a function that makes a call of control flow in Python, for eager code; None for
    other calls. Keywords of such a call tell the compiler which tensors its functions write."""
    if torch.compiler.is_compiling() or function not in _IN_PYTHON:
        return None
    return partial(_IN_PYTHON[function], *args)


def runs_functions(function: Function) -> bool:
    """Whether a call runs functions outside of the mode that receives it."""
    return function in CALLERS or function in RUNS


def run_within(
    mode: TorchFunctionMode, function: Function, args: Arguments, kwargs: Keywords
) -> object:
    """``function(*args, **kwargs)``, a call that `runs_functions`, with the mode active in these. A
    region becomes a part of its graph: torch.compile compiles no closure as one."""
    # The compiler allows a push on the stack of modes inside of the functions after one outside.
    within((mode,), tuple)()
    if function is REGION:
        return within((mode,), args[0])(*args[1:], **kwargs)
    inside = list(args)
    # Not RUNS.get: tracing, torch 2.11 does not look up a checkpoint in a dict.
    places = (0,) if function is checkpoint else RUNS[function]
    for place in places:
        inside[place] = within((mode,), args[place])
    return function(*inside, **kwargs)


def within(modes: tuple[TorchFunctionMode, ...], function: Function) -> Function:
    """``function`` with the modes active, the last of which sees each call first."""
    if isinstance(function, partial):  # scan reads its arguments
        return partial(
            within(modes, function.func), *function.args, **function.keywords
        )

    def inside(*args: Any, **kwargs: Keywords) -> object:
        for mode in modes:
            TorchFunctionMode.__enter__(mode)
        try:
            return function(*args, **kwargs)
        finally:
            for mode in reversed(modes):
                TorchFunctionMode.__exit__(mode, None, None, None)

    return inside
