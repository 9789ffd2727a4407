"""Convolutions as products: the same three GEMMs, scales and casts as in `fp8.products.matmul`.

For casts by rows or blocks an operand is viewed as a matrix in channels-last layout: feature maps
(positions, channels), a weight (outputs, kernel positions * inputs), and the weight of a transposed
convolution (inputs, kernel positions * outputs). The forward pass and the input gradient sum over
channels, the weight gradient over positions; one-sided padding from padding="same" counts as
positions. A recipe's rotation is not applied, because the three products do not sum over the same
positions.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from ..casts.counts import product_name
from ..casts.measuring import measuring
from ..casts.operands import Casts, casts_of
from ..common.compiler import in_graph
from .active import Scales, histories, product_recipe, static_exponents, warn_unsummed
from .matmul import ONES, Geometry, check_scales, measured, simulated

Ints = int | Sequence[int]


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Scales,
    geometry: Geometry,
    unit: bool,
) -> Tensor:
    """The convolution in this form. x: with or without a batch."""
    if x.ndim < weight.ndim:
        return _convolve(x.unsqueeze(0), weight, bias, scales, geometry, unit).squeeze(0)
    if (recipe := product_recipe(unit)) is None:
        return _uncast(x, weight, bias, scales, geometry)
    states = histories(recipe, "conv", x, weight, layer=True)
    if (pass_ := measuring()) is not None:
        return measured(pass_, states, x, weight, _uncast(x, weight, bias, scales, geometry))
    static = static_exponents(recipe, x, weight)
    name = product_name("conv", weight, recipe)
    casts = casts_of(recipe.text, True, name, static, False)
    warn_unsummed(recipe, "a convolution")
    return simulated(x, weight, bias, scales, casts, states, geometry)


@in_graph
def _uncast(
    x: Tensor, weight: Tensor, bias: Tensor | None, scales: Scales, geometry: Geometry
) -> Tensor:
    return simulated(x, weight, bias, scales, Casts(), [None] * 3, geometry)


def _per_dim(value: Ints, dims: int, what: str) -> list[int]:
    values = [value] * dims if isinstance(value, int) else list(value)
    values = values * dims if len(values) == 1 else values
    if len(values) != dims:
        raise ValueError(f"{what} needs {dims} numbers, got {value!r}")
    return values


def _padded(
    input: Tensor, weight: Tensor, padding: str | Ints, dilation: list[int]
) -> tuple[Tensor, list[int]]:
    """The input and the symmetric padding still to apply."""
    dims = weight.ndim - 2
    if not isinstance(padding, str):
        return input, _per_dim(padding, dims, "padding")
    if padding == "valid":
        return input, [0] * dims
    if padding != "same":
        raise ValueError(f"padding must be 'same', 'valid' or numbers, got {padding!r}")
    total = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
    odd = [t % 2 for t in total]
    if any(odd):  # the extra element is on the right, as in torch
        input = F.pad(input, [side for extra in reversed(odd) for side in (0, extra)])
    return input, [t // 2 for t in total]


def _dims(input: Tensor, weight: Tensor) -> int:
    """The number of convolved dimensions, determined by the weight."""
    dims = weight.ndim - 2
    if dims not in (1, 2, 3):
        raise ValueError(f"conv needs a weight of 3 to 5 dimensions, got {tuple(weight.shape)}")
    if input.ndim not in (dims + 1, dims + 2):
        raise ValueError(
            f"conv with a weight of shape {tuple(weight.shape)} needs an input of {dims + 1} or "
            f"{dims + 2} dimensions, got shape {tuple(input.shape)}"
        )
    return dims


def conv(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: str | Ints = 0,
    dilation: Ints = 1,
    groups: int = 1,
    *,
    scales: Scales = ONES,
    unit: bool = False,
) -> Tensor:
    """``s_y * conv(input, weight) + bias`` in one, two or three dimensions.

    weight: (out, in / groups, *kernel); its number of dimensions selects the convolution. The other
    arguments are those of `torch.nn.functional.conv1d`, conv2d and conv3d; scales, unit, dtypes and
    errors as in `fp8.products.matmul.linear`. The scale is applied to the weight, so a scale that
    is not a power of two rounds the weight once more, in its own dtype. The recipe is that of the
    enclosing `fp8.autocast`.
    """
    check_scales(scales)
    dims = _dims(input, weight)
    steps = _per_dim(dilation, dims, "dilation")
    strides = _per_dim(stride, dims, "stride")
    if padding == "same" and any(step != 1 for step in strides):
        raise ValueError(f"padding='same' needs stride 1, got {stride!r}")
    x, margins = _padded(input, weight, padding, steps)
    geometry = Geometry(strides, margins, steps, False, [0] * dims, groups)
    return _convolve(x, weight, bias, scales, geometry, unit)


def conv_transpose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Ints = 1,
    padding: Ints = 0,
    output_padding: Ints = 0,
    groups: int = 1,
    dilation: Ints = 1,
    *,
    scales: Scales = ONES,
    unit: bool = False,
) -> Tensor:
    """``s_y * conv_transpose(input, weight) + bias`` in one, two or three dimensions.

    weight: (in, out / groups, *kernel). The other arguments are those of
    `torch.nn.functional.conv_transpose1d`, 2d and 3d; scales and unit as in `conv`.
    """
    check_scales(scales)
    dims = _dims(input, weight)
    named = {"stride": stride, "padding": padding, "dilation": dilation}
    steps, margins, stretch = (_per_dim(value, dims, what) for what, value in named.items())
    extra = _per_dim(output_padding, dims, "output_padding")
    geometry = Geometry(steps, margins, stretch, True, extra, groups)
    return _convolve(input, weight, bias, scales, geometry, unit)
