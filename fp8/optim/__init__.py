"""`Adam`, `AdamW` and `SGD` with states in 8 or 16 bits and weights in any format.
Imports `fp8.tensors` and below."""

from .adam import Adam, AdamW, state_bytes
from .sgd import SGD

__all__ = ["SGD", "Adam", "AdamW", "state_bytes"]
