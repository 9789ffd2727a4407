"""Layer norm over the channels of each pixel, in the memory format that it is given.

    y = (x - mean) / sqrt(var + eps) * weight + bias        mean, var: over the channels

Compiled code is made from the formulas below. Eager code on a CPU has torch's kernel for channels
that lie together, and for contiguous images the formulas, a few images at a time in the cache. On a
CUDA device with Triton it has the kernels in `fp8.layer_norm2d_kernels`: one pass forward and one
backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

from . import layer_norm2d_kernels as kernels
from .function import FIRST_LOOK, apply

__all__ = ["layer_norm2d"]

aten = torch.ops.aten

BLOCK = 16
"""Channels of which compiled code sums at once, each on a line of its own in memory."""


CHUNK = 1 << 17
"""Elements, in whole images, that eager code on a CPU goes through at once, within its cache."""


LARGE = 1 << 16
"""Elements of contiguous images from which on a few passes in the cache are quicker than two copies
that change places."""


def layer_norm2d(
    input: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-6
) -> Tensor:
    """`torch.nn.functional.layer_norm` over dimension 1, as in ConvNeXt.

    input: (batch, channels, ...), floating point, any strides, which the result has too where they
    are dense: contiguous stays contiguous and channels-last stays channels-last. weight, bias:
    (channels,) or None, of any floating-point dtype. eps: added to the variance.
    Computed in float32 (float64 for float64), the variance from the differences to the mean
    (compiled on CPUs, of channels-last bfloat16 to the first channel), and rounded once to the
    dtype of input, which the result has; so are the gradients, each to the dtype of its tensor.
    `torch.autocast` changes nothing. NaN and Inf make their pixel NaN.
    Raises ValueError for an input of fewer than two dimensions and for a weight or bias of another
    shape, TypeError for an input that is not floating point.
    """
    tensors = tuple(t for t in (input, weight, bias) if t is not None)
    if has_torch_function(tensors):  # a mode sees the call, as it does those of torch.nn.functional
        return handle_torch_function(layer_norm2d, tensors, input, weight, bias, eps)
    if (
        torch.compiler.is_compiling() and FIRST_LOOK.items
    ):  # it shows modes the calls of torch alone
        mode = FIRST_LOOK.items.pop()
        try:
            return mode.__torch_function__(layer_norm2d, (), (input, weight, bias, eps))
        finally:
            FIRST_LOOK.items.append(mode)
    _check(input, weight, bias)
    plain = input.is_cpu and input.element_size() > 2 and not torch.compiler.is_compiling()
    if plain and not _large(input):
        return _by_torch(input, weight, bias, eps)
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


def _large(x: Tensor) -> bool:
    """Whether ``x``, on a CPU, is of contiguous images of some size, of which torch's kernel would
    copy all to other places and back."""
    return x.dim() > 2 and x.numel() >= LARGE and x.is_contiguous() and kernels.fits(x)


def scripted(input: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """`layer_norm2d` for TorchScript, which has no autograd functions: torch's kernel, and a copy
    where the channels did not lie together."""
    last = input.movedim(1, -1)
    weight = None if weight is None else weight.to(input.dtype)
    bias = None if bias is None else bias.to(input.dtype)
    output = F.layer_norm(last, [last.size(-1)], weight, bias, eps).movedim(-1, 1)
    return output.contiguous() if input.is_contiguous() else output


class _LayerNorm2d(Function):
    """(output, mean, 1/sqrt(var + eps)); only the first is to be used, and has a gradient. The
    others are in the dtype of computation, with one channel."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if torch.compiler.is_compiling():
            return _normalized(x, weight, bias, eps)
        if kernels.take(x):
            return kernels.forward(x, weight, bias, eps)
        if x.is_cpu:
            return (_by_images if _large(x) else _native)(x, weight, bias, eps)
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
        elif x.is_cpu:
            chosen = _gradients_by_images if _large(x) else _native_gradients
            result = chosen(grad, x, mean, rstd, weight)
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


def _by_images(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`_normalized` of dense ``x``, a few images at a time, which stay in the cache."""
    y = torch.empty_like(x)
    mean, rstd = (wide(x, x.new_empty(len(x), 1, *x.shape[2:])) for _ in range(2))
    share = 1.0 / x.shape[1]
    of_w, of_b = (None if t is None else _across(x, t) for t in (weight, bias))
    for part, out, m, r in zip(*(_images(t, x) for t in (x, y, mean, rstd)), strict=True):
        value = wide(x, part)
        torch.sum(value, 1, keepdim=True, out=m).mul_(share)
        c = torch.sub(value, m, out=out if out.dtype == m.dtype else value)
        rest = c.sum(1, keepdim=True).mul_(share)
        c.sub_(rest)
        torch.sum(c.square(), 1, keepdim=True, out=r).mul_(share).add_(eps).rsqrt_()
        m.add_(rest)
        c.mul_(r)
        if of_w is not None:
            c.mul_(of_w)
        if of_b is not None:
            c.add_(of_b)
        if c is not out:
            out.copy_(c)
    return y, mean, rstd


def _gradients_by_images(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`_gradients` of dense ``x``, a few images at a time; that of the input in its dtype."""
    dx = torch.empty_like(x)
    dweight, dbias = (wide(x, x.new_zeros(x.shape[1])) for _ in range(2))
    share, others = 1.0 / x.shape[1], [d for d in range(x.dim()) if d != 1]
    of_w = None if weight is None else _across(x, weight)
    for g, part, m, r, out in zip(*(_images(t, x) for t in (grad, x, mean, rstd, dx)), strict=True):
        g, normal = wide(x, g), (wide(x, part) - m).mul_(r)
        both = g * normal
        dweight += both.sum(others)
        dbias += g.sum(others)
        if of_w is not None:
            g = g * of_w
            both.mul_(of_w)
        normal.mul_(both.sum(1, keepdim=True).mul_(share)).add_(g.sum(1, keepdim=True).mul_(share))
        torch.sub(g, normal, out=both).mul_(r)
        out.copy_(both)
    return dx, dweight, dbias


def _images(t: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    """``t`` in parts of as many images as are CHUNK elements of ``x``, at least one."""
    return t.split(max(1, CHUNK * len(x) // max(1, x.numel())))


def _by_torch(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """By torch's kernel, forward and backward, of 32 or 64 bits."""
    last = x.movedim(1, -1)
    y = F.layer_norm(last, last.shape[-1:], wide(x, weight), wide(x, bias), eps).movedim(-1, 1)
    return _laid_out_as(x, y)


def _native(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`_normalized` by torch's kernel. With 16-bit parameters it would keep 16-bit statistics."""
    last = x.movedim(1, -1)
    weight = x.new_ones(x.shape[1:2]) if weight is None else weight
    bias = x.new_zeros(x.shape[1:2]) if bias is None else bias
    result = aten.native_layer_norm.default(
        last, last.shape[-1:], wide(x, weight), wide(x, bias), eps
    )
    y, mean, rstd = (t.movedim(-1, 1) for t in result)
    return _laid_out_as(x, y), mean, rstd


def _native_gradients(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """`_gradients` by torch's kernel, which sums in the dtype that it is given, a few images at a
    time; that of the input in its dtype."""
    weight = wide(x, x.new_ones(x.shape[1:2]) if weight is None else weight)
    parts, dweight, dbias = [], torch.zeros_like(weight), torch.zeros_like(weight)
    for part in zip(*(_images(t, x) for t in (grad, x, mean, rstd)), strict=True):
        g, last, *statistics = (wide(x, t).movedim(1, -1) for t in part)
        dx, dw, db = aten.native_layer_norm_backward.default(
            g, last, last.shape[-1:], *statistics, weight, weight, [True, True, True]
        )
        parts.append(dx.movedim(-1, 1).to(x.dtype))
        dweight, dbias = dweight + dw, dbias + db
    return _laid_out_as(x, parts[0] if len(parts) == 1 else torch.cat(parts)), dweight, dbias


def _laid_out_as(x: Tensor, y: Tensor) -> Tensor:
    like = torch.empty_like(x)
    return y if y.stride() == like.stride() else like.copy_(y)
