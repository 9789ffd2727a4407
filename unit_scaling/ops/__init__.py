"""The unit-scaled functions: each a row of OPS, its rule beside its body.
Imports `rules`, `core` and below; `unit_scaling.functional` exports them.
"""

import sys

from . import activations, arithmetic, losses, pooling, products

# The paths of functions in pickles of earlier versions.
_MOVED = {
    "contraction": products,
    "gated": activations,
    "regression": losses,
    "residuals": arithmetic,
    "resizing": pooling,
    "softmax": activations,
    "unary": activations,
}
sys.modules.update({f"{__name__}.{name}": module for name, module in _MOVED.items()})
