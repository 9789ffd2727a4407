"""Building blocks of unit-scaled operations."""

from . import functional

__all__ = ["functional"]
