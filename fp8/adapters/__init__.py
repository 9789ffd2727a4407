"""Adapters for layers, optimizers and trainers of other libraries, all optional and lazily
imported. Imports everything below."""

from typing import TYPE_CHECKING

from ..common.removed import attributes_of

if not TYPE_CHECKING:
    __getattr__ = attributes_of("fp8.adapters")
