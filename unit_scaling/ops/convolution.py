"""Convolutions and transposed convolutions; the product kernels apply all scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from fp8.products.convolution import conv, conv_transpose

from ..common.calls import T
from ..rules.batch import row_scale
from ..rules.table import Scales, row, tie
from ..scale import scale_each
from .generated import CONSTRAINT, REQUIRED, by_name, defaults_of, described
from .products import SQRT, ScalePower, inverse

Ints = int | Sequence[int]


def each(value: T | Sequence[T], dims: int) -> list[T]:
    """One setting for each dimension; one that is no sequence applies to all."""
    if not isinstance(value, Sequence):
        return [value] * dims
    if len(value) == 1:
        return [*value] * dims
    return [*value]


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
    pads = padding
    if isinstance(pads, str):
        pads = 0
    settings = [each(setting, dims) for setting in (stride, pads, dilation)]
    positions = []
    uses = []
    for length, k, step, pad, gap in zip(
        input.shape[-dims:], kernel, *settings, strict=True
    ):
        room = (length + 2 * pad - gap * (k - 1) - 1) // step + 1
        if padding == "same":
            room = length
        positions.append(max(room, 1))  # not 0, which is divided by
        uses.append(k * min(1 / step, positions[-1] / max(length, 1)))
    batch = math.prod(input.shape[: -dims - 1])
    grad = row_scale(batch * math.prod(positions), scale_power[2])
    tied = tie(
        constraint,
        output=inverse(fan_in * math.prod(kernel), scale_power[0]),
        input=(groups / (fan_out * math.prod(uses))) ** scale_power[1],
    )
    return {"weight": grad, "bias": grad, **tied}


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
    batch = math.prod(input.shape[: -dims - 1])
    grad = row_scale(batch * math.prod(input.shape[-dims:]), scale_power[2])
    steps = math.prod(each(stride, dims))
    tied = tie(
        constraint,
        output=(groups * steps / (fan_in * taps)) ** scale_power[0],
        input=inverse(out * taps, scale_power[1]),
    )
    # A bias is added to about stride outputs per input.
    outputs = steps ** scale_power[2]
    return {"weight": grad, "bias": grad / outputs, **tied}


_ABOUT = """Computes ``s * ({name}(input, weight) + bias)``. Other arguments are torch's.

Args:
    input: (batch, in, {sizes}), or without batch.
    weight: ({weight}, *kernel).
    bias: (out,) or None.
    scale_power: see `linear`.
"""


def _convolution(dims: int, transposed: bool = False) -> Callable[..., Tensor]:
    """Adds the row of a convolution."""
    fn: Callable[..., Tensor] = conv
    rule: Callable[..., Scales] = conv_scales
    name = f"conv{dims}d"
    weight_has = "out, in / groups"
    if transposed:
        fn = conv_transpose
        rule = conv_transpose_scales
        name = f"conv_transpose{dims}d"
        weight_has = "in, out / groups"
    settings = defaults_of(fn)
    for ours in ("input", "weight", "scales", "unit"):
        del settings[ours]
    settings |= {**CONSTRAINT, "scale_power": SQRT}
    names = tuple(settings)
    read = tuple(signature(rule).parameters)[2:]

    def op(
        input: Tensor,
        weight: Tensor,
        *args: Any,
        **named: Any,
    ) -> Tensor:
        theirs = by_name(name, names, args, named)
        s = rule(input, weight, **{key: theirs[key] for key in read if key in theirs})
        bias = theirs.pop("bias", None)
        if bias is not None:  # the product applies its weight's factor to the bias
            bias = scale_each(bias, s["output"], s["bias"] / s["weight"])
        for ours in ("constraint", "scale_power"):
            theirs.pop(ours, None)
        scales = (s["output"], s["input"], s["weight"])
        return fn(input, weight, bias, **theirs, scales=scales, unit=True)

    about = _ABOUT.format(
        name=name,
        sizes=", ".join(("depth", "height", "width")[-dims:]),
        weight=weight_has,
    )
    arguments = {"input": REQUIRED, "weight": REQUIRED, **settings}
    described(op, name, about, arguments, fn, rule)
    return row(rule, replaces=(getattr(F, name),))(op)


conv1d, conv2d, conv3d = (_convolution(dims) for dims in (1, 2, 3))
conv_transpose1d, conv_transpose2d, conv_transpose3d = (
    _convolution(dims, transposed=True) for dims in (1, 2, 3)
)
