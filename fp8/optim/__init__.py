"""`Adam` and `AdamW` with states in 8 or 16 bits and weights in any format.
Imports `fp8.casts` and below."""

from .adam import Adam, AdamW
from .state import state_bytes

__all__ = ["Adam", "AdamW", "state_bytes"]
