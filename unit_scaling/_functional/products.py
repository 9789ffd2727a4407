"""Linear layers, matrix products and convolutions: every scale rides in the product.

The products are computed by the fp8 package, so that the recipe of an enclosing `fp8.autocast`
applies to them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8.convolution import conv
from fp8.matmul import linear as linear_product
from fp8.matmul import matmul as matrix_product

from ..batch import row_scale
from ..ops import Scales, row, tie
from ..scale import scale_each

__all__ = ["conv1d", "linear", "linear_readout", "matmul"]

#: The exponents of 1/fan-in (output), 1/fan-out (input gradient), 1/batch (weight gradient).
ScalePower = tuple[float, float, float]

SQRT: ScalePower = (0.5, 0.5, 0.5)


def linear_scales(
    input: Tensor,
    weight: Tensor,
    constraint: str | None = "to_output_scale",
    scale_power: ScalePower = SQRT,
    weight_grad_mult: float = 1.0,
) -> Scales:
    """1/sqrt of what each product sums over: fan-in, fan-out, and the rows of the input."""
    fan_out, fan_in = weight.shape
    grad = row_scale(math.prod(input.shape[:-1]), scale_power[2]) * weight_grad_mult
    tied = tie(
        constraint,
        output=_inverse(fan_in, scale_power[0]),
        input=_inverse(fan_out, scale_power[1]),
    )
    return {**tied, "weight": grad, "bias": grad}


def _inverse(size: int, power: float) -> float:
    """``size ** -power``; 1 for an empty dimension, where no element is there to be scaled."""
    return (size or 1) ** -power


@row(linear_scales, replaces=(F.linear,))
def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    constraint: str | None = "to_output_scale",
    scale_power: ScalePower = SQRT,
    weight_grad_mult: float = 1.0,
) -> Tensor:
    """``s * (input @ weight.T + bias)``.

    input: (..., in). weight: (out, in). bias: (out,) or None. Returns (..., out).
    scale_power: see `ScalePower`; with 0.5 an output of independent terms has RMS 1.
    weight_grad_mult: a further factor of the gradients of weight and bias, for a layer whose
    output is known to receive gradients of another RMS than 1.
    """
    s = linear_scales(input, weight, constraint, scale_power, weight_grad_mult)
    return _linear(input, weight, bias, s)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None, s: Scales) -> Tensor:
    if bias is not None:  # the product's own scales give its gradient the weight's factor
        bias = scale_each(bias, s["output"], 1.0)
    scales = (s["output"], s["input"], s["weight"])
    return linear_product(input, weight, bias, scales=scales)


READOUT: ScalePower = (1.0, 0.5, 0.5)


def linear_readout_scales(input: Tensor, weight: Tensor, constraint: str | None = None) -> Scales:
    """As `linear_scales`, with 1/fan-in for the output (muP's output layer)."""
    return linear_scales(input, weight, constraint, READOUT)


@row(linear_readout_scales)
def linear_readout(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, constraint: str | None = None
) -> Tensor:
    """The last linear layer of a model: 1/fan-in for the output, and no constraint.

    Shapes as in `linear`. Logits start small, as u-muP asks (arXiv 2407.17465, table 2).
    """
    s = linear_readout_scales(input, weight, constraint)
    return _linear(input, weight, bias, s)


def matmul_scales(
    left: Tensor, right: Tensor, constraint: str | None = "to_output_scale"
) -> Scales:
    """1/sqrt of what each of the three products sums over, batches that were broadcast included."""
    rows = left.shape[-2] if left.dim() > 1 else 1
    columns = right.shape[-1] if right.dim() > 1 else 1
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
    total = math.prod(batch)
    left_copies = total // (math.prod(left.shape[:-2]) or 1)
    right_copies = total // (math.prod(right.shape[:-2]) or 1)
    return tie(
        constraint,
        output=_inverse(left.shape[-1], 0.5),
        left=_inverse(columns * left_copies, 0.5),
        right=_inverse(rows * right_copies, 0.5),
    )


def _torch_matmul(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> dict[str, Any]:
    if out is not None:
        raise TypeError("unit-scaled matmul has no out= argument")
    return {"left": input, "right": other}


def _torch_rmatmul(input: Tensor, other: Tensor) -> dict[str, Any]:
    return {"left": other, "right": input}


def _torch_mm(input: Tensor, mat2: Tensor, *, out: Tensor | None = None) -> dict[str, Any]:
    return _torch_matmul(input, mat2, out=out)


@row(
    matmul_scales,
    adapters={
        torch.matmul: _torch_matmul,
        torch.Tensor.matmul: _torch_matmul,
        torch.Tensor.__matmul__: _torch_matmul,
        torch.Tensor.__rmatmul__: _torch_rmatmul,
        operator.matmul: _torch_matmul,
        torch.mm: _torch_mm,
        torch.Tensor.mm: _torch_mm,
        torch.bmm: _torch_mm,
        torch.Tensor.bmm: _torch_mm,
    },
)
def matmul(left: Tensor, right: Tensor, constraint: str | None = "to_output_scale") -> Tensor:
    """``s * left @ right``, with the shapes and broadcasting of `torch.matmul`."""
    s = matmul_scales(left, right, constraint)
    return matrix_product(left, right, scales=(s["output"], s["left"], s["right"]))


def _first(value: int | Sequence[int]) -> int:
    return value if isinstance(value, int) else value[0]


def _conv1d_length(
    length: int, kernel: int, stride: int, padding: str | int | Sequence[int], dilation: int
) -> int:
    """The length of the output, at least 1: a rule must not divide by zero."""
    if padding == "same":
        return max(length, 1)
    margin = 0 if isinstance(padding, str) else _first(padding)
    return max((length + 2 * margin - dilation * (kernel - 1) - 1) // stride + 1, 1)


def conv1d_scales(
    input: Tensor,
    weight: Tensor,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    constraint: str | None = "to_output_scale",
    scale_power: ScalePower = SQRT,
) -> Scales:
    """1/sqrt of what each product sums over, edges left aside.

    An output sums in/groups * kernel terms, an input's gradient out/groups * kernel / stride, a
    weight's gradient batch * output length.
    """
    fan_out, fan_in, kernel = weight.shape
    step = _first(stride)
    batch = input.shape[0] if input.dim() == 3 else 1
    length = _conv1d_length(input.shape[-1], kernel, step, padding, _first(dilation))
    grad = row_scale(batch * length, scale_power[2])
    tied = tie(
        constraint,
        output=_inverse(fan_in * kernel, scale_power[0]),
        input=(step * groups / (fan_out * kernel)) ** scale_power[1],
    )
    return {**tied, "weight": grad, "bias": grad}


@row(conv1d_scales, replaces=(F.conv1d,))
def conv1d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    constraint: str | None = "to_output_scale",
    scale_power: ScalePower = SQRT,
) -> Tensor:
    """``s * (conv1d(input, weight) + bias)``.

    input: (batch, in, length) or (in, length). weight: (out, in / groups, kernel). bias: (out,)
    or None. The other arguments are those of `torch.nn.functional.conv1d` (numbers, tuples of
    one, padding "same" and "valid"), then those of `linear`.
    """
    s = conv1d_scales(input, weight, stride, padding, dilation, groups, constraint, scale_power)
    if bias is not None:
        bias = scale_each(bias, s["output"], 1.0)
    scales = (s["output"], s["input"], s["weight"])
    return conv(input, weight, bias, stride, padding, dilation, groups, scales=scales)
