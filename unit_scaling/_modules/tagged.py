"""Modules that know the tags of their parameters."""

from ..parameter import TaggedModule

__all__ = ["TaggedModule"]
