"""Whether torch.compile finishes the graph of a module's forward pass."""

from __future__ import annotations

import weakref
from typing import Any

from fp8.torch_internals.decorators import taken_as_constant
from fp8.warnings import PitfallWarning, warn_once

_BEGUN: weakref.WeakSet[Any] = weakref.WeakSet()
"""Modules of which torch.compile has begun a graph, and has not finished it."""


class GraphBreaks:
    """Base of modules that say whether their graph is finished."""

    @taken_as_constant
    def note_graph(self, begins: bool) -> bool:
        """Notes that a graph begins, or ends, while it is traced. A method: torch.compile takes
        only those with a module as constants."""
        (_BEGUN.add if begins else _BEGUN.discard)(self)
        return begins


def warn_of_break(module: GraphBreaks) -> None:
    """Warns if torch.compile has left the forward pass of a module to eager mode."""
    if module in _BEGUN:
        _BEGUN.discard(module)
        warn_once(
            PitfallWarning,
            f"torch.compile cannot compile the forward pass of this {type(module).__name__} in one "
            "piece (a graph break), and its transforms need one: all of it runs in eager mode. "
            "fullgraph=True shows where it breaks",
            about=module,
            key="graph break",
        )
