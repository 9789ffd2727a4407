"""Norms in low precision: input, weight and output in 16 bits, the statistics in float32.

`torch.autocast` runs norms in float32 on CUDA devices: 20 bytes moved for each element instead of
4. These run in its 16-bit dtype, with autocast off inside. Their output may be in an FP8 format,
which the next product takes as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.types import Device

from ..casts.casting import spec_of, without_autocast
from ..common.compiler import apply
from ..common.validation import check_flag
from ..formats.format import Format, get_format
from ..formats.quantize import quantize_forward
from ..native.kernels import store
from ..products.matmul import to_autocast_dtype
from ..recipes.recipe import Cast
from ..tensors.scaled_tensor import ScaledTensor
from .layer_norm2d import layer_norm2d as over_channels
from .layer_norm2d import permuted, wide

__all__ = [
    "LayerNorm2d",
    "group_norm",
    "is_fast_norm",
    "layer_norm",
    "layer_norm2d",
    "rms_norm",
    "set_fast_norm",
]

OUTPUTS = ("e4m3", "e5m2")
"""The formats that a norm hands on: those that the FP8 products take."""


class _Fast:
    """The flag of `set_fast_norm`."""

    enabled = False


def set_fast_norm(enable: bool = True) -> None:
    """Whether every `LayerNorm2d` made from now on computes in autocast's dtype, as in timm.

    Those made before stay as they are; `fp8.low_precision_norms` is for the norms of a model that
    exists. Off at first.
    """
    check_flag("enable", enable)
    _Fast.enabled = enable


def is_fast_norm() -> bool:
    """What `set_fast_norm` has set."""
    return _Fast.enabled


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    output: str | Format | None = None,
) -> Tensor:
    """`torch.nn.functional.layer_norm` in low precision.

    input: (..., *normalized_shape), floating point. weight, bias: normalized_shape or None.
    dtype: what input, weight and bias are rounded to, and the output has; None is the dtype of the
    enclosing `torch.autocast` of input's device, and outside of one input's own. float64 stays
    float64 unless a dtype is given. Mean and variance are in float32 and the output is rounded
    once. NaN and Inf make their row NaN.
    output: "e4m3" or "e5m2": the output, rounded once more to that format without a scale
    (saturating, ties to even), as a `fp8.ScaledTensor` of one byte an element, which a product
    under a recipe with that format takes as it is. Its gradient passes the rounding unchanged.
    Compiled, it is a plain tensor of the same numbers: the compiler joins the cast to the norm.
    Raises ValueError for another output, TypeError for a dtype that is none of torch's.
    """
    shape = list(normalized_shape)
    return _norm(
        lambda x, *wb: F.layer_norm(x, shape, *_with_wide_statistics(x, shape, *wb), eps),
        (input, weight, bias),
        dtype,
        output,
    )


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    output: str | Format | None = None,
) -> Tensor:
    """`torch.nn.functional.rms_norm` in low precision; arguments as in `layer_norm`.

    eps: None is the machine epsilon of float32, the dtype of the statistics, and torch's default;
    the one here is timm's.
    """
    eps = torch.finfo(wide(input, input[:0]).dtype).eps if eps is None else eps
    return _norm(
        lambda x, w: F.rms_norm(x, list(normalized_shape), w, eps),
        (input, weight),
        dtype,
        output,
    )


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
    output: str | Format | None = None,
) -> Tensor:
    """`torch.nn.functional.group_norm` in low precision.

    input: (batch, channels, ...). weight, bias: (channels,) or None. The rest as in `layer_norm`.
    """
    return _norm(
        lambda x, *wb: F.group_norm(
            x, num_groups, *_with_wide_statistics(x, x.shape[1:2], *wb), eps
        ),
        (input, weight, bias),
        dtype,
        output,
    )


def layer_norm2d(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    dtype: torch.dtype | None = None,
    output: str | Format | None = None,
) -> Tensor:
    """Layer norm over the channels of each pixel, in low precision.

    input: (batch, channels, ...). weight, bias: (channels,) or None. The rest as in `layer_norm`.
    Strides and errors also as of `fp8.norms.layer_norm2d.layer_norm2d`.
    """

    def norm(x: Tensor, *wb: Tensor | None) -> Tensor:
        return over_channels(x, *_with_wide_statistics(x, x.shape[1:2], *wb), eps)

    return _norm(norm, (input, weight, bias), dtype, output)


def _norm(
    function: Callable[..., Tensor],
    tensors: tuple[Tensor | None, ...],
    dtype: torch.dtype | None,
    output: str | Format | None,
) -> Tensor:
    """``function(*tensors)``, of which the first is the input, in low precision."""
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        raise TypeError(f"dtype is {dtype!r}; give a torch.dtype or None")
    low = to_autocast_dtype(*tensors)[0].dtype if dtype is None else dtype
    x, *parameters = (None if t is None else t.to(low) for t in tensors)
    assert x is not None
    with without_autocast(x):
        y = function(x, *parameters)
    return y if output is None else _handed_on(y, output)


def _with_wide_statistics(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """The parameters for torch's kernels, which on a CPU keep mean and 1/sqrt(var) for the backward
    pass in the dtype of the parameters. Those of CUDA keep them in float32, and take no others."""
    if x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float16):
        return weight, bias
    weight = x.new_ones(shape) if weight is None else weight
    bias = x.new_zeros(shape) if bias is None else bias
    return weight.float(), bias.float()


def checked_output(output: str | Format) -> Format:
    """The format of that name. Raises ValueError for one that norms do not hand on."""
    format = get_format(output)
    if format.name not in OUTPUTS:
        raise ValueError(f"a norm hands on {' or '.join(OUTPUTS)}, not {format.name!r}")
    return format


def _handed_on(y: Tensor, output: str | Format) -> Tensor:
    format = checked_output(output)
    if torch.compiler.is_compiling():
        return quantize_forward(y, format)
    result: Tensor = apply(_HandedOn, y, format.name)
    return result


class _HandedOn(Function):
    """``y`` as bytes of a format, without a scale; its gradient passes unchanged."""

    @staticmethod
    def forward(y: Tensor, format: str) -> Tensor:
        data, scale, _ = store(y, spec_of(Cast(format=format)))
        return ScaledTensor(data, scale, y.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class LayerNorm2d(nn.LayerNorm):
    """`layer_norm2d` as a module, with timm's arguments, parameters and defaults; as there an
    `nn.LayerNorm`.

    Input and output: (batch, num_channels, ...), strides as of
    `fp8.norms.layer_norm2d.layer_norm2d`. affine: with weight and, unless bias is False, bias
    (num_channels,), which start at 1 and 0. device, dtype: of these. The output has the dtype of
    the input, under `torch.autocast` too; in a module made while `is_fast_norm`, autocast's dtype,
    but not scripted. `torch.export` takes it. Errors as of `layer_norm2d`, and ValueError for
    another number of channels.

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
        self.fast_norm = is_fast_norm()

    def check_channels(self, input: Tensor) -> None:
        """Raises ValueError for another number of channels, which no weight shows."""
        channels = self.normalized_shape[0]
        if not self.elementwise_affine and input.dim() > 1 and input.size(1) != channels:
            raise ValueError(f"LayerNorm2d has {channels} channels, its input {input.size(1)}")

    def forward(self, input: Tensor) -> Tensor:
        self.check_channels(input)
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return permuted(input, self.weight, self.bias, self.eps)
        if self.fast_norm:
            return layer_norm2d(input, self.weight, self.bias, self.eps)
        return over_channels(input, self.weight, self.bias, self.eps)
