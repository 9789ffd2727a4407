"""Pooling in 1, 2 and 3 dimensions, and interpolation.

The rules assume uncorrelated elements in a window and ignore padding. The second moment of an input
gradient is the fraction of its squared gradient that a window propagates, times the number of
outputs per input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.constant import constant
from ..rules.quadrature import absolute_moment, largest_square
from ..rules.table import Scales, tie
from .convolution import each
from .generated import CONSTRAINT, REQUIRED, described, unary, with_first

Sizes = int | Sequence[int]
Wanted = int | Sequence[int | None] | None
Constraint = str | None


def _outputs_per_input(
    dims: int,
    input: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
) -> float:
    kernel = each(kernel_size, dims)
    steps = each(stride, dims) if stride else kernel  # None and () are the kernel
    settings = (input.shape[-dims:], kernel, steps, each(padding, dims), each(dilation, dims))
    ratio = 1.0
    for size, k, step, pad, d in zip(*settings, strict=True):
        room = size + 2 * pad - d * (k - 1) - 1
        step = step or 1  # torch rejects 0
        count = (room + step - 1 if ceil_mode else room) // step + 1
        if ceil_mode and (count - 1) * step >= size + pad:
            count -= 1  # torch drops windows in the right padding
        ratio *= max(1, count) / max(1, size)
    return ratio


def _window(dims: int, input: Tensor, kernel_size: Sizes, padding: Sizes = 0) -> int:
    """The number of elements in a window; with ``ceil_mode`` a kernel may exceed its input."""
    sizes = zip(input.shape[-dims:], each(kernel_size, dims), each(padding, dims), strict=True)
    return math.prod([min(kernel, size + 2 * pad) for size, kernel, pad in sizes])


def _averaged(window: float, ratio: float, divisor: float, constraint: Constraint) -> Scales:
    """A sum of ``window`` elements divided by ``divisor``, with ``ratio`` outputs per input."""
    output = divisor / window**0.5
    return tie(constraint, output=output, input=output / ratio**0.5)


def _largest(window: int, ratio: float, constraint: Constraint) -> Scales:
    """The largest of ``window`` elements, which receives the whole gradient."""
    output = constant(largest_square, index(window)) ** -0.5  # may be symbolic
    return tie(constraint, output=output, input=ratio**-0.5)


def avg_pool_scales(
    dims: int,
    input: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    ceil_mode: bool = False,
    divisor_override: int | None = None,
    constraint: Constraint = "to_output_scale",
) -> Scales:
    """The mean of n elements has RMS 1/sqrt(n); the gradient of a window has norm 1/sqrt(n)."""
    window = _window(dims, input, kernel_size, padding)
    ratio = _outputs_per_input(dims, input, kernel_size, stride, padding, 1, ceil_mode)
    return _averaged(window, ratio, divisor_override or window, constraint)


def max_pool_scales(
    dims: int,
    input: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
    constraint: Constraint = "to_output_scale",
) -> Scales:
    """1/RMS of the largest of n standard normal values, which receives the window's whole
    gradient."""
    ratio = _outputs_per_input(dims, input, kernel_size, stride, padding, dilation, ceil_mode)
    return _largest(_window(dims, input, kernel_size), ratio, constraint)


def lp_pool_scales(
    dims: int,
    input: Tensor,
    norm_type: float,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    ceil_mode: bool = False,
    constraint: Constraint = "to_output_scale",
) -> Scales:
    """1/RMS of the p-norm of n elements, the p-th root of n E(abs(x)^p): sqrt(n) for p = 2.

    The gradient of a window is (|x| / norm)^(p - 1), of norm 1 for p = 2.
    """
    window, p = _window(dims, input, kernel_size), float(norm_type)
    if not 0 < p < math.inf:
        raise ValueError(f"norm_type is a positive number, got {norm_type}")
    norm = (window * absolute_moment(p)) ** (1 / p)
    share = window * absolute_moment(2 * p - 2) / norm ** (2 * p - 2)
    ratio = _outputs_per_input(dims, input, kernel_size, stride, 0, 1, ceil_mode)
    return tie(constraint, output=1 / norm, input=(share * ratio) ** -0.5)


def _adaptive_window(dims: int, input: Tensor, output_size: Any) -> tuple[float, float]:
    """(inputs per output, outputs per input)."""
    sizes = [output_size] * dims if output_size is None else each(output_size, dims)
    window, ratio = 1.0, 1.0
    for size, wanted in zip(input.shape[-dims:], sizes, strict=True):
        share = 1.0 if wanted is None else max(1, size) / max(1, wanted)
        window *= max(1.0, share)
        ratio /= share
    return window, ratio


def adaptive_avg_pool_scales(
    dims: int, input: Tensor, output_size: Wanted, constraint: Constraint = "to_output_scale"
) -> Scales:
    """As `avg_pool_scales`, with windows of input size over output size."""
    window, ratio = _adaptive_window(dims, input, output_size)
    return _averaged(window, ratio, window, constraint)


def adaptive_max_pool_scales(
    dims: int, input: Tensor, output_size: Wanted, constraint: Constraint = "to_output_scale"
) -> Scales:
    """As `max_pool_scales`, with windows of input size over output size."""
    window, ratio = _adaptive_window(dims, input, output_size)
    return _largest(math.ceil(window), ratio, constraint)


_WINDOW = {"kernel_size": REQUIRED, "stride": None, "padding": 0}
_AVERAGE = {**_WINDOW, "ceil_mode": False, "count_include_pad": True}
_LARGEST = {**_WINDOW, "dilation": 1, "ceil_mode": False, "return_indices": False}
_NORM = {"norm_type": REQUIRED, "kernel_size": REQUIRED, "stride": None, "ceil_mode": False}
_SIZE = {"output_size": REQUIRED}

#: torch's name, with or without the number of dimensions -> the rule; torch's arguments after the
#: first, those of the rule's first.
_KINDS: dict[str, tuple[Callable[..., Scales], dict[str, Any]]] = {
    "avg_pool": (avg_pool_scales, {**_AVERAGE, "divisor_override": None}),
    "avg_pool1d": (avg_pool_scales, _AVERAGE),
    "max_pool": (max_pool_scales, _LARGEST),
    "lp_pool": (lp_pool_scales, _NORM),
    "adaptive_avg_pool": (adaptive_avg_pool_scales, _SIZE),
    "adaptive_max_pool": (adaptive_max_pool_scales, {**_SIZE, "return_indices": False}),
}

#: torch's arguments that no rule reads.
_UNREAD = ("return_indices", "count_include_pad")

_DOCUMENTATION = """Computes ``s * {name}(input)``, with torch's arguments; indices are torch's.

Args:
    input: (batch, channels, ...) or (channels, ...) with {dims} more dimensions, floating point.
    constraint: see `unit_scaling.constraints`.
"""


def _pool(kind: str, dims: int) -> Callable[..., Any]:
    name = f"{kind}{dims}d"
    rule_of, settings = _KINDS.get(name) or _KINDS[kind]
    settings = {**settings, **CONSTRAINT}
    read = {key: value for key, value in settings.items() if key not in _UNREAD}
    rule = with_first(rule_of, dims, f"{name}_scales", rule_of.__doc__ or "")
    described(rule, rule.__name__, rule.__doc__, {"input": REQUIRED, **read}, rule_of)
    about = _DOCUMENTATION.format(name=name, dims=dims)
    return unary(getattr(F, name), rule, about, settings, name=name)


def _three(kind: str) -> list[Callable[..., Any]]:
    return [_pool(kind, dims) for dims in (1, 2, 3)]


# These have no return_indices and return one tensor.
_averages: Callable[[str], list[Callable[..., Tensor]]] = _three

adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = _averages("adaptive_avg_pool")
adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = _three("adaptive_max_pool")
avg_pool1d, avg_pool2d, avg_pool3d = _averages("avg_pool")
lp_pool1d, lp_pool2d, lp_pool3d = _averages("lp_pool")
max_pool1d, max_pool2d, max_pool3d = _three("max_pool")


# Interpolation: weighted sums of neighbours, with the weights of torch

# Larger sizes are approximated by this one, with the same ratio.
_LARGE = 256

# Modes of one dimension; 2D modes are measured with the other dimension of size 1.
_LINES = ("nearest", "nearest-exact", "area", "linear")
_ALONG = {"bilinear": "linear", "trilinear": "linear"}


def _squared_weights(size: int, wanted: int, mode: str, align_corners: bool | None) -> float:
    """The sum of the squared weights of ``wanted`` elements interpolated from ``size``."""
    eye = torch.eye(size, dtype=torch.float64, device="cpu")[:, None]
    line = mode in _LINES
    shape = (wanted,) if line else (1, wanted)
    values = eye if line else eye[:, None]
    weights = F.interpolate(values, shape, mode=mode, align_corners=align_corners)
    return float(weights.square().sum())


def interpolate_scales(
    input: Tensor,
    size: Sizes | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    constraint: Constraint = "to_output_scale",
) -> Scales:
    """1/RMS of weighted sums with torch's weights; inputs that are copied sum their gradients."""
    dims = max(1, input.ndim - 2)
    sizes = input.shape[-dims:]
    if size is not None:
        wanted = each(size, dims)
    else:
        ratios = scale_factor if isinstance(scale_factor, Sequence) else [scale_factor or 1.0]
        pairs = zip(sizes, [*ratios] * (dims // len(ratios)), strict=True)
        wanted = [max(1, math.floor(n * ratio)) for n, ratio in pairs]
    output = gradient = 1.0
    for n, m in zip(map(index, sizes), map(index, wanted), strict=True):  # may be symbolic
        if n > _LARGE:
            n, m = _LARGE, max(1, round(m * _LARGE / n))
        squares = (
            constant(_squared_weights, n, m, _ALONG.get(mode, mode), align_corners) if n else 1.0
        )
        output *= m / squares
        gradient *= n / squares if n else 1.0
    return tie(constraint, output=math.sqrt(output), input=math.sqrt(gradient))


interpolate = unary(
    F.interpolate,
    interpolate_scales,
    """Computes ``s * interpolate(input)``, with torch's arguments.

    The rule assumes uncorrelated neighbours and ignores ``antialias``.

    Args:
        input: (batch, channels, ...), floating point.
        constraint: see `unit_scaling.constraints`.
    """,
    {
        "size": None,
        "scale_factor": None,
        "mode": "nearest",
        "align_corners": None,
        "recompute_scale_factor": None,
        "antialias": False,
        **CONSTRAINT,
    },
)
