"""Communication between processes in FP8: reduction of gradients, gathering of weights.
Imports `fp8.surgery`, `fp8.optim` and below."""

from typing import TYPE_CHECKING

from ..common.removed import attributes_of

if not TYPE_CHECKING:
    __getattr__ = attributes_of("fp8.distributed")
