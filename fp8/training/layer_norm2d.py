"""Layer norm over the channels of each pixel.

    y = (x - mean) / sqrt(var + eps) * weight + bias        mean, var: over the channels

Compiled code is generated from the formulas below. Eager code permutes, calls
`torch.nn.functional.layer_norm`, permutes back and, unless the input is channels-last, copies the
result to the memory format of the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function
from torch.types import Device

from ..common.compiler import in_memory
from ..torch_internals.autograd_functions import apply, same

BLOCK = 16
"""The number of channels that compiled code sums at once, each contiguous in memory."""


def layer_norm2d(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
) -> Tensor:
    """`torch.nn.functional.layer_norm` over dimension 1, as in ConvNeXt.

    input: (batch, channels, ...), floating point, any strides. weight, bias: (channels,) or None,
    any floating-point dtype. eps: added to the variance. The output and the gradient of the input
    have the memory format of the input (`torch.preserve_format`). In eager mode 16-bit statistics
    of the backward pass are those of torch; compiled the statistics are in float32 (float64 for
    float64). Each result is rounded once to the dtype of its tensor. `torch.autocast` has no
    effect. NaN or Inf makes its pixel NaN. Raises ValueError for an input of fewer than two
    dimensions and for a weight or bias of another shape, TypeError for an input that is not
    floating point.
    """
    tensors = (input, weight, bias)
    if has_torch_function(tensors):  # lets modes intercept it, like torch.nn.functional
        return handle_torch_function(layer_norm2d, tensors, input, weight, bias, eps)
    in_graph = torch.compiler.is_compiling()
    _check(input, weight, bias)
    if not in_graph:
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
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        weight = None if weight is None else weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    last = x.movedim(1, -1)
    y = torch.layer_norm(last, [last.size(-1)], weight, bias, eps).movedim(-1, 1)
    return _with_strides(y, _strides(x))


def _strides(x: Tensor) -> list[int]:
    """The strides of ``x`` under `torch.preserve_format`: its own, or dense ones in their order."""
    return list(torch.empty_like(x, device=torch.device("meta")).stride())


def _with_strides(value: Tensor, strides: list[int]) -> Tensor:
    """``value``, copied if its strides are others. `torch.func.vmap` allows no write of a batch to
    a tensor without one, so that ``value`` makes the tensor to copy to."""
    if list(value.stride()) == strides:
        return value
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
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.strides = _strides(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return _with_strides(grad, ctx.strides)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        return same(tangent)


class _LayerNorm2d(Function):
    """(output, mean, 1/sqrt(var + eps)), in a graph. Only the first is to be used and is
    differentiable; the others are in the dtype of computation, with one channel."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _normalized(x, weight, bias, eps)

    @staticmethod
    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]
    ) -> None:
        x, weight, bias, _ = inputs
        _, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        # Tensors only: in compiled code saved_tensors omits None.
        ctx.save_for_backward(
            x, mean, rstd, *(t for t in (weight, bias) if t is not None)
        )
        ctx.present = [t is not None for t in (weight, bias)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, mean, rstd, *parameters = ctx.saved_tensors
        weight = parameters[0] if ctx.present[0] else None
        bias = parameters[-1] if ctx.present[1] else None
        result = _gradients(grad, x, mean, rstd, weight)
        like = zip(result, (x, weight, bias), strict=True)
        return *(None if t is None else g.to(t.dtype) for g, t in like), None


def _wide(x: Tensor, value: Tensor) -> Tensor:
    """``value`` in the dtype in which a norm of ``x`` is computed."""
    return value.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _across(x: Tensor, value: Tensor) -> Tensor:
    """``value`` (channels,), in the dtype of computation, shaped to broadcast to ``x``."""
    return _wide(x, value).view(-1, *[1] * (x.ndim - 2))


def _statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """(m, d, 1/sqrt(var + eps)), where m + d is the mean of ``x`` over the channels: d, the mean of
    x - m, corrects the rounded mean m and the variance (corrected two-pass algorithm, Chan, Golub
    and LeVeque 1983)."""
    # Multiplies by 1/n, because compiled code repeats a division for each element.
    share = 1.0 / x.shape[1]
    mean = x.sum(1, keepdim=True) * share
    centred = x - mean
    correction = centred.sum(1, keepdim=True) * share
    var = (
        centred.square().sum(1, keepdim=True) * share - correction.square()
    ).clamp_min(0.0)
    return mean, correction, torch.rsqrt(var + eps)


def _statistics_by_blocks(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`_statistics`, in code that would otherwise add the channels one by one, with a larger error:
    the mean m of each block of BLOCK channels, the mean r of the remainder and its mean square,
    then combined over blocks (Chan, Golub and LeVeque 1983)."""
    blocks = torch.unflatten(x, 1, (BLOCK, -1)).unbind(1)
    share, of_all = 1.0 / BLOCK, BLOCK / x.shape[1]
    m = in_memory(sum(blocks[1:], blocks[0]) * share)
    centred = [block - m for block in blocks]
    squares = [c.square() for c in centred]
    r = in_memory(sum(centred[1:], centred[0]) * share)
    square = in_memory(sum(squares[1:], squares[0]) * share)
    mean = m.sum(1, keepdim=True) * of_all
    off = m - mean
    correction = (off + r).sum(1, keepdim=True) * of_all
    around = (square + off * (off + 2 * r)).sum(1, keepdim=True) * of_all
    var = (around - correction.square()).clamp_min(0.0)
    return mean, correction, torch.rsqrt(var + eps)


def _normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    in_graph = (
        torch.compiler.is_compiling() and not torch.compiler.is_exporting() and x.is_cpu
    )
    by_blocks = in_graph and x.is_contiguous() and x.shape[1] % BLOCK == 0
    mean, correction, rstd = (_statistics_by_blocks if by_blocks else _statistics)(
        _wide(x, x), eps
    )
    y = (_wide(x, x) - mean - correction) * rstd
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
    dweight, dbias = (
        (t.sum(pixels) if pixels else t).sum(0) for t in (grad * normal, grad)
    )
    g = grad if weight is None else grad * _across(x, weight)
    share = 1.0 / x.shape[1]
    along = normal * ((g * normal).sum(1, keepdim=True) * share)
    # The first operand, which has the strides of x, decides about those of the result.
    dx = (along - g + g.sum(1, keepdim=True) * share) * -rstd
    return dx, dweight, dbias


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
        device, dtype: those of weight and bias.

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
