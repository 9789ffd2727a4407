"""Norms in low precision: input, weight and output in 16 bits, the statistics in float32.

On CUDA devices `torch.autocast` runs norms in float32, which moves 20 bytes per element instead of
4. These norms run in its 16-bit dtype, with autocast disabled inside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.types import Device

from ..casts.rotation import without_autocast
from ..products.matmul import to_autocast_dtype
from .layer_norm2d import layer_norm2d as over_channels
from .layer_norm2d import permuted, wide

__all__ = ["LayerNorm2d", "group_norm", "layer_norm", "layer_norm2d", "rms_norm"]


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`torch.nn.functional.layer_norm` in low precision.

    Mean and variance are computed in float32 and the output is rounded once. NaN or Inf makes its
    row NaN.

    Args:
        input: (..., *normalized_shape), floating point.
        normalized_shape: the dimensions to normalize over.
        weight, bias: normalized_shape, or None.
        eps: added to the variance.
        dtype: the dtype to which input, weight and bias are rounded, and of the output. None: the
            dtype of the enclosing `torch.autocast` of the input's device; without one, that of the
            input. float64 stays float64 unless a dtype is given.

    Returns:
        (..., *normalized_shape), in ``dtype``.

    Raises:
        TypeError: if ``dtype`` is not a torch.dtype.
    """
    shape, tensors = list(normalized_shape), (input, weight, bias)
    return _norm(lambda x, w, b: F.layer_norm(x, shape, w, b, eps), tensors, dtype, shape)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = 1e-5,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`torch.nn.functional.rms_norm` in low precision, as `layer_norm`.

    eps: added to the mean square; the default is timm's. None, the default of torch, is the machine
    epsilon of float32, the dtype of the statistics.
    """
    eps = torch.finfo(wide(input, input[:0]).dtype).eps if eps is None else eps
    return _norm(lambda x, w: F.rms_norm(x, list(normalized_shape), w, eps), (input, weight), dtype)


def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`torch.nn.functional.group_norm` in low precision, as `layer_norm`.

    input: (batch, channels, ...), as the result. weight, bias: (channels,) or None.
    """
    tensors, shape = (input, weight, bias), input.shape[1:2]
    return _norm(lambda x, w, b: F.group_norm(x, num_groups, w, b, eps), tensors, dtype, shape)


def layer_norm2d(
    input: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-6,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`fp8.norms.layer_norm2d.layer_norm2d` in low precision, as `layer_norm`.

    input: (batch, channels, ...), as the result, which has its memory format. weight, bias:
    (channels,) or None. Raises as both functions.
    """
    tensors, shape = (input, weight, bias), input.shape[1:2]
    return _norm(lambda x, w, b: over_channels(x, w, b, eps), tensors, dtype, shape)


def _norm(
    function: Callable[..., Tensor],
    tensors: tuple[Tensor | None, ...],
    dtype: torch.dtype | None,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """``function(*tensors)`` in low precision; the first tensor is the input, the others are
    parameters: as torch's kernel needs those of ``shape``, if given."""
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        raise TypeError(f"dtype is {dtype!r}; give a torch.dtype or None")
    low = to_autocast_dtype(*tensors)[0].dtype if dtype is None else dtype
    x, *parameters = (None if t is None else t.to(low) for t in tensors)
    assert x is not None
    if shape is not None:
        parameters = _with_wide_statistics(x, shape, *parameters)
    with without_autocast(x):
        return function(x, *parameters)


def _with_wide_statistics(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> list[Tensor | None]:
    """The parameters to pass to torch's kernels, which on a CPU save the statistics for the
    backward pass in their dtype. CUDA kernels save float32 and need equal dtypes."""
    if x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float16):
        return [weight, bias]
    weight = x.new_ones(shape) if weight is None else weight
    bias = x.new_zeros(shape) if bias is None else bias
    return [weight.float(), bias.float()]


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
            raise ValueError(f"LayerNorm2d has {channels} channels, its input {input.size(1)}")

    def forward(self, input: Tensor) -> Tensor:
        self.check_channels(input)
        if torch.jit.is_scripting():  # type: ignore[attr-defined]
            return permuted(input, self.weight, self.bias, self.eps)
        return over_channels(input, self.weight, self.bias, self.eps)
