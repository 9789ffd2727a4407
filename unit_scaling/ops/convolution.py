"""Convolutions and transposed convolutions; the product kernels apply all scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.nn import functional as F

from fp8.products.convolution import conv, conv_transpose

from ..rules.batch import row_scale
from ..rules.table import Scales, row, tie
from ..scale import scale_each
from .generated import P, R, renamed
from .products import SQRT, ScalePower, inverse

Ints = int | Sequence[int]


def each(value: Ints, dims: int) -> list[int]:
    """One setting for each dimension; a number applies to all."""
    values = [value] if isinstance(value, int) else list(value)
    return values * dims if len(values) == 1 else values


def _op(body: Callable[P, R], rule: Callable[..., Scales], name: str, about: str) -> Callable[P, R]:
    """Adds the row of torch.nn.functional's function ``name``."""
    return row(rule, replaces=(getattr(F, name),))(renamed(body, name, about))


def conv_scales(
    input: Tensor,
    weight: Tensor,
    stride: Ints = 1,
    padding: str | Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    constraint: str | None = "to_output_scale",
    scale_power: ScalePower = SQRT,
) -> Scales:
    """1/sqrt of the number of terms of each sum, ignoring edges.

    An output sums in/groups * kernel terms. A weight gradient sums batch * output positions terms.
    An input gradient sums out/groups times the number of outputs that an input contributes to: in
    each dimension kernel/stride, or kernel * positions / length if that is fewer, where the kernel
    is about as large as the input.
    """
    fan_out, fan_in, *kernel = weight.shape
    dims = len(kernel)
    margins = each(0 if isinstance(padding, str) else padding, dims)
    sizes = (input.shape[-dims:], kernel, each(stride, dims), margins, each(dilation, dims))
    positions, uses = [], []
    for length, k, step, margin, gap in zip(*sizes, strict=True):
        room = (
            length if padding == "same" else (length + 2 * margin - gap * (k - 1) - 1) // step + 1
        )
        positions.append(max(room, 1))  # not 0, which is divided by
        uses.append(k * min(1 / step, positions[-1] / max(length, 1)))
    batch = input.shape[0] if input.ndim == dims + 2 else 1
    grad = row_scale(batch * math.prod(positions), scale_power[2])
    tied = tie(
        constraint,
        output=inverse(fan_in * math.prod(kernel), scale_power[0]),
        input=(groups / (fan_out * math.prod(uses))) ** scale_power[1],
    )
    return {"weight": grad, "bias": grad, **tied}


def _conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: str | Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    constraint: str | None = "to_output_scale",
    scale_power: ScalePower = SQRT,
) -> Tensor:
    s = conv_scales(input, weight, stride, padding, dilation, groups, constraint, scale_power)
    if bias is not None:
        bias = scale_each(bias, s["output"], 1.0)
    scales = (s["output"], s["input"], s["weight"])
    return conv(input, weight, bias, stride, padding, dilation, groups, scales=scales, unit=True)


_CONV = """Computes ``s * (conv1d(input, weight) + bias)``.

Args:
    input: (batch, in, length) or (in, length).
    weight: (out, in / groups, kernel).
    bias: (out,) or None.
    stride: a number or a tuple of one, as in torch.
    padding: a number, a tuple of one, "same" or "valid".
    dilation: a number or a tuple of one.
    groups: the number of groups of channels.
    constraint: see `unit_scaling.constraints`.
    scale_power: see `linear`.

Returns:
    (batch, out, positions) or (out, positions).
"""

_ALSO = "{}D convolution: as `conv1d`, with weight (out, in / groups, {})."

conv1d = _op(_conv, conv_scales, "conv1d", _CONV)
conv2d = _op(_conv, conv_scales, "conv2d", _ALSO.format(2, "height, width"))
conv3d = _op(_conv, conv_scales, "conv3d", _ALSO.format(3, "depth, height, width"))


def conv_transpose_scales(
    input: Tensor,
    weight: Tensor,
    stride: Ints = 1,
    groups: int = 1,
    constraint: str | None = "to_output_scale",
    scale_power: ScalePower = SQRT,
) -> Scales:
    """1/sqrt of the number of terms of each sum, ignoring edges: the transpose of `conv_scales`.

    An output sums in/groups * kernel/stride terms, an input gradient out/groups * kernel, a weight
    gradient batch * input positions.
    """
    fan_in, out, *kernel = weight.shape
    dims = len(kernel)
    taps = math.prod(kernel)
    batch = input.shape[0] if input.ndim == dims + 2 else 1
    grad = row_scale(batch * math.prod(input.shape[-dims:]), scale_power[2])
    steps = math.prod(each(stride, dims))
    tied = tie(
        constraint,
        output=(groups * steps / (fan_in * taps)) ** scale_power[0],
        input=inverse(out * taps, scale_power[1]),
    )
    outputs = steps ** scale_power[2]  # a bias is added to about stride outputs per input
    return {"weight": grad, "bias": grad / outputs, **tied}


def _conv_transpose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    constraint: str | None = "to_output_scale",
    scale_power: ScalePower = SQRT,
) -> Tensor:
    s = conv_transpose_scales(input, weight, stride, groups, constraint, scale_power)
    if bias is not None:  # the product applies its weight's factor to the bias
        bias = scale_each(bias, s["output"], s["bias"] / s["weight"])
    scales = (s["output"], s["input"], s["weight"])
    sizes = (stride, padding, output_padding, groups, dilation)
    return conv_transpose(input, weight, bias, *sizes, scales=scales, unit=True)


_TRANSPOSED = """Computes ``s * (conv_transpose1d(input, weight) + bias)``.

Args:
    input: (batch, in, length) or (in, length).
    weight: (in, out / groups, kernel).
    bias: (out,) or None.
    stride: a number or a tuple of one, as in torch.
    padding: likewise.
    output_padding: likewise.
    groups: the number of groups of channels.
    dilation: a number or a tuple of one.
    constraint: see `unit_scaling.constraints`.
    scale_power: see `linear`.
"""
_ALSO_TRANSPOSED = "As `conv_transpose1d` in {} dimensions, with weight (in, out / groups, {})."

conv_transpose1d = _op(_conv_transpose, conv_transpose_scales, "conv_transpose1d", _TRANSPOSED)
conv_transpose2d = _op(
    _conv_transpose,
    conv_transpose_scales,
    "conv_transpose2d",
    _ALSO_TRANSPOSED.format("two", "height, width"),
)
conv_transpose3d = _op(
    _conv_transpose,
    conv_transpose_scales,
    "conv_transpose3d",
    _ALSO_TRANSPOSED.format("three", "depth, height, width"),
)
