"""What is kept between the forward and the backward pass: operands in the bytes of their format.

An operand whose values are those of a format, times one scale, is kept in the dtype of that format,
and is the same to the bit when it is needed again. So it is in eager and in compiled code; there a
parameter, which is in memory anyway, may be cast a second time instead. Layers that are called one
after the other with one input (query, key and value; gate and up) keep its bytes once. Under
torch.func, where a backward pass may itself be differentiated, operands are kept as they are.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..common.compiler import is_plain
from ..recipes.scaling import inverse_of
from .casting import Spec, format_of

__all__ = ["Held", "keep", "kept", "number_of", "once", "one_of", "shared"]

T = TypeVar("T")

Operand = tuple[Tensor, Spec | None, Tensor | None]
"""A tensor, the spec that it was cast under, and the scale of all of it, None for one."""


class Held:
    """What products keep of one input, each cast once, until a backward pass has begun."""

    def __init__(self) -> None:
        self.found: dict[Any, Any] = {}


class _Last(threading.local):
    """The input of the product before, in this thread: whose memory it is (a weak reference), which
    part of it in which version, and what is held of it."""

    owner: Callable[[], Tensor | None] = staticmethod(lambda: None)
    part: tuple[Any, ...] = ()
    held = Held()


_LAST = _Last()


def shared(x: Tensor, history: Tensor | None, *specs: Spec | None) -> Held | None:
    """Where the products of ``x``, cast under ``specs``, find what the one before has kept of it.

    None where each keeps its own: without casts; in compiled code, whose compiler sees to it; for a
    subclass of Tensor; where chance decides; and where a history does, unless scales can be looked
    at (on a CPU).
    """
    if not any(specs) or torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return None
    by_chance = any(spec is not None and spec.rounding == "stochastic" for spec in specs)
    unknown = history is not None and x.device.type != "cpu"
    if type(x) is not Tensor or by_chance or unknown or x.is_inference():  # that has no version
        return None
    owner = x if x._base is None else x._base
    part = (x._version, x.storage_offset(), x.shape, x.stride(), x.dtype)
    if _LAST.owner() is not owner or _LAST.part != part:
        held = Held()
        _LAST.owner = weakref.ref(owner, lambda _: held.found.clear())
        _LAST.part, _LAST.held = part, held
    return _LAST.held


def one_of(held: Held | None, key: Any, make: Callable[[], T]) -> T:
    """``make()``, or what is held under ``key``."""
    if held is None:
        return make()
    if key not in held.found:
        held.found[key] = make()
    return held.found[key]


def number_of(scale: Tensor | None) -> float | None:
    """``scale`` as a number, where that does not make the host wait for a device."""
    return scale.item() if scale is not None and scale.device.type == "cpu" else None


def keep(ctx: Any, *operands: Operand, held: Held | None = None) -> None:
    """Saves them for the backward pass, in bytes where that is less. held: what other products keep
    of the first."""
    saved, notes = [], []
    in_bytes = torch.compiler.is_compiling() or is_plain(ctx)
    for i, (x, spec, scale) in enumerate(operands):
        dtype = _dtype(x, spec) if in_bytes else None
        if dtype is None or spec is None:
            saved.append(x)
        else:
            found = None if i else held
            key = () if found is None else (spec.settings, x.dtype, number_of(scale))
            saved += one_of(found, key, partial(_bytes, x, dtype, scale, spec))
        notes.append((dtype is not None, dtype is not None and scale is not None))
    ctx.kept, ctx.held = tuple(notes), held
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
    """Called where a backward pass reads bytes: nothing more is added to what is held. Raises
    RuntimeError where that pass is itself to be differentiated."""
    if ctx.held is not None:
        ctx.held.found.clear()
    if not torch.compiler.is_compiling() and is_plain(ctx) and torch.is_grad_enabled():
        raise RuntimeError(
            "create_graph=True: what a recipe keeps for the backward pass are bytes, which have no "
            "gradient; torch.func.grad keeps tensors, with backend='simulate'"
        )


def _dtype(x: Tensor, spec: Spec | None) -> torch.dtype | None:
    """The dtype that ``x`` is kept in; None for its own, as on devices without FP8 dtypes."""
    if spec is None or spec.tile != (0, 0) or x.device.type == "mps":
        return None
    dtype = format_of(spec).dtype
    return dtype if dtype is not None and dtype.itemsize < x.element_size() else None


def _bytes(x: Tensor, dtype: torch.dtype, scale: Tensor | None, spec: Spec) -> tuple[Tensor, ...]:
    if scale is None:
        return (_stored(x, dtype),)
    inverse = inverse_of(scale, spec.rule)
    return _stored(x / scale if inverse is None else x * inverse, dtype), scale


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
