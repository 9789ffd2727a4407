"""x"""

from __future__ import annotations

from .case import Stranger

__all__ = ["STRANGERS"]

STRANGERS: list[Stranger] = []
