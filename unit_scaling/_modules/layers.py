"""Layers: the modules of `torch.nn` with unit-scaled functions and tagged parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import functional as U
from ..parameter import MupType
from .tagged import TaggedModule

__all__ = [
    "GELU",
    "Conv1d",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "LinearReadout",
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
        self.constraint = constraint

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
        self.constraint = constraint

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
        self.constraint = constraint

    def forward(self, input: Tensor) -> Tensor:
        return U.softmax(input, self.dim, constraint=self.constraint, mult=self.mult)


class Dropout(nn.Dropout):
    """`unit_scaling.functional.dropout` as a module: the identity under ``eval()``."""

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        super().__init__(p, inplace)

    def forward(self, input: Tensor) -> Tensor:
        return U.dropout(input, self.p, self.training, self.inplace)


class Linear(TaggedModule, nn.Linear):
    """`unit_scaling.functional.linear` as a module.

    Input (..., in_features), output (..., out_features). weight (out_features, in_features) is
    standard normal, bias (out_features,) is zero.
    constraint: how the scales of output and input gradient are tied; None for a layer that is
    followed by no residual sum. weight_mup_type: the tag of the weight.
    """

    #: A factor of the parameters' gradients, see `unit_scaling.functional.linear`.
    weight_grad_mult: float = 1.0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        constraint: str | None = "to_output_scale",
        weight_mup_type: MupType = "weight",
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.constraint = constraint
        self.tag_parameters(weight=weight_mup_type, bias="bias")

    def reset_parameters(self) -> None:
        """Draws the weight from the standard normal distribution and sets the bias to zero."""
        _reset_weight_and_bias(self)

    def forward(self, input: Tensor) -> Tensor:
        return U.linear(
            input,
            self.weight,
            self.bias,
            self.constraint,
            weight_grad_mult=self.weight_grad_mult,
        )


class LinearReadout(Linear):
    """`unit_scaling.functional.linear_readout` as a module: the last layer of a model."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: Any = None,
        constraint: str | None = None,
        weight_mup_type: MupType = "output",
    ) -> None:
        super().__init__(
            in_features, out_features, bias, device, dtype, constraint, weight_mup_type
        )

    def forward(self, input: Tensor) -> Tensor:
        return U.linear_readout(input, self.weight, self.bias, self.constraint)


def _reset_weight_and_bias(module: Linear | Conv1d) -> None:
    nn.init.normal_(module.weight)
    if module.bias is not None:
        nn.init.zeros_(module.bias)
    module.restore_tags()


class Conv1d(TaggedModule, nn.Conv1d):
    """`unit_scaling.functional.conv1d` as a module.

    Input (batch, in_channels, length) or (in_channels, length). weight is standard normal, bias
    zero. kernel_size, stride, padding (also "same", "valid"), dilation, groups and padding_mode
    are those of `torch.nn.Conv1d`; constraint and weight_mup_type those of `Linear`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int],
        stride: int | tuple[int] = 1,
        padding: str | int | tuple[int] = 0,
        dilation: int | tuple[int] = 1,
        groups: int = 1,
        bias: bool = False,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
        constraint: str | None = "to_output_scale",
        weight_mup_type: MupType = "weight",
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,  # type: ignore[arg-type]
            device,
            dtype,
        )
        self.constraint = constraint
        self.tag_parameters(weight=weight_mup_type, bias="bias")

    def reset_parameters(self) -> None:
        """Draws the weight from the standard normal distribution and sets the bias to zero."""
        _reset_weight_and_bias(self)

    def forward(self, input: Tensor) -> Tensor:
        padding: Any = self.padding
        if self.padding_mode != "zeros":
            input, padding = F.pad(input, self._margins(), mode=self.padding_mode), 0
        return U.conv1d(
            input,
            self.weight,
            self.bias,
            self.stride,
            padding,
            self.dilation,
            self.groups,
            self.constraint,
        )

    def _margins(self) -> tuple[int, int]:
        """Elements to add on the left and on the right; the odd one of "same" on the right."""
        if self.padding == "valid":
            return 0, 0
        if self.padding == "same":
            total = self.dilation[0] * (self.kernel_size[0] - 1)
            return total // 2, total - total // 2
        return int(self.padding[0]), int(self.padding[0])


class LayerNorm(TaggedModule, nn.LayerNorm):
    """`unit_scaling.functional.layer_norm` as a module; by default without weight and bias."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
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
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        shape: Any = normalized_shape
        super().__init__(shape, eps, elementwise_affine, device, dtype)
        self.tag_parameters(weight="norm")

    def reset_parameters(self) -> None:
        """Sets the weight to one."""
        super().reset_parameters()
        self.restore_tags()

    def forward(self, x: Tensor) -> Tensor:
        return U.rms_norm(x, self.normalized_shape, self.weight, self.eps)


class Embedding(TaggedModule, nn.Embedding):
    """`unit_scaling.functional.embedding` as a module. weight is standard normal.

    The arguments are those of `torch.nn.Embedding`; so is ``from_pretrained``, freezing included.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            _weight,
            _freeze,
            device,
            dtype,
        )
        self.tag_parameters(weight="weight")

    def reset_parameters(self) -> None:
        """Draws the weight from the standard normal distribution; a padding row is zero."""
        super().reset_parameters()
        self.restore_tags()

    def forward(self, input: Tensor) -> Tensor:
        return U.embedding(
            input,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )


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
