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
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ..casts.casting import Spec, is_whole, rounded
from ..casts.counts import is_sampled, product_name
from ..casts.measuring import measuring
from ..casts.operands import Casts, casts_of, one_copy, with_copies
from ..casts.saved_operands import SharedCasts, saved_operands, shared_casts
from ..common.compiler import apply, in_graph
from ..context.active import layer_histories, product_recipe, static_exponents
from ..formats.format import dtype_name
from .matmul import ONES, check_scales, measured, save_both, to_autocast_dtype
from .summed import Geometry, Scales, warn_unsummed
from .summed import convolution as summed_convolution

aten = torch.ops.aten

Ints = int | Sequence[int]


def _cast(
    x: Tensor,
    spec: Spec | None,
    axis: int,
    history: Tensor | None = None,
    record: bool | None = None,
    *,
    weight: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Feature maps (batch, channels, *size), or a weight (first, second, *kernel), under a spec,
    and the scale factor as in `rounded`. axis: -1 sums over channels or second, -2 over positions
    or first."""
    if spec is None or spec.tile == (0, 0):
        return rounded(x, spec, axis, history, record)
    last = x.movedim(1, -1)
    y, _ = rounded(last.flatten(1) if weight else last.flatten(0, -2), spec, axis)
    return y.reshape(last.shape).movedim(-1, 1), None


class _Settings(NamedTuple):
    """The constants of a convolution. scales: of the output and of both gradients."""

    scales: Scales
    geometry: Geometry
    casts: Casts


class _Convolution(Function):
    """A convolution, or its transpose, with a scale for the output and for each of the two
    gradients.

    A scale multiplies the smaller tensor (the weight, or the weight's gradient) instead of the
    feature maps. `aten.convolution_backward` is itself differentiable. Arguments: the cast input
    and weight, and their scale factors; the operands that backward casts instead, or None; bias or
    None; the history of the gradient or None; `_Settings`; what is shared of the saved input.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        input: Tensor,
        weight: Tensor,
        scale_x: Tensor | None,
        scale_w: Tensor | None,
        other_input: Tensor | None,
        other_weight: Tensor | None,
        bias: Tensor | None,
        history: Tensor | None,
        how: _Settings,
        shared: SharedCasts | None,
    ) -> Tensor:
        weight = _times(weight, how.scales[0])
        return aten.convolution.default(input, weight, bias, *how.geometry)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, w, scale_x, scale_w, other_x, other_w, _, ctx.history, ctx.how, shared = inputs
        save_both(ctx, (x, scale_x, other_x), (w, scale_w, other_w), ctx.how.casts, shared)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, w = saved_operands(ctx, grad.dtype)
        needs_x, needs_w, _, _, _, _, needs_bias, *_ = ctx.needs_input_grad
        (_, s_dx, s_dw), geometry, casts = ctx.how
        for_x, for_w = casts.grad_for_a, casts.grad_for_b
        gradient = aten.convolution_backward.default
        one_call = needs_x and needs_w and not casts.a_again and one_copy(for_x, for_w)
        dx: Any = None
        dw: Any = None
        db = g = None
        if needs_x:
            g, _ = _cast(grad, for_x, -1, ctx.history, record=True)
            w_again, _ = _cast(w, casts.b_again, -1 if geometry.transposed else -2, weight=True)
            scaled = _times(w_again.to(grad.dtype), s_dx)
            wanted = [True, one_call, False]  # the weight's gradient does not need the weight
            dx, dw, _ = gradient(g, x.to(grad.dtype), scaled, None, *geometry, wanted)
        if needs_w and not one_call:
            if g is None or not one_copy(for_x, for_w):
                g, _ = _cast(grad, for_w, -2, ctx.history, record=True)
            x = _cast(x, casts.a_again, -2)[0].to(grad.dtype)
            _, dw, _ = gradient(g, x, w.to(grad.dtype), None, *geometry, [False, True, False])
        if dw is not None:
            dw = _times(dw, s_dw)
        if needs_bias:  # of the uncast gradient, as in fp8.products.matmul.linear
            db = _times(grad.sum([d for d in range(grad.ndim) if d != 1]), s_dw)
        return (dx, dw, *[None] * 4, db, *[None] * 3)


def _convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Scales,
    geometry: Geometry,
    unit: bool,
) -> Tensor:
    """Casts the operands and calls `_Convolution`. x: with or without a batch."""
    if x.ndim < weight.ndim:
        return _convolve(x.unsqueeze(0), weight, bias, scales, geometry, unit).squeeze(0)
    recipe = product_recipe(unit)
    uncast = partial(_simulated, x, weight, bias, scales, geometry, Casts(), [None] * 3, None)
    if recipe is None:
        return uncast()
    if (pass_ := measuring()) is not None:
        histories = layer_histories(recipe, "conv", x, weight)
        return measured(pass_, histories, x, weight, uncast())
    static = static_exponents(recipe, x, weight)
    name = product_name("conv", weight, recipe)
    casts = casts_of(recipe.text, True, name, static, None, False)
    histories = layer_histories(recipe, "conv", x, weight)
    if recipe.accumulate is not None and not is_sampled(name):
        if is_whole(recipe):
            like, _, bias = _of_one_dtype(x[:0], weight[:0], bias)
            given = (scales, geometry, casts, histories, recipe.sums, dtype_name(like.dtype))
            return summed_convolution(x, weight, bias, *given)
        warn_unsummed(recipe, "a convolution with scales by rows or blocks")
    shared = shared_casts(x, histories[0], casts.a, casts.a_again)
    return _simulated(x, weight, bias, scales, geometry, casts, histories, shared)


@in_graph
def _simulated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scales: Scales,
    geometry: Geometry,
    casts: Casts,
    histories: list[Any],
    shared: SharedCasts | None,
) -> Tensor:
    """Casts the operands and convolves their values."""
    of_x, of_w, of_grad = histories
    first, second, casts = with_copies(x, weight, casts)
    x, scale_x = _cast(x, casts.a, -1, of_x)
    weight, scale_w = _cast(weight, casts.b, -2 if geometry.transposed else -1, of_w, weight=True)
    x, weight, bias = _of_one_dtype(x, weight, bias)
    operands = (x, weight, scale_x, scale_w, first, second, bias, of_grad)
    how = _Settings(scales, geometry, casts)
    return apply(_Convolution, *operands, how, shared, written=of_grad)


def _of_one_dtype(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands in the dtype of `torch.autocast`. Raises ValueError for a bias of another dtype
    than the input; torch would drop its imaginary part."""
    x, weight, bias = to_autocast_dtype(x, weight, bias)
    if bias is not None and bias.dtype != x.dtype:
        raise ValueError(f"bias must have the dtype of the input, {x.dtype}, got {bias.dtype}")
    return x, weight, bias


def _times(x: Tensor, scale: float) -> Tensor:
    return x if scale == 1.0 else x * scale


def _per_dim(value: Ints, dims: int, what: str) -> list[int]:
    values = [value] * dims if isinstance(value, int) else list(value)
    values = values * dims if len(values) == 1 else values
    if len(values) != dims:
        raise ValueError(f"{what} needs {dims} numbers, got {value!r}")
    return values


def _padded(
    input: Tensor, weight: Tensor, padding: str | Ints, dilation: list[int]
) -> tuple[Tensor, list[int]]:
    """The input and the symmetric padding still to apply. "same" is resolved as in torch."""
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

    input: (batch, in, *size) or (in, *size). weight: (out, in / groups, *kernel); its number of
    dimensions selects the convolution. The other arguments are those of
    `torch.nn.functional.conv1d`, conv2d and conv3d.
    scales, unit, dtypes and errors: as in `fp8.products.matmul.linear`. The scale is applied to the
    weight, so a scale that is not a power of two rounds the weight once more, in its own dtype. The
    recipe is that of the enclosing `fp8.autocast`.
    """
    scales = check_scales(scales)
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
    scales = check_scales(scales)
    dims = _dims(input, weight)
    steps, margins, stretch, extra = (
        _per_dim(value, dims, what)
        for value, what in (
            (stride, "stride"),
            (padding, "padding"),
            (dilation, "dilation"),
            (output_padding, "output_padding"),
        )
    )
    geometry = Geometry(steps, margins, stretch, True, extra, groups)
    return _convolve(input, weight, bias, scales, geometry, unit)
