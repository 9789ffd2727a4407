"""Operands saved for the backward pass, in the bytes of their format.

An operand with values of a format times one scale factor is saved in the dtype of the format and
restored bit for bit. In compiled code a parameter, which is in memory anyway, may be cast a second
time instead, and layers with the same input (query, key and value; gate and up) save its bytes
once; in eager mode each saves a copy. A backward pass that is differentiated itself
(``create_graph=True``) reads them with the gradient of the operand, straight through its cast.
Under torch.func operands are saved unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointError

from ..common.compiler import (
    compiled_as,
    is_differentiated_again,
    is_recorded,
    reads_values,
)
from ..formats.quantize import convertible
from .casting import LoweredCast, format_of, in_units

Operand = tuple[Tensor, LoweredCast | None, Tensor | None]
"""A tensor, its cast, and its scale factor if one is for the whole tensor."""


def save_operands(ctx: Any, *operands: Operand) -> None:
    """Saves operands for the backward pass, as bytes where that is smaller."""
    saved: list[Tensor] = []
    encodings = []
    in_bytes = torch.compiler.is_compiling() or is_recorded(ctx)
    for x, spec, scale in operands:
        dtype = _dtype(x, spec) if in_bytes else None
        if dtype is None or spec is None:
            saved.append(x)
        elif scale is None:
            saved.append(_stored(x, dtype))
        else:
            saved += (_stored(in_units(x, scale, spec.rule), dtype), scale)
        encodings.append((dtype is not None, dtype is not None and scale is not None))
    ctx.encodings = tuple(encodings)
    ctx.save_for_backward(*saved)
    if is_recorded(ctx):  # not saved: hooks on saved tensors would store zeros of the full size
        ctx.zeros = [
            _zeros_of(x) if in_bytes else None
            for (x, _, _), (in_bytes, _) in zip(operands, encodings, strict=True)
        ]


def saved_operands(ctx: Any, dtype: torch.dtype) -> list[Tensor]:
    """The operands saved by `save_operands`, in ``dtype``, differentiable where the backward pass
    is."""
    saved = iter(saved_tensors(ctx))
    operands = [
        restored(next(saved), next(saved) if scaled else None, dtype) if in_bytes else next(saved)
        for in_bytes, scaled in ctx.encodings
    ]
    if not is_recorded(ctx) or not is_differentiated_again():
        return operands
    pairs = zip(operands, ctx.zeros, strict=True)
    return [x if zeros is None else x + zeros.to(dtype) for x, zeros in pairs]


class _Zeros(Function):
    """Negative zeros, one in memory, with the gradient of ``x``. Adding them changes no number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_full((), -0.0).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _zeros_of(x: Tensor) -> Tensor | None:
    """`_Zeros` of an operand; None if it needs no gradient."""
    if not x.requires_grad:
        return None
    with torch.enable_grad():  # in the forward of an autograd function
        return _Zeros.apply(x)


@compiled_as(lambda ctx: ctx.saved_tensors)
def saved_tensors(ctx: Any) -> tuple[Tensor, ...]:
    """``ctx.saved_tensors``, which an activation checkpoint recomputes. If the recomputation saved
    other tensors, the error names the remedy."""
    try:
        return ctx.saved_tensors
    except CheckpointError as error:
        raise CheckpointError(f"{_RECOMPUTED}\n{error}") from error


_RECOMPUTED = (
    "a product with casts was recomputed differently: a checkpoint inside of fp8.autocast "
    "recomputes outside of it, without casts, unless it is called with "
    "checkpoint(..., use_reentrant=False, context_fn=fp8.checkpoint_contexts), and one inside of "
    "fp8.override needs its backward pass inside of the block"
)


def _dtype(x: Tensor, spec: LoweredCast | None) -> torch.dtype | None:
    """The FP8 dtype in which ``x`` is saved; None to save it unchanged."""
    if spec is None or spec.tile != (0, 0) or x.device.type == "mps":
        return None
    dtype = format_of(spec).dtype
    return dtype if dtype is not None and dtype.itemsize < x.element_size() else None


@compiled_as(lambda x, dtype: torch.zeros_like(x, dtype=dtype).copy_(convertible(x, dtype)))
def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``; in a graph by a copy, because the partitioner counts twice the bytes of a
    conversion and would save the 16-bit tensor instead."""
    return x.to(dtype)


def restored(data: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``data * scale``, computed in float32 or wider and rounded to ``dtype``. scale: 0-dim, or
    broadcastable to ``data``."""
    one_scale = scale is None or not scale.ndim
    lookup = one_scale and type(data) is Tensor and data.dtype.itemsize == 1 and reads_values(data)
    source = torch.arange(256, dtype=torch.uint8).view(data.dtype) if lookup else data
    values = source.to(torch.promote_types(dtype, torch.float32))
    values = (values if scale is None else values * scale).to(dtype)
    if not lookup:
        return values
    index = data.view(torch.uint8).flatten().int()  # a fifth of the time of a conversion
    return values.index_select(0, index).view(data.shape)
