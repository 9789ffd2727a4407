"""`Adam`, `AdamW` and `SGD` with states in 8 or 16 bits and weights in any format.
Imports `fp8.tensors` and below."""

from typing import TYPE_CHECKING

from ..common.removed import attributes_of
from .adam import Adam, AdamW
from .sgd import SGD
from .state import state_bytes

__all__ = ["SGD", "Adam", "AdamW", "state_bytes"]

if not TYPE_CHECKING:
    __getattr__ = attributes_of("fp8.optim")
