"""Functions that break graphs. Imported only while a graph is compiled: it imports the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_REASON = (
    "unit_scale has not seen this form of call yet: call the model once before compiling it with "
    "fullgraph=True"
)


@torch.compiler.disable(reason=_REASON)
def outside_graph(call: Callable[[], Any]) -> Any:
    """Runs ``call()`` outside the graph."""
    return call()


_OTHER_CALLS = (
    "torch.compile shows unit_scale other calls of the model than eager mode. It replaces "
    "nn.CrossEntropyLoss()(x, y) in a forward, for example: write F.cross_entropy(x, y), or make "
    "the loss in __init__"
)


@torch.compiler.disable(reason=_OTHER_CALLS)
def with_other_calls(call: Callable[[], Any]) -> Any:
    """Runs ``call()`` outside the graph."""
    return call()


_CONTROL_FLOW = (
    "the calls inside of torch.cond, while_loop, map and scan depend on values, and a graph cannot "
    "follow the plan of unit_scale through them: call the model, or the module with the control "
    "flow (@torch.compiler.disable), in eager mode"
)


@torch.compiler.disable(reason=_CONTROL_FLOW)
def beside_control_flow() -> None:
    """Breaks the graph."""


_TRACKED = (
    "track_scales measures some calls of the model and not others, which no graph can: compile it "
    "without fullgraph=True"
)


@torch.compiler.disable(recursive=False, reason=_TRACKED)
def partly_compiled(
    choose: Callable[[], int | None], first: Callable[[int], Any], second: Callable[..., Any]
) -> Any:
    """Runs ``first`` with the chosen number or, if there is none, ``second()``, compiled in its own
    graph.
    """
    number = _chosen(choose)
    return second() if number is None else first(number)


@torch.compiler.disable
def _chosen(choose: Callable[[], int | None]) -> int | None:
    return choose()
