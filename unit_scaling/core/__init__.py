"""The pieces that unit-scaled operations are made of."""

from . import functional

__all__ = ["functional"]
