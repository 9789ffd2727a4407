"""An alarm for a training run: it keeps the last good state, and says whether FP8 is at fault.
Imports `fp8.lab.blame` and the watch of converted layers."""

from .alarm import RULES, Alarm, Alert, Rule
from .callbacks import lightning_callback, transformers_callback
from .verdict import Verdict

__all__ = [
    "RULES",
    "Alarm",
    "Alert",
    "Rule",
    "Verdict",
    "lightning_callback",
    "transformers_callback",
]
