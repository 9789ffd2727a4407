"""Layer norm over the channels of each pixel.

    y = (x - mean) / sqrt(var + eps) * weight + bias        mean, var: over the channels

Compiled code is generated from the formulas below. Eager code permutes, calls
`torch.nn.functional.layer_norm`, permutes back and, unless the input is channels-last, copies the
result to the memory format of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function
from torch.types import Device

from ..common.compiler import in_memory
from ..torch_internals.autograd_functions import apply, same

# torch declares no attributes of the context of an autograd function.
Context = Any

# Channels that compiled code sums at once, each contiguous in memory.
BLOCK = 16


def layer_norm2d(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """`torch.nn.functional.layer_norm` over dimension 1, as in ConvNeXt.

    input: (batch, channels, ...), floating point, any strides. weight, bias: (channels,) or None,
    any floating-point dtype. eps: added to the variance. The output and the gradient of the input
    have the memory format of the input (`torch.preserve_format`). In eager mode the
    backward pass uses torch's 16-bit statistics; compiled the statistics are in float32 (float64
    for float64). Each result is rounded once to the dtype of its tensor. `torch.autocast` has no
    effect. NaN or Inf makes its pixel NaN. Raises ValueError for an input of fewer than two
    dimensions and for a weight or bias of another shape, TypeError for an input that is not
    floating point.
    """
    tensors = (input, weight, bias)
    if has_torch_function(tensors):  # lets modes intercept it, like torch.nn.functional
        return handle_torch_function(layer_norm2d, tensors, input, weight, bias, eps)
    _check(input, weight, bias)
    if not torch.compiler.is_compiling():
        differentiable = torch.is_grad_enabled() and not _is_channels_last(input)
        x = apply(_FormatOfGradient, input) if differentiable else input
        return permuted(x, weight, bias, eps)
    # Also true in every graph of torch 2.11, whose compiler loses the gradients of what follows.
    if torch.compiler.is_exporting():
        return _normalized(input, weight, bias, eps)[0]
    output: Tensor = apply(_LayerNorm2d, input, weight, bias, eps)[0]
    return output


def _check(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    if input.ndim < 2:
        raise ValueError(
            f"layer_norm2d takes (batch, channels, ...), got {input.ndim} dimensions"
        )
    if not input.dtype.is_floating_point:
        raise TypeError(f"layer_norm2d takes a floating-point input, got {input.dtype}")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.shape != input.shape[1:2]:
            raise ValueError(
                f"{name} must have shape ({input.shape[1]},), got {tuple(value.shape)}"
            )


def permuted(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """`layer_norm2d` by torch's kernel, which takes parameters in the dtype of x, or in float32 for
    16-bit x; also works in TorchScript, where only the output has the memory format of x."""
    other = (weight is not None and weight.dtype != x.dtype) or (
        bias is not None and bias.dtype != x.dtype
    )
    if other:
        dtype = torch.float32
        if x.dtype == torch.float64:
            dtype = torch.float64
        if weight is not None:
            weight = weight.to(dtype)
        if bias is not None:
            bias = bias.to(dtype)
    last = x.movedim(1, -1)
    y = torch.layer_norm(last, [last.size(-1)], weight, bias, eps).movedim(-1, 1)
    return _with_strides(y, _strides(x))


def _strides(x: Tensor) -> list[int]:
    """The strides of ``x`` under `torch.preserve_format`: its own, or dense ones in their order."""
    return list(torch.empty_like(x, device=torch.device("meta")).stride())


def _with_strides(value: Tensor, strides: list[int]) -> Tensor:
    """``value``, copied if its strides are others."""
    if list(value.stride()) == strides:
        return value
    # torch.func.vmap allows no write of a batch to a tensor without one, so that the batched
    # tensor makes the one to copy to.
    return value.new_empty_strided(value.size(), strides).copy_(value)


def _is_channels_last(x: Tensor) -> bool:
    """Whether outputs of `permuted` and gradients of its input need no copy."""
    strides, expected = _strides(x), 1
    for dim in (1, *range(x.ndim - 1, 1, -1), 0):
        if strides[dim] != expected:
            return False
        expected *= max(x.shape[dim], 1)
    return True


class _FormatOfGradient(Function):
    """``x``, whose gradient gets the memory format of ``x``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return same(x)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.strides = _strides(inputs[0])

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        return _with_strides(grad, ctx.strides)

    @staticmethod
    def jvp(ctx: Context, tangent: Tensor) -> Tensor:
        return same(tangent)


class _LayerNorm2d(Function):
    """(output, mean, 1/sqrt(var + eps)), in a graph. Only the first is to be used and is
    differentiable; the others are in the dtype of computation, with one channel."""

    # Statistics are outputs, as a function with ``setup_context`` saves inputs and outputs alone.

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _normalized(x, weight, bias, eps)

    @staticmethod
    def setup_context(
        ctx: Context,
        inputs: tuple[Tensor, Tensor | None, Tensor | None, float],
        output: tuple[Tensor, ...],
    ) -> None:
        x, weight, bias, _ = inputs
        _, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        # Tensors only: in compiled code saved_tensors omits None.
        parameters = [t for t in (weight, bias) if t is not None]
        ctx.save_for_backward(x, mean, rstd, *parameters)
        ctx.has_weight, ctx.has_bias = weight is not None, bias is not None

    @staticmethod
    def backward(ctx: Context, grad: Tensor, *_: object) -> tuple[Tensor | None, ...]:
        x, mean, rstd, *parameters = ctx.saved_tensors
        weight = bias = None
        if ctx.has_weight:
            weight = parameters[0]
        if ctx.has_bias:
            bias = parameters[-1]
        dx, dweight, dbias = _gradients(grad, x, mean, rstd, weight)
        return _like(x, dx), _like(weight, dweight), _like(bias, dbias), None


def _like(tensor: Tensor | None, gradient: Tensor) -> Tensor | None:
    """The gradient of ``tensor`` in its dtype."""
    if tensor is None:
        return None
    return gradient.to(tensor.dtype)


def _wide(x: Tensor, value: Tensor) -> Tensor:
    """``value`` in the dtype in which a norm of ``x`` is computed."""
    return value.to(torch.promote_types(x.dtype, torch.float32))


def _across(x: Tensor, value: Tensor) -> Tensor:
    """``value`` (channels,), in the dtype of computation, shaped to broadcast to ``x``."""
    return _wide(x, value).view(-1, *[1] * (x.ndim - 2))


def _statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(m, d, 1/sqrt(var + eps)), where m + d is the mean of ``x`` over the channels."""
    # d, the mean of x - m, corrects the rounded mean m and the variance: the corrected two-pass
    # algorithm of Chan, Golub and LeVeque (1983). At a mean of 1000 standard deviations its error
    # is 1e-7 of the output; the error of torch's norms is 3e-5 and more.
    # Multiplies by 1/n, because compiled code repeats a division for each element.
    share = 1.0 / x.shape[1]
    mean = x.sum(1, keepdim=True) * share
    centred = x - mean
    correction = centred.sum(1, keepdim=True) * share
    square = centred.square().sum(1, keepdim=True) * share
    var = (square - correction.square()).clamp_min(0.0)
    return mean, correction, torch.rsqrt(var + eps)


def _statistics_by_blocks(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`_statistics` from the statistics of blocks of BLOCK channels: the mean m of a block, the
    mean r of the remainder and its mean square (Chan, Golub and LeVeque 1983)."""
    # Inductor adds contiguous channels one by one, with a larger error.
    blocks = torch.unflatten(x, 1, (BLOCK, -1)).unbind(1)

    def mean_of(parts: Sequence[Tensor]) -> Tensor:
        return in_memory(sum(parts[1:], parts[0]) * (1.0 / BLOCK))

    of_all = BLOCK / x.shape[1]
    m = mean_of(blocks)
    centred = [block - m for block in blocks]
    r = mean_of(centred)
    square = mean_of([c.square() for c in centred])
    mean = m.sum(1, keepdim=True) * of_all
    off = m - mean
    correction = (off + r).sum(1, keepdim=True) * of_all
    around = (square + off * (off + 2 * r)).sum(1, keepdim=True) * of_all
    var = (around - correction.square()).clamp_min(0.0)
    return mean, correction, torch.rsqrt(var + eps)


def _normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    wide, statistics = _wide(x, x), _statistics
    in_graph = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    if in_graph and x.is_cpu and x.is_contiguous() and x.shape[1] % BLOCK == 0:
        statistics = _statistics_by_blocks
    mean, correction, rstd = statistics(wide, eps)
    y = (wide - mean - correction) * rstd
    if weight is not None:
        y = y * _across(x, weight)
    if bias is not None:
        y = y + _across(x, bias)
    return y.to(x.dtype), mean + correction, rstd


def _gradients(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, weight and bias, in the dtype of computation.

    With n = (x - mean) rstd and g = grad weight: rstd (g - mean(g) - n mean(g n)), means over
    channels; grad n and grad, summed over the pixels.
    """
    grad, normal = _wide(x, grad), (_wide(x, x) - mean) * rstd
    # Summed per image first, so that inductor on CPUs works on one image in the cache.
    pixels = [*range(2, x.ndim)]
    dweight, dbias = grad * normal, grad
    if pixels:  # without dimensions, torch sums over all
        dweight, dbias = dweight.sum(pixels), dbias.sum(pixels)
    g = grad
    if weight is not None:
        g = grad * _across(x, weight)
    share = 1.0 / x.shape[1]
    along = normal * ((g * normal).sum(1, keepdim=True) * share)
    # The first operand, which has the strides of x, decides about those of the result.
    dx = (along - g + g.sum(1, keepdim=True) * share) * -rstd
    return dx, dweight.sum(0), dbias.sum(0)


class LayerNorm2d(nn.LayerNorm):
    """`layer_norm2d` as a module, a subclass of `nn.LayerNorm` with timm's parameters and defaults.

    Input and output are (batch, num_channels, ...), of one dtype, under `torch.autocast` too;
    `fp8.apply_low_precision_layernorm` changes that. The output and the gradient of the input have
    the memory format of the input. TorchScript, where the gradient may have another one, and
    `torch.export` are supported.

    Args:
        num_channels: the number of channels.
        eps: added to the variance.
        affine: whether to have a weight, initially 1, and a bias, initially 0: (num_channels,).
        bias: False omits the bias.
        device, dtype: of weight and bias.

    Raises:
        ValueError, TypeError: as `layer_norm2d`; ValueError for another number of channels.

    >>> x = torch.randn(2, 8, 4, 4).to(memory_format=torch.channels_last)
    >>> LayerNorm2d(8)(x).is_contiguous(memory_format=torch.channels_last)
    True
    """

    def __init__(
        self,
        num_channels: int,
        eps: float = 1e-6,
        affine: bool = True,
        *,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_channels, eps, affine, bias, device=device, dtype=dtype)

    def check_channels(self, input: Tensor) -> None:
        """Raises ValueError for another number of channels, which no weight would reveal."""
        channels = self.normalized_shape[0]
        if not self.elementwise_affine and input.ndim > 1 and input.size(1) != channels:
            raise ValueError(
                f"LayerNorm2d has {channels} channels, its input {input.size(1)}"
            )

    def forward(self, input: Tensor) -> Tensor:
        self.check_channels(input)
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return permuted(input, self.weight, self.bias, self.eps)
        return layer_norm2d(input, self.weight, self.bias, self.eps)
