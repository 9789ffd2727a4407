"""What is read of a tensor's values: its size, and whether it has any."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from fp8.common.dtensor import part_of, whole


def rms_of(tensor: Tensor) -> float:
    """The RMS of the values; 1 if it is zero or not finite, for an example inside torch.vmap, or if
    the tensor is sparse."""
    return size_of(tensor) or 1.0


@torch.no_grad()
def size_of(tensor: Tensor) -> float:
    """Returns `rms_of` the tensor, but 0 for zeros."""
    if not (tensor.numel() and is_strided(tensor)) or tensor.is_meta:
        return 1.0
    try:
        sizes = tensor.detach()
        if sizes.is_complex():
            sizes = sizes.abs()
        # Not by the mean: that of parts of different lengths is wrong in torch.
        total = whole(sizes.float().square().sum()).item()
    except RuntimeError:  # in torch.vmap, which hides values
        return 1.0
    if math.isfinite(total):
        return math.sqrt(total / sizes.numel())
    return 1.0


def in_double(tensor: Tensor) -> Tensor:
    """The values in float64, or in complex128."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float64))


def is_any(condition: Tensor) -> bool:
    """Whether an element is true, or not zero."""
    return bool(whole(condition.detach().any()))


def has_values(tensors: Iterable[Tensor]) -> bool:
    """Whether values can be read; those of the examples inside torch.vmap cannot."""
    try:
        for tensor in tensors:
            if is_strided(tensor) and not tensor.is_meta:
                part_of(tensor.detach()).flatten()[:1].any().item()
    except RuntimeError:
        return False
    return True


def has_scale(tensor: Tensor) -> bool:
    """Whether the values are real or complex numbers, not positions, masks or bytes."""
    return tensor.dtype.is_floating_point or tensor.dtype.is_complex


def is_strided(tensor: Tensor) -> bool:
    """Whether a tensor is not a sparse one."""
    return tensor.layout is torch.strided
