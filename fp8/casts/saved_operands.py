"""Operands saved for the backward pass, in the bytes of their format.

An operand whose values are those of a format, times one scale factor, is saved in the dtype of the
format and restored bit for bit, in eager and in compiled code. In compiled code a parameter, which
is in memory anyway, may be cast a second time instead. Consecutive layers with the same input
(query, key and value; gate and up) save its bytes once. A backward pass that is differentiated
itself (``create_graph=True``) reads them with the gradient of the operand, straight through its
cast. Under torch.func operands are saved unchanged.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointError

from ..common.compiler import (
    compiled_as,
    eager_only,
    is_differentiated_again,
    is_plain,
    reads_values,
)
from ..formats.quantize import convertible
from ..recipes.scaling import inverse_of
from .casting import Spec, format_of

T = TypeVar("T")

Operand = tuple[Tensor, Spec | None, Tensor | None]
"""A tensor, the spec it was cast under, and its scale factor if it has one for the whole tensor."""


SharedCasts = dict[Any, Any]
"""What several products save of one shared input, each cast once, until a backward pass begins."""


class _Last(threading.local):
    """The input of the preceding product in this thread: a weak reference to its base tensor, the
    view and version of it, and what is saved of it."""

    owner: Any = staticmethod(lambda: None)
    part: tuple[Any, ...] = ()
    shared: SharedCasts | None = None


_LAST = _Last()


@eager_only()
def shared_casts(x: Tensor, history: Tensor | None, *specs: Spec | None) -> SharedCasts | None:
    """What the preceding product saved of ``x``, so that this one can share it.

    None if each product saves its own: without casts; in compiled code, where the compiler handles
    it; for a subclass of Tensor; for a leaf, which ``.data`` and numpy write without a new version;
    for casts with random bits or signs; and with a history, unless scale factors can be read
    without a device synchronization (on a CPU).
    """
    if not any(specs) or not torch.is_grad_enabled():
        return None
    by_chance = any(spec is not None and spec.is_random for spec in specs)
    unknown = history is not None and x.device.type != "cpu"
    owner = x if x._base is None else x._base
    if type(x) is not Tensor or by_chance or unknown or owner.grad_fn is None:
        return None
    part = (x._version, x.storage_offset(), x.shape, x.stride(), x.dtype)
    if _LAST.owner() is not owner or _LAST.part != part:
        shared: SharedCasts = {}
        _LAST.owner = weakref.ref(owner, lambda _: shared.clear())
        _LAST.part, _LAST.shared = part, shared
    return _LAST.shared


def cached(shared: SharedCasts | None, key: Any, make: Callable[[], T]) -> T:
    """``make()``, or the value already stored under ``key``."""
    if shared is None:
        return make()
    if key not in shared:
        shared[key] = make()
    return shared[key]


def as_number(scale: Tensor | None) -> float | None:
    """``scale`` as a number, if reading it does not synchronize with a device; else None."""
    return scale.item() if scale is not None and scale.device.type == "cpu" else None


def save_operands(ctx: Any, *operands: Operand, shared: SharedCasts | None = None) -> None:
    """Saves operands for the backward pass, as bytes where that is smaller. shared: what other
    products save of the first operand."""
    saved, notes = [], []
    in_bytes = torch.compiler.is_compiling() or is_plain(ctx)
    for i, (x, spec, scale) in enumerate(operands):
        dtype = _dtype(x, spec) if in_bytes else None
        if dtype is None or spec is None:
            saved.append(x)
        else:
            found = None if i else shared
            key = () if found is None else (spec.settings, x.dtype, as_number(scale))
            saved += cached(found, key, partial(_bytes, x, dtype, scale, spec))
        notes.append((dtype is not None, dtype is not None and scale is not None))
    ctx.kept, ctx.shared = tuple(notes), shared
    ctx.save_for_backward(*saved)
    if is_plain(ctx):  # not saved: hooks on saved tensors would store zeros of the full size
        ctx.zeros = [
            _zeros_of(x) if bytes_ else None
            for (x, _, _), (bytes_, _) in zip(operands, notes, strict=True)
        ]


def saved_operands(ctx: Any, dtype: torch.dtype) -> list[Tensor]:
    """The operands saved by `save_operands`, in ``dtype``, differentiable where the backward pass
    is. From here on nothing is added to the shared bytes."""
    if ctx.shared is not None:
        ctx.shared.clear()
    saved = iter(saved_tensors(ctx))
    operands = [
        restored(next(saved), next(saved) if scaled else None, dtype) if in_bytes else next(saved)
        for in_bytes, scaled in ctx.kept
    ]
    if not is_plain(ctx) or not is_differentiated_again():
        return operands
    pairs = zip(operands, ctx.zeros, strict=True)
    return [x if zeros is None else x + zeros.to(dtype) for x, zeros in pairs]


class _Zeros(Function):
    """Negative zeros, one in memory, that have the gradient of ``x``. Added to a number they leave
    it as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.new_full((), -0.0).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _zeros_of(x: Tensor) -> Tensor | None:
    """`_Zeros` of an operand inside of the forward of an autograd function; None if it needs no
    gradient."""
    if not x.requires_grad:
        return None
    with torch.enable_grad():
        return _Zeros.apply(x)


@compiled_as(lambda ctx: ctx.saved_tensors)
def saved_tensors(ctx: Any) -> tuple[Tensor, ...]:
    """``ctx.saved_tensors``, which an activation checkpoint recomputes; its error, if the
    recomputation saved others, names the remedy."""
    try:
        return ctx.saved_tensors
    except CheckpointError as error:
        raise CheckpointError(f"{_RECOMPUTED}\n{error}") from error


_RECOMPUTED = (
    "a product with casts was recomputed differently: a checkpoint inside of fp8.autocast "
    "recomputes outside of it, without casts, unless it is called with "
    "checkpoint(..., use_reentrant=False, context_fn=fp8.checkpoint_contexts)"
)


def _dtype(x: Tensor, spec: Spec | None) -> torch.dtype | None:
    """The dtype in which ``x`` is saved; None for its own, as on devices without FP8 dtypes."""
    if spec is None or spec.tile != (0, 0) or spec.is_sum or x.device.type == "mps":
        return None
    dtype = format_of(spec).dtype
    return dtype if dtype is not None and dtype.itemsize < x.element_size() else None


def _bytes(x: Tensor, dtype: torch.dtype, scale: Tensor | None, spec: Spec) -> tuple[Tensor, ...]:
    if scale is None:
        return (_stored(x, dtype),)
    inverse = inverse_of(scale, spec.rule)
    return _stored(x / scale if inverse is None else x * inverse, dtype), scale


@compiled_as(lambda x, dtype: torch.zeros_like(x, dtype=dtype).copy_(convertible(x, dtype)))
def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``. While compiling it is copied, because the partitioner counts a conversion
    with twice its bytes and would save the 16-bit tensor instead."""
    return x.to(dtype)


def restored(data: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``data * scale``, computed in float32 or wider and rounded to ``dtype``. scale: 0-dim, or
    broadcastable to ``data``."""
    one_scale = scale is None or not scale.ndim
    lookup = one_scale and type(data) is Tensor and data.dtype.itemsize == 1 and reads_values(data)
    codes = torch.arange(256, dtype=torch.uint8).view(data.dtype) if lookup else data
    values = codes.to(torch.promote_types(dtype, torch.float32))
    values = (values if scale is None else values * scale).to(dtype)
    if not lookup:
        return values
    index = data.view(torch.uint8).flatten().int()  # a fifth of the time of a conversion
    return values.index_select(0, index).view(data.shape)
