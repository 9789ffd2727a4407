"""The operands of a layer's three products: their casts, which of them share one copy, and how they
are saved for the backward pass: with one scale factor in the dtype of their format, bit for bit.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter
from torch.utils.checkpoint import CheckpointError

from ..common.compiler import compiled_as, is_differentiated_again
from ..formats.quantize import convertible
from ..recipes.rules import LOWERED
from ..torch_internals.autograd_functions import apply_eagerly, is_recorded
from ..torch_internals.decorators import taken_as_constant
from .casting import LoweredCast, in_units, labelled, resolved_format, unrotated


class Casts(NamedTuple):
    """The lowered casts of the six operands; None in the backward products for no (second) cast."""

    a: LoweredCast | None = None
    b: LoweredCast | None = None
    grad_for_a: LoweredCast | None = None
    b_for_grad_a: LoweredCast | None = None
    grad_for_b: LoweredCast | None = None
    a_for_grad_b: LoweredCast | None = None


UNCAST = Casts()


@cache
def _casts_of(text: str, layer: bool = True, rotated: bool = True) -> Casts:
    """The lowered casts of the recipe with this `Recipe.text`. layer: whether b is a weight;
    otherwise it is cast like a, and in the backward pass rotated like the gradient."""
    specs = [LoweredCast.from_text(line) if line else None for line in text.split("\n")]
    a, b, grad_for_a, b_for_grad_a, grad_for_b, a_for_grad_b = specs
    if not layer:
        b, b_for_grad_a = a, unrotated(a)
        if a is not None and grad_for_a is not None:
            b_for_grad_a = a._replace(hadamard=grad_for_a.hadamard, signs=grad_for_a.signs)
        grad_for_a = unrotated(grad_for_a) if a is None else grad_for_a
    casts = [a, b, grad_for_a, b_for_grad_a, grad_for_b, a_for_grad_b]
    return Casts(*(casts if rotated else map(unrotated, casts)))


@taken_as_constant
def _fields(*key: Any) -> tuple[Any, ...]:
    return tuple(spec and tuple(spec) for spec in _casts_of(*key))


def _in_graph(*key: Any) -> Casts:
    return Casts(*[fields and LoweredCast(*fields) for fields in _fields(*key)])


casts_of = compiled_as(_in_graph)(_casts_of)


def named(casts: Casts, name: str, layer: bool = True) -> Casts:
    """``casts``, of `casts_of`, of the product ``name``, which has the number of its recorder: so
    caches have no such key."""
    second = "weight" if layer else "other"
    roles = ("input", second, "grad", f"{second} again", "grad again", "input again")
    return Casts(*map(labelled, casts, [name] * len(casts), roles))


def one_copy(first: LoweredCast | None, second: LoweredCast | None) -> bool:
    """Whether an operand cast under ``first`` serves ``second``, along the other axis."""
    if first is None or second is None:
        return first is second
    across, along = first.tile
    equal = first == second or first.settings == second.settings
    return equal and across == along and not first.hadamard


class Copies(NamedTuple):
    """Whether the backward products use the cast copies of a and b; the casts that are needed."""

    a: bool
    b: bool
    casts: Casts


def copies_of(casts: Casts) -> Copies:
    """What the backward products cast again."""
    spec = next(filter(None, casts), None)
    is_named = spec is not None and spec.label
    return (_copies_of.__wrapped__ if is_named else _copies_of)(casts)


@cache
def _copies_of(casts: Casts) -> Copies:
    a, b = one_copy(casts.a, casts.a_for_grad_b), one_copy(casts.b, casts.b_for_grad_a)
    needed = casts._replace(
        a_for_grad_b=None if a else casts.a_for_grad_b,
        b_for_grad_a=None if b else casts.b_for_grad_a,
    )
    return Copies(a, b, needed)


class SavedOperand(NamedTuple):
    """A tensor to save, its cast and scale. source: what was cast; None for an input itself."""

    values: Tensor
    spec: LoweredCast | None = None
    scale: Tensor | None = None
    source: Tensor | None = None


def save_operands(ctx: Any, *operands: SavedOperand) -> None:
    """Saves operands, as bytes where that is smaller, after an empty tensor (`casting._Round`)."""
    recorded, compiling = is_recorded(ctx), torch.compiler.is_compiling()
    saved = [] if compiling else [operands[0].values.new_empty((0,))]
    encodings, sources = [], []
    for x, spec, scale, source in operands:
        dtype = _dtype(x, spec) if spec is not None and (recorded or compiling) else None
        if dtype is None or spec is None:
            saved.append(x)
        else:
            units = x if scale is None else in_units(x, scale, spec.rule)
            saved.append(_stored(units, dtype) if compiling else units.to(dtype))
            saved += [] if scale is None else [scale]
        encodings.append((dtype is not None, dtype is not None and scale is not None))
        sources.append(source)
    # torch.func unwraps saved tensors alone. (Of tensor subclasses calls are not recorded either.)
    ctx.unwraps = not (recorded or compiling) and all(
        type(operand.values) in (Tensor, Parameter) for operand in operands
    )
    if ctx.unwraps:
        saved += [source for source in sources if source is not None]
        ctx.sources = [source is not None for source in sources]
    else:
        ctx.sources = [None if compiling else _connection(source) for source in sources]
    ctx.encodings, ctx.marked = encodings, not compiling
    ctx.save_for_backward(*saved)


def _connection(source: Tensor | None) -> Tensor | None:
    """A tensor in the graph of ``source`` without its memory, except of a leaf. It is not saved:
    hooks on saved tensors would store its full size."""
    if source is None or not source.requires_grad:
        return None
    if source.is_leaf:
        return source
    with torch.enable_grad():
        zeros: Tensor = apply_eagerly(_Zeros, source)
    return zeros


def saved_operands(ctx: Any, dtype: torch.dtype) -> list[Tensor]:
    """Those of `save_operands`, in ``dtype``, differentiable where the backward pass is."""
    tensors = iter(saved_tensors(ctx)[ctx.marked :])
    operands = []
    for in_bytes, scaled in ctx.encodings:
        x = next(tensors)
        if in_bytes:
            x = restored(x, next(tensors) if scaled else None, dtype)
        operands.append(x)
    if not is_differentiated_again():
        return operands
    sources = ctx.sources
    if ctx.unwraps:
        sources = [next(tensors) if is_saved else None for is_saved in sources]
    pairs = zip(operands, sources, strict=True)
    return [x if s is None else x + apply_eagerly(_Zeros, s).to(x.dtype) for x, s in pairs]


class _Zeros(Function):
    """Negative zeros, one in memory, with the gradient of ``x``. Adding them changes no number."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.new_full((), -0.0).expand(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@compiled_as(lambda ctx: ctx.saved_tensors)
def saved_tensors(ctx: Any) -> tuple[Tensor, ...]:
    """``ctx.saved_tensors``; names the remedy if a checkpoint has recomputed other ones."""
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


def _dtype(x: Tensor, spec: LoweredCast) -> torch.dtype | None:
    """The FP8 dtype in which ``x`` is saved; None to save it unchanged."""
    if spec.tile != (0, 0) or x.device.type == "mps":
        return None
    if spec.rule is not None and LOWERED[spec.rule].is_simulated:  # with several scales, maybe
        return None
    dtype = resolved_format(spec.format).dtype
    return dtype if dtype is not None and dtype.itemsize < x.element_size() else None


@compiled_as(lambda x, dtype: torch.zeros_like(x, dtype=dtype).copy_(convertible(x, dtype)))
def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``; in a graph by a copy: the partitioner counts a conversion twice."""
    return x.to(dtype)


def restored(data: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``data * scale``, computed in float32 or wider and rounded to ``dtype``."""
    one_scale = scale is None or not scale.ndim
    lookup = one_scale and type(data) is Tensor and data.dtype.itemsize == 1
    lookup = lookup and data.device.type == "cpu" and not torch.compiler.is_dynamo_compiling()
    source = torch.arange(256, dtype=torch.uint8).view(data.dtype) if lookup else data
    values = source.to(torch.promote_types(dtype, torch.float32))
    values = (values if scale is None else values * scale).to(dtype)
    if not lookup:
        return values
    index = data.view(torch.uint8).flatten().int()  # a fifth of the time of a conversion
    return values.index_select(0, index).view(data.shape)
