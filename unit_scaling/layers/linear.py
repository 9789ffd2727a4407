"""Linear layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn
from torch.types import Device

from .. import functional as U
from ..checks.first_call import check_gradient
from ..parameter import MupType
from .scaled import Product

__all__ = ["Linear", "LinearReadout"]


class Linear(Product, nn.Linear):
    """`unit_scaling.functional.linear` as a module.

    Input is (..., in_features), output (..., out_features). The weight (out_features, in_features)
    is initialised with a standard normal, the bias (out_features,) with zero. There is no bias by
    default, unlike in torch: the state_dict of an `nn.Linear` with one loads with ``bias=True``.

    Args:
        constraint: ties the scales of output and input gradient; None if no residual sum follows.
        weight_mup_type: the tag of the weight.
    """

    #: A factor of the parameters' gradients; see `unit_scaling.functional.linear`.
    weight_grad_mult: float = 1.0

    if TYPE_CHECKING:

        def __init__(
            self,
            in_features: int,
            out_features: int,
            bias: bool = False,
            device: Device = None,
            dtype: torch.dtype | None = None,
            constraint: str | None = "to_output_scale",
            weight_mup_type: MupType = "weight",
        ) -> None: ...

        def forward(self, input: Tensor) -> Tensor: ...


class LinearReadout(Linear, op=U.linear_readout):
    """`unit_scaling.functional.linear_readout` as a module: the last layer of a model.

    Arguments are as in `Linear`.
    """

    _defaults: ClassVar = {
        "bias": False,
        "constraint": None,
        "weight_mup_type": "output",
    }

    #: Whether a gradient of the output was checked; see `checks.first_call.check_gradient`.
    gradient_seen = False

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        check_gradient(self, output)
        return output
