"""Pooling in 1, 2 and 3 dimensions.

The rules assume uncorrelated elements in a window and ignore padding. The second moment of an input
gradient is the fraction of its squared gradient that a window propagates, times the number of
outputs per input.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ..common.calls import Function, Kwargs
from ..common.constant import constant
from ..rules.quadrature import largest_square
from ..rules.table import Scales, tie
from .convolution import each
from .generated import CONSTRAINT, REQUIRED, described, unary

Sizes = int | Sequence[int]

_MEAN = "The mean of n elements has RMS 1/sqrt(n); the gradient of a window has norm 1/sqrt(n)."
_MAX = "1/RMS of the largest of n standard normal values, which receives the window's gradient."
_ADAPTIVE = "n is the input size over the output size."


def _sliding(
    dims: int,
    counts_padding: bool,
    input: Tensor,
    kernel_size: Sizes,
    stride: Sizes | None = None,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
) -> tuple[int, float]:
    """(elements of a window, outputs per input). With ``ceil_mode`` a kernel may exceed its
    input."""
    # A stride of None or () is the kernel.
    settings = (kernel_size, stride or kernel_size, padding, dilation)
    each_dim = [each(setting, dims) for setting in settings]
    window, ratio = 1, 1.0
    for size, k, step, pad, d in zip(input.shape[-dims:], *each_dim, strict=True):
        room = size + 2 * pad - d * (k - 1) - 1
        step = step or 1  # torch rejects 0
        if ceil_mode:
            room += step - 1
        count = room // step + 1
        if ceil_mode and (count - 1) * step >= size + pad:
            count -= 1  # torch drops windows in the right padding
        window *= min(k, size + 2 * pad * counts_padding)
        ratio *= max(1, count) / max(1, size)
    return window, ratio


def _adaptive(
    dims: int, input: Tensor, output_size: int | Sequence[int | None] | None
) -> tuple[float, float]:
    """(elements of a window, outputs per input)."""
    window, ratio = 1.0, 1.0
    for size, wanted in zip(input.shape[-dims:], each(output_size, dims), strict=True):
        if wanted is not None:
            share = max(1, size) / max(1, wanted)
            window *= max(1.0, share)
            ratio /= share
    return window, ratio


_WINDOW = {"kernel_size": REQUIRED, "stride": None, "padding": 0}
_AVERAGE = {**_WINDOW, "ceil_mode": False, "count_include_pad": True}
_LARGEST = {**_WINDOW, "dilation": 1, "ceil_mode": False, "return_indices": False}
_SIZE = {"output_size": REQUIRED}

#: torch's name, with or without the number of dimensions -> torch's arguments after the first, and
#: the documentation of the rule.
_KINDS: dict[str, tuple[Kwargs, str]] = {
    "avg_pool1d": (_AVERAGE, _MEAN),
    "avg_pool": ({**_AVERAGE, "divisor_override": None}, _MEAN),
    "max_pool": (_LARGEST, _MAX),
    "adaptive_avg_pool": (_SIZE, f"{_MEAN} {_ADAPTIVE}"),
    "adaptive_max_pool": ({**_SIZE, "return_indices": False}, f"{_MAX} {_ADAPTIVE}"),
}

_DOCUMENTATION = """Computes ``s * {name}(input)``, with torch's arguments; indices are torch's.

Args:
    input: (batch, channels, ...) or (channels, ...) with {dims} more dimensions, floating point.
"""


def _pool(kind: str, dims: int) -> Function:
    """Adds the row of a pool."""
    name = f"{kind}{dims}d"
    averages = "avg" in kind
    adapts = "adaptive" in kind

    def rule(
        input: Tensor,
        *,
        divisor_override: int | None = None,
        constraint: str | None = "to_output_scale",
        **sizes: Any,
    ) -> Scales:
        window: Any
        if adapts:
            window, ratio = _adaptive(dims, input, **sizes)
        else:
            window, ratio = _sliding(dims, averages, input, **sizes)
        if averages:
            output = (divisor_override or window) / window**0.5
            return tie(constraint, output=output, input=output / ratio**0.5)
        count = math.ceil(window) if adapts else index(window)  # may be symbolic
        output = constant(largest_square, count) ** -0.5
        return tie(constraint, output=output, input=ratio**-0.5)

    settings, documentation = _KINDS.get(name) or _KINDS[kind]
    settings = {**settings, **CONSTRAINT}
    read = {
        k: v
        for k, v in settings.items()
        if k not in ("count_include_pad", "return_indices")
    }
    types = (_adaptive if adapts else _sliding, rule)
    described(
        rule, f"{name}_scales", documentation, {"input": REQUIRED, **read}, *types
    )
    about = _DOCUMENTATION.format(name=name, dims=dims)
    return unary(getattr(F, name), rule, about, settings, name=name)


def _three(kind: str) -> list[Function]:
    return [_pool(kind, dims) for dims in (1, 2, 3)]


adaptive_avg_pool1d, adaptive_avg_pool2d, adaptive_avg_pool3d = _three(
    "adaptive_avg_pool"
)
adaptive_max_pool1d, adaptive_max_pool2d, adaptive_max_pool3d = _three(
    "adaptive_max_pool"
)
avg_pool1d, avg_pool2d, avg_pool3d = _three("avg_pool")
max_pool1d, max_pool2d, max_pool3d = _three("max_pool")
