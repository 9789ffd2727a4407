"""Pooling in 1, 2 and 3 dimensions.

The rules assume uncorrelated elements in a window and ignore padding. The second moment of an input
gradient is the fraction of its squared gradient that a window propagates, times the number of
outputs per input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from inspect import signature
from operator import index
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..common.constant import constant
from ..rules.quadrature import largest_square
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
_SIZE = {"output_size": REQUIRED}

#: torch's name, with or without the number of dimensions -> the rule; torch's arguments after the
#: first, those of the rule's first.
_KINDS: dict[str, tuple[Callable[..., Scales], dict[str, Any]]] = {
    "avg_pool": (avg_pool_scales, {**_AVERAGE, "divisor_override": None}),
    "avg_pool1d": (avg_pool_scales, _AVERAGE),
    "max_pool": (max_pool_scales, _LARGEST),
    "adaptive_avg_pool": (adaptive_avg_pool_scales, _SIZE),
    "adaptive_max_pool": (adaptive_max_pool_scales, {**_SIZE, "return_indices": False}),
}

_DOCUMENTATION = """Computes ``s * {name}(input)``, with torch's arguments; indices are torch's.

Args:
    input: (batch, channels, ...) or (channels, ...) with {dims} more dimensions, floating point.
"""


def _pool(kind: str, dims: int) -> Callable[..., Any]:
    name = f"{kind}{dims}d"
    rule_of, settings = _KINDS.get(name) or _KINDS[kind]
    settings = {**settings, **CONSTRAINT}
    read = {key: settings[key] for key in settings if key in signature(rule_of).parameters}
    rule = with_first(rule_of, dims, f"{name}_scales", rule_of.__doc__ or "")
    described(rule, rule.__name__, rule.__doc__, {"input": REQUIRED, **read}, rule_of)
    about = _DOCUMENTATION.format(name=name, dims=dims)
    return unary(getattr(F, name), rule, about, settings, name=name)


def _three(kind: str) -> list[Callable[..., Any]]:
    return [_pool(kind, dims) for dims in (1, 2, 3)]


adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = _three("adaptive_avg_pool")
adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = _three("adaptive_max_pool")
avg_pool1d, avg_pool2d, avg_pool3d = _three("avg_pool")
max_pool1d, max_pool2d, max_pool3d = _three("max_pool")
