"""What is kept between the forward and the backward pass: operands in the bytes of their format.

An operand whose values are those of a format, times one scale, is kept in the dtype of that format,
and is the same to the bit when it is needed again. So it is in eager and in compiled code; there a
parameter, which is in memory anyway, may be cast a second time instead. Under torch.func, where a
backward pass may itself be differentiated, operands are kept as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .casting import Spec, format_of
from .function import is_plain

__all__ = ["keep", "kept", "once"]

Operand = tuple[Tensor, Spec, Tensor | None]
"""A tensor, the spec that it was cast under, and the scale of all of it, None for one."""


def keep(ctx: Any, *operands: Operand) -> None:
    """Saves them for the backward pass, in bytes where that is less."""
    saved, notes = [], []
    in_bytes = torch.compiler.is_compiling() or is_plain(ctx)
    for x, spec, scale in operands:
        dtype = _dtype(x, spec) if in_bytes else None
        if dtype is None:
            saved.append(x)
        elif scale is None:
            saved.append(_stored(x, dtype))
        else:
            saved += [_stored(x / scale, dtype), scale]
        notes.append((dtype is not None, dtype is not None and scale is not None))
    ctx.kept = tuple(notes)
    ctx.save_for_backward(*saved)


def kept(ctx: Any, dtype: torch.dtype) -> list[Tensor]:
    """What `keep` has saved, in ``dtype``. Raises as `once`."""
    if any(in_bytes for in_bytes, _ in ctx.kept):
        once(ctx)
    saved = iter(ctx.saved_tensors)
    return [
        _restored(next(saved), next(saved) if scaled else None, dtype) if in_bytes else next(saved)
        for in_bytes, scaled in ctx.kept
    ]


def once(ctx: Any) -> None:
    """Raises RuntimeError where a backward pass that reads bytes is itself to be differentiated."""
    if not torch.compiler.is_compiling() and is_plain(ctx) and torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: what a recipe keeps for the backward pass are bytes, which have no "
            "gradient; torch.func.grad keeps tensors, with backend='simulate'"
        )


def _dtype(x: Tensor, spec: Spec) -> torch.dtype | None:
    """The dtype that ``x`` is kept in; None for its own, as on devices without FP8 dtypes."""
    if not spec or spec[2] != (0, 0) or x.device.type == "mps":
        return None
    dtype = format_of(spec).dtype
    return dtype if dtype is not None and dtype.itemsize < x.element_size() else None


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``. For a compiler, which weighs what to keep, by a copy: a conversion it
    takes for twice the bytes that it has, and so it would keep 16-bit numbers themselves."""
    if torch.compiler.is_compiling():
        return torch.zeros_like(x, dtype=dtype).copy_(x)
    return x.to(dtype)


def _restored(data: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``data`` times ``scale``, computed in float32 or wider and rounded to ``dtype``."""
    plain = type(data) is Tensor and data.device.type == "cpu" and data.dtype.itemsize == 1
    lookup = plain and not torch.compiler.is_compiling()  # a fifth of the time of a conversion
    codes = torch.arange(256, dtype=torch.uint8).view(data.dtype) if lookup else data
    values = codes.to(torch.promote_types(dtype, torch.float32))
    values = (values if scale is None else values * scale).to(dtype)
    if not lookup:
        return values
    return values.index_select(0, data.view(torch.uint8).flatten().int()).view(data.shape)
