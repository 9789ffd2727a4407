"""Calls that run functions among their arguments, as a torch-function mode receives them.

Such a call is an activation checkpoint, an operator of control flow (`torch.cond`, ``while_loop``,
``map``, ``scan``) or a region of `torch.compiler.nested_compile_region`. Torch runs the functions
outside of the mode. In eager code the call is therefore replaced by Python's own control flow, and
in a graph its functions enter the mode again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph_placeholder
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

REGION = invoke_subgraph_placeholder
"""What torch.compile calls a mode with in place of a region; it has no public name."""

OPERATORS = torch.ops.higher_order
Function = Callable[..., Any]


class Runs(NamedTuple):
    """A call that runs functions. functions: their positions among its arguments. eager: the same
    in Python."""

    functions: tuple[int, ...]
    eager: Function | None = None


def _while_loop(
    condition: Function, body: Function, carried: Sequence[Any], more: Sequence[Any]
) -> Any:
    while condition(*carried, *more):
        carried = body(*carried, *more)
    return tuple(carried)


def _scan(
    combine: Function, carried: Sequence[Any], inputs: Sequence[Tensor], more: Sequence[Any]
) -> list[Any]:
    state, results = list(carried), list[Any]()
    for row in _rows(inputs):
        outputs = combine(*state, *row, *more)
        state, result = outputs[: len(carried)], outputs[len(carried) :]
        results.append(result)
    return [*state, *_stacked(results)]


def _rows(inputs: Sequence[Tensor]) -> list[Any]:
    return list(zip(*(t.unbind() for t in inputs), strict=True))


def _stacked(results: list[Any]) -> Any:
    return tree_map(lambda *parts: torch.stack(parts), *results)


RUNS: dict[Function, Runs] = {
    checkpoint: Runs((0,)),
    OPERATORS.cond: Runs((1, 2), lambda at, true, false, args: (true if at else false)(*args)),
    OPERATORS.while_loop: Runs((0, 1), _while_loop),
    OPERATORS.map_impl: Runs(
        (0,),
        lambda function, inputs, more: _stacked([function(*row, *more) for row in _rows(inputs)]),
    ),
    OPERATORS.scan: Runs((0,), _scan),
    OPERATORS.associative_scan: Runs((0,)),
}
"""Only a graph has a call of a checkpoint or of ``associative_scan``: eager code runs its function
at once."""


def in_python(function: Function, args: tuple[Any, ...]) -> Function | None:
    """For a call of control flow in eager code: what makes it in Python. None for others. Keywords
    of such a call tell the compiler which tensors its functions write."""
    row = RUNS.get(function)
    if row is None or row.eager is None or torch.compiler.is_compiling():
        return None
    return partial(row.eager, *args)


def runs_functions(function: Function) -> bool:
    """Whether a call, in a graph, runs functions outside of the mode that receives it."""
    return function in RUNS or function is REGION


def depends_on_values(function: Function) -> bool:
    """Whether the data of a call decide which functions run, or how often."""
    return function in RUNS and RUNS[function].eager is not None


def run_within(mode: TorchFunctionMode, function: Function, args: Any, kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, a call that `runs_functions`, with the mode active in these. A
    region is compiled as a part of its graph, as torch.compile compiles no closure as one: equal
    regions are compiled several times."""
    # The compiler allows a push on the stack of modes inside of the functions after one outside.
    within((mode,), tuple)()
    if function is REGION:
        return within((mode,), args[0])(*args[1:], **kwargs)
    places = RUNS[function].functions
    inside = [within((mode,), a) if place in places else a for place, a in enumerate(args)]
    return function(*inside, **kwargs)


def within(modes: tuple[TorchFunctionMode, ...], function: Function) -> Function:
    """``function`` with the modes active, the last of which sees each call first."""
    if isinstance(function, partial):  # scan reads its arguments
        return partial(within(modes, function.func), *function.args, **function.keywords)

    def inside(*args: Any, **kwargs: Any) -> Any:
        for mode in modes:
            TorchFunctionMode.__enter__(mode)
        try:
            return function(*args, **kwargs)
        finally:
            for mode in reversed(modes):
                TorchFunctionMode.__exit__(mode, None, None, None)

    return inside
