"""Activations, norms and losses of `torch.nn` with unit-scaled functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from .. import functional as U
from ..constraints import checked_constraint
from ..parameter import TaggedModule

__all__ = [
    "GELU",
    "CrossEntropyLoss",
    "Dropout",
    "LayerNorm",
    "RMSNorm",
    "SiLU",
    "Softmax",
]


class GELU(nn.GELU):
    """`unit_scaling.functional.gelu` as a module."""

    def __init__(
        self,
        mult: float = 1.0,
        constraint: str | None = "to_output_scale",
        approximate: str = "none",
    ) -> None:
        super().__init__(approximate=approximate)
        self.mult = mult
        self.constraint = checked_constraint(constraint)

    def forward(self, input: Tensor) -> Tensor:
        return U.gelu(input, self.mult, self.constraint, self.approximate)


class SiLU(nn.SiLU):
    """`unit_scaling.functional.silu` as a module."""

    def __init__(
        self,
        mult: float = 1.0,
        constraint: str | None = "to_output_scale",
        inplace: bool = False,
    ) -> None:
        super().__init__(inplace=inplace)
        self.mult = mult
        self.constraint = checked_constraint(constraint)

    def forward(self, input: Tensor) -> Tensor:
        return U.silu(input, self.mult, self.constraint, self.inplace)


class Softmax(nn.Softmax):
    """`unit_scaling.functional.softmax` as a module."""

    def __init__(
        self,
        dim: int | None = None,
        mult: float = 1.0,
        constraint: str | None = "to_output_scale",
    ) -> None:
        super().__init__(dim=dim)
        self.mult = mult
        self.constraint = checked_constraint(constraint)

    def forward(self, input: Tensor) -> Tensor:
        return U.softmax(input, self.dim, constraint=self.constraint, mult=self.mult)


class Dropout(nn.Dropout):
    """`unit_scaling.functional.dropout` as a module; the identity in evaluation mode."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__(p, inplace)

    def forward(self, input: Tensor) -> Tensor:
        return U.dropout(input, self.p, self.training, self.inplace)


class LayerNorm(TaggedModule, nn.LayerNorm):
    """`unit_scaling.functional.layer_norm` as a module; by default without weight and bias."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = False,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape: Any = normalized_shape
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)
        self.tag_parameters(weight="norm", bias="bias")

    def reset_parameters(self) -> None:
        """Sets the weight to one and the bias to zero."""
        super().reset_parameters()
        self.restore_tags()

    def forward(self, input: Tensor) -> Tensor:
        shape = self.normalized_shape
        return U.layer_norm(input, shape, self.weight, self.bias, self.eps)


class RMSNorm(TaggedModule, nn.RMSNorm):
    """`unit_scaling.functional.rms_norm` as a module; by default without weight."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = 1e-5,
        elementwise_affine: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        shape: Any = normalized_shape
        super().__init__(shape, eps, elementwise_affine, device, dtype)
        self.tag_parameters(weight="norm")

    def reset_parameters(self) -> None:
        """Sets the weight to one."""
        super().reset_parameters()
        self.restore_tags()

    def forward(self, input: Tensor) -> Tensor:
        return U.rms_norm(input, self.normalized_shape, self.weight, self.eps)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """`unit_scaling.functional.cross_entropy` as a module."""

    def __init__(
        self,
        mult: float = 1.0,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> None:
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.mult = mult

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        weight: torch.Tensor | None = self.weight
        return U.cross_entropy(
            input,
            target,
            weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            mult=self.mult,
        )
