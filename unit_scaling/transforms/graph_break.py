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

measured = _breaking(
    "track_scales measures the model in eager mode: compile it without fullgraph=True"
)
