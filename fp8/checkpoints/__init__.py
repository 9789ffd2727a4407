"""Models for inference engines. Imports `fp8.surgery` and below."""

from typing import TYPE_CHECKING

from ..common.removed import attributes_of

if not TYPE_CHECKING:
    __getattr__ = attributes_of("fp8.checkpoints")
