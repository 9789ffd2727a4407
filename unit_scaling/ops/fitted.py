"""u-muP's fitted factors: between the limits of an op for a small and a large ``mult``."""

from __future__ import annotations

import math

from ..core.functional import logarithmic_interpolation

__all__ = ["RELU_GRAD_RMS", "RELU_STD", "gated_scale", "limit_weight"]

# For standard normal x, the standard deviation of relu(x) is sqrt((1 - 1/pi) / 2), and the RMS of
# its derivative is sqrt(1/2). gelu and silu tend to relu as mult grows; at small mult both tend to
# x/2 with derivative 1/2. The interpolation weights in between are fits to measurements, within 4 %
# of the exact value at mult = 1. Source: u-muP, arXiv 2407.17465, appendix B.
RELU_STD = math.sqrt((1 - 1 / math.pi) / 2)
RELU_GRAD_RMS = math.sqrt(1 / 2)
_LINEAR_STD = 1 / 2


def limit_weight(weight: float, mult: float) -> float:
    """The interpolation weight of an op's limit for large mult. Raises ValueError if mult is not a
    positive number, as for torch's positional arguments: ``silu(x, inplace)``.
    """
    default = mult == 1.0 and mult is not True  # the only check in most graphs
    if not default and (isinstance(mult, (bool, str)) or not mult > 0):
        raise ValueError(f"mult is {mult!r}, not a number above 0; give torch's arguments by name")
    return 1 / (1 + weight / mult**2)


def gated_scale(weight: float, mult: float, limit: float) -> float:
    """1/RMS of x * sigmoid-like(mult * x): between x/2 and relu-like as mult grows."""
    alpha = limit_weight(weight, mult)
    return logarithmic_interpolation(alpha, 1 / _LINEAR_STD, 1 / limit)
