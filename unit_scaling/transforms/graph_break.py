"""Functions that break graphs. Imported only while a graph is compiled: it imports the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def _breaking(reason: str) -> Callable[[Callable[[], Any]], Any]:
    """A function that runs ``call()`` outside the graph. reason: what fullgraph=True shows."""
    return torch.compiler.disable(lambda call: call(), reason=reason)


outside_graph = _breaking(
    "unit_scale has not seen this call yet: call the model once before compiling it with "
    "fullgraph=True"
)

unknown_call = _breaking(
    "the graph has a call that unit_scale has not seen: call the model once in eager mode with "
    "arguments of this form, before compiling it with fullgraph=True"
)

beside_control_flow = _breaking(
    "the calls inside of torch.cond, while_loop, map and scan depend on values, and a graph cannot "
    "follow the plan of unit_scale through them: call the model, or the module with the control "
    "flow (@torch.compiler.disable), in eager mode"
)

_TRACKED = (
    "track_scales measures some calls of the model and not others, which no graph can: compile it "
    "without fullgraph=True"
)


@torch.compiler.disable(recursive=False, reason=_TRACKED)
def partly_compiled(
    choose: Callable[[], int | None], first: Callable[[int], Any], second: Callable[..., Any]
) -> Any:
    """Runs ``first`` with the chosen number or, without one, ``second()``, compiled in its own
    graph."""
    number = torch.compiler.disable(choose)()
    return second() if number is None else first(number)
