"""The functions that compiled graphs call without tracing them: see `compiler.in_graph`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

GRAPH_FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""Qualified name -> function. A graph can hold a string where it cannot hold a class."""
