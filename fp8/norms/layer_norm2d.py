"""Layer norm over the channels of each pixel.

    y = (x - mean) / sqrt(var + eps) * weight + bias        mean, var: over the channels

Compiled code is made from the formulas below. Eager code on a CPU is a permutation,
`torch.nn.functional.layer_norm` and the inverse permutation; on a CUDA device with Triton it is the
kernels in `fp8.norms.layer_norm2d_kernels`: one pass forward and one backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function

from ..common.compiler import FIRST_LOOK, apply
from . import layer_norm2d_kernels as kernels

__all__ = ["layer_norm2d"]

BLOCK = 16
"""Channels of which compiled code sums at once, each on a line of its own in memory."""


def layer_norm2d(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """`torch.nn.functional.layer_norm` over dimension 1, as in ConvNeXt.

    input: (batch, channels, ...), floating point, any strides. weight, bias: (channels,) or None,
    of any floating-point dtype. eps: added to the variance.
    In eager mode on a CPU this is permute, layer_norm, permute, as in timm, with torch's autograd:
    the channels of the output and of the gradient of input lie together, and 16-bit statistics of
    the backward pass are torch's. Compiled and on CUDA devices the strides are those of input where
    it is dense, and the statistics are in float32 (float64 for float64; compiled on CPUs, of
    channels-last bfloat16, from the differences to the first channel). Each result is rounded once
    to the dtype of its tensor. `torch.autocast` changes nothing. NaN and Inf make their pixel NaN.
    Raises ValueError for an input of fewer than two dimensions and for a weight or bias of another
    shape, TypeError for an input that is not floating point.
    """
    tensors = (input, weight, bias)
    if has_torch_function(tensors):  # a mode sees the call, as it does those of torch.nn.functional
        return handle_torch_function(layer_norm2d, tensors, input, weight, bias, eps)
    compiling = torch.compiler.is_compiling()
    if input.is_cpu and not compiling:
        try:
            return permuted(input, weight, bias, eps)
        except (IndexError, RuntimeError):
            _check(input, weight, bias)
            raise
    if compiling and FIRST_LOOK.items:  # the compiler shows modes the calls of torch alone
        mode = FIRST_LOOK.items.pop()
        try:
            return mode.__torch_function__(layer_norm2d, (), (input, weight, bias, eps))
        finally:
            FIRST_LOOK.items.append(mode)
    _check(input, weight, bias)
    # True in every graph of torch 2.11 too: its compiler loses the gradients of what comes after.
    if torch.compiler.is_exporting():
        return _normalized(input, weight, bias, eps)[0]
    output: Tensor = apply(_LayerNorm2d, input, weight, bias, eps)[0]
    return output


def _check(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    if input.dim() < 2:
        raise ValueError(f"layer_norm2d takes (batch, channels, ...), got {input.dim()} dimensions")
    if not input.is_floating_point():
        raise TypeError(f"layer_norm2d takes a floating-point input, got {input.dtype}")
    for name, value in (("weight", weight), ("bias", bias)):
        if value is not None and value.shape != input.shape[1:2]:
            raise ValueError(
                f"{name} must have shape ({input.shape[1]},), got {tuple(value.shape)}"
            )


def permuted(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`layer_norm2d` by torch's kernel, in TorchScript too.

    It takes parameters of the dtype of x, and for 16 bits of float32. permute costs less than
    movedim.
    """
    other = (weight is not None and weight.dtype != x.dtype) or (
        bias is not None and bias.dtype != x.dtype
    )
    if other:
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        weight = None if weight is None else weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    image = x.dim() == 4
    last = x.permute(0, 2, 3, 1) if image else x.movedim(1, -1)
    y = torch.layer_norm(last, [last.size(-1)], weight, bias, eps)
    return y.permute(0, 3, 1, 2) if image else y.movedim(-1, 1)


class _LayerNorm2d(Function):
    """(output, mean, 1/sqrt(var + eps)); only the first is to be used, and has a gradient. The
    others are in the dtype of computation, with one channel."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not torch.compiler.is_compiling() and kernels.take(x):
            return kernels.forward(x, weight, bias, eps)
        return _normalized(x, weight, bias, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        x, weight, bias, ctx.eps = inputs
        _, mean, rstd = output
        ctx.mark_non_differentiable(mean, rstd)
        # Tensors alone: compiled, saved_tensors leaves out None.
        ctx.save_for_backward(x, mean, rstd, *(t for t in (weight, bias) if t is not None))
        ctx.present = [t is not None for t in (weight, bias)]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, mean, rstd, *rest = ctx.saved_tensors
        weight = rest[0] if ctx.present[0] else None
        bias = rest[-1] if ctx.present[1] else None
        if torch.compiler.is_compiling():
            result = _gradients(grad, x, mean, rstd, weight)
        elif torch.is_grad_enabled():  # a gradient that will be differentiated again
            mean, rest, rstd = _statistics(wide(x, x), ctx.eps)
            result = _gradients(grad, x, mean + rest, rstd, weight)
        elif kernels.take(x):
            result = kernels.backward(grad, x, mean, rstd, weight)
        else:
            result = _gradients(grad, x, mean, rstd, weight)
        like = zip(result, (x, weight, bias), strict=True)
        return *(None if t is None else g.to(t.dtype) for g, t in like), None


def wide(x: Tensor, value: Any) -> Any:
    """``value`` in the dtype in which a norm of ``x`` is computed; None stays None."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return None if value is None else value.to(dtype)


def _across(x: Tensor, value: Tensor) -> Any:
    """``value`` (channels,), in the dtype of computation, to be broadcast to ``x``."""
    return wide(x, value).view(-1, *[1] * (x.dim() - 2))


def _statistics(x: Tensor, eps: float, near: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(m, d, 1/sqrt(var + eps)), where m + d is the mean over the channels of ``x``.

    m is ``near``, or the mean as a sum of n numbers has it; d, the mean of x - m, is what that
    lacks, and corrects the variance too (Chan, Golub and LeVeque 1983, the corrected two-pass
    algorithm).
    """
    # A product with 1/n, not a division by n: compiled code does it once more for each element.
    share = 1.0 / x.shape[1]
    mean = x.sum(1, keepdim=True) * share if near is None else near
    centred = x - mean
    rest = centred.sum(1, keepdim=True) * share
    var = (centred.square().sum(1, keepdim=True) * share - rest.square()).clamp_min(0.0)
    return mean, rest, torch.rsqrt(var + eps)


def _statistics_by_blocks(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """`_statistics`, channels BLOCK at a time: their mean m, the mean r of what is left, and the
    mean square of that; then those of all blocks together (Chan, Golub and LeVeque 1983).

    Compiled code goes through contiguous memory on BLOCK lines side by side for the first of these,
    where sums over all channels would have it jump from each to the next.
    """
    blocks = torch.unflatten(x, 1, (BLOCK, -1)).unbind(1)
    share, of_all = 1.0 / BLOCK, BLOCK / x.shape[1]
    m = _kept(sum(blocks[1:], blocks[0]) * share)
    centred = [block - m for block in blocks]
    squares = [c.square() for c in centred]
    r = _kept(sum(centred[1:], centred[0]) * share)
    square = _kept(sum(squares[1:], squares[0]) * share)
    mean = m.sum(1, keepdim=True) * of_all
    off = m - mean
    rest = (off + r).sum(1, keepdim=True) * of_all
    around = (square + off * (off + 2 * r)).sum(1, keepdim=True) * of_all
    var = (around - rest.square()).clamp_min(0.0)
    return mean, rest, torch.rsqrt(var + eps)


def _kept(value: Tensor) -> Tensor:
    """``value``, just computed: torch's compiler writes what a strided view is of to memory, and
    computes it no second time."""
    return value.as_strided(value.shape, value.stride())


def _once_a_pixel(value: Tensor) -> Tensor:
    """``value``, one for each pixel, times an int16 that is 1 or, of NaN, 0: torch's compiler for
    CPUs has no vectors of int16, and so finishes it for one pixel before it goes to the next."""
    return _kept(value * (value == value).to(torch.int16))


def _compiled_statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(m, d, m + d, 1/sqrt(var + eps)) of ``x`` in its dtype, see `_statistics`, as torch's
    compiler for CPUs makes fast loops of them.

    It would take the root again at every element. Where the channels lie together all of a pixel is
    done at once, but for 16 bits: rounding to them is long enough to hold up the next pixel. There
    the first channel is near enough to the mean for bfloat16, and saves a pass: with n channels the
    variance is good to 2 n roundings of float32, however far off that channel is. Contiguous
    bfloat16 has m + d in one number of float32, and d = 0: three lines of as many pixels and those
    of x and y do not fit in the nearest cache.
    """
    wider = wide(x, x)
    if x.movedim(1, -1).is_contiguous():
        if x.element_size() > 2:
            mean, rest, rstd = _statistics(wider, eps)
            return mean, rest, _once_a_pixel(mean + rest), _once_a_pixel(rstd)
        near = wider[:, :1] if x.dtype == torch.bfloat16 else None
        mean, rest, rstd = _statistics(wider, eps, near)
        return mean, rest, mean + rest, _kept(rstd)
    by_blocks = x.is_contiguous() and x.shape[1] % BLOCK == 0
    mean, rest, rstd = (_statistics_by_blocks if by_blocks else _statistics)(wider, eps)
    if x.dtype == torch.bfloat16:
        both = _kept(mean + rest)
        return both, torch.zeros_like(both), both, _kept(rstd)
    return mean, rest, mean + rest, _kept(rstd)


def _normalized(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    if torch.compiler.is_compiling() and not torch.compiler.is_exporting() and x.is_cpu:
        mean, rest, both, rstd = _compiled_statistics(x, eps)
    else:
        mean, rest, rstd = _statistics(wide(x, x), eps)
        both = mean + rest
    y = (wide(x, x) - mean - rest) * rstd
    if weight is not None:
        y = y * _across(x, weight)
    if bias is not None:
        y = y + _across(x, bias)
    return y.to(x.dtype), both, rstd


def _gradients(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of input, weight and bias, in the dtype of computation.

    With n = (x - mean) rstd and g = grad weight: rstd (g - mean(g) - n mean(g n)), means over the
    channels; grad n and grad, summed over the pixels.
    """
    grad, normal = wide(x, grad), (wide(x, x) - mean) * rstd
    # By images first: torch's compiler for CPUs then stays within one that is in the cache.
    pixels = [*range(2, x.dim())]
    dweight, dbias = ((t.sum(pixels) if pixels else t).sum(0) for t in (grad * normal, grad))
    g = grad if weight is None else grad * _across(x, weight)
    share = 1.0 / x.shape[1]
    along = normal * ((g * normal).sum(1, keepdim=True) * share)
    dx = (g - g.sum(1, keepdim=True) * share - along) * rstd
    return dx, dweight, dbias
