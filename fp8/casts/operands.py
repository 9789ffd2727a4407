"""The operands of a layer's three products: their casts, which of them share one copy, and how they
are saved for the backward pass: with one scale factor in the dtype of their format, bit for bit.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter
from torch.utils.checkpoint import CheckpointError

from ..common.compiler import compiled_as, is_differentiated_again, only_after
from ..formats.format import Format, get_format
from ..formats.quantize import convertible
from ..recipes.cast import Cast, casts_of_lines
from ..recipes.rules import LOWERED
from ..torch_internals import Arguments, Context
from ..torch_internals.autograd_functions import apply_eagerly, is_recorded
from ..torch_internals.decorators import taken_as_constant
from .casting import PLAIN, cast_values, in_units
from .counts import Label, Look, place

Scales = tuple[float, float, float]
"""Factors of a product's output and of the gradients of its first and second operand."""

ONES: Scales = (1, 1, 1)  # ints: torch.compile would treat floats as dynamic


class Geometry(NamedTuple):
    """The arguments of `aten.convolution`."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


@dataclass(frozen=True, kw_only=True)
class ProductCasts:
    """The casts of the six operands of a layer's three products; None: not cast.

    reuses_a, reuses_b, reuses_grad: whether the first copy of an operand serves its second product.
    shares_a: whether products of one input may take one cast of it. random_signs: whether a
    rotation has those. second: what b is. grad_again: what the cast of the gradient for b is
    reported as, if that for a does not run.
    """

    a: Cast | None = None
    b: Cast | None = None
    grad_for_a: Cast | None = None
    b_for_grad_a: Cast | None = None
    grad_for_b: Cast | None = None
    a_for_grad_b: Cast | None = None
    reuses_a: bool = True
    reuses_b: bool = True
    reuses_grad: bool = True
    shares_a: bool = False
    random_signs: bool = False
    second: str = "weight"
    grad_again: str = "grad"

    @property
    def pairs(self) -> tuple[tuple[Cast | None, Cast | None], ...]:
        """The casts of both operands of each product."""
        return (
            (self.a, self.b),
            (self.grad_for_a, self.b_for_grad_a),
            (self.grad_for_b, self.a_for_grad_b),
        )

    @property
    def is_cast(self) -> bool:
        """Whether an operand is cast."""
        return any(any(pair) for pair in self.pairs)

    @property
    def again_a(self) -> Cast | None:
        """The cast of a for its second product; None if that has none, or the first copy."""
        if self.reuses_a:
            return None
        return self.a_for_grad_b

    @property
    def again_b(self) -> Cast | None:
        """The cast of b for its second product; None if that has none, or the first copy."""
        if self.reuses_b:
            return None
        return self.b_for_grad_a


class Constants(NamedTuple):
    """The constants of a product and its gradients: strings and numbers, which autograd functions
    and compiled graphs accept; a graph can hold a named tuple of them, and no dataclass.

    Attributes:
        casts: the token of those of the operands, which `casts_of` reads; "": none.
        scales: the factors of the three results.
        bias_scale: a factor of the bias in the output, but not of its gradient.
        fuses: whether scales of batches are separate multiplications.
        geometry: of a convolution.
        dtype: the name of the dtype of the output of kernels and sums.
        kernels: those of the three products.
        fast: whether those sum fast, as `Recipe.fast_sums`.
        sums: `Recipe.sums`.
        name: of the product, for `fp8.stats`; "" if its casts are not observed.
        recasts: whether the backward pass casts b again, and its cast is not saved.
    """

    casts: str = ""
    scales: Scales = ONES
    bias_scale: float = 1.0
    fuses: bool = False
    geometry: Geometry | None = None
    dtype: str = ""
    kernels: tuple[str, ...] = ()
    fast: tuple[bool, ...] = ()
    sums: str = ""
    name: str = ""
    recasts: bool = False

    def changed(self, **values: Any) -> Constants:
        """`_replace`, of which torch 2.11 makes a tuple that no graph accepts."""
        return Constants(*map(values.pop, Constants._fields, self))

    def label(self, operand: str, look: Look | None = None) -> Label:
        """Where the cast of an operand is reported, as `place`."""
        return place(self.name, look, operand)


class States(NamedTuple):
    """What a product of a layer keeps between passes; None where its scaling, or a run without
    values, has none.

    a, b, value: the states of its operands; value: of attention's third one. grad: that of the
    gradient of its output. look: where its casts write statistics, in training.
    """

    a: Tensor | None = None
    b: Tensor | None = None
    value: Tensor | None = None
    grad: Tensor | None = None
    look: Look | None = None


NO_STATES = States()


# The token of the casts of a product is the `Recipe.text`, and a line for each of these options.
_OTHER = "other"
_UNROTATED = "unrotated"


def token_of(text: str, layer: bool = True, rotated: bool = True) -> str:
    """The token of the casts of a product under the recipe with this `Recipe.text`. layer: whether
    b is a weight; otherwise it is cast like a, and in the backward pass rotated like the gradient.
    rotated: False for casts without their rotations."""
    if not layer:
        text += f"\n{_OTHER}"
    if not rotated:
        text += f"\n{_UNROTATED}"
    return text


@cache
def casts_of(token: str) -> ProductCasts:
    """The casts that a token of `token_of` stands for; none for ""."""
    if not token:
        return ProductCasts()
    lines = token.split("\n")
    options = lines[6:]
    specs = casts_of_lines(lines[:6], rotated=_UNROTATED not in options)
    a, b, grad_for_a, b_for_grad_a, grad_for_b, a_for_grad_b = specs
    second = "weight"
    if _OTHER in options:
        second, b = "other", a
        if a is None:
            b_for_grad_a = None
            grad_for_a = grad_for_a and grad_for_a.unrotated
        elif grad_for_a is None:
            b_for_grad_a = a.unrotated
        else:
            b_for_grad_a = a.rotated(grad_for_a.hadamard, grad_for_a.signs)
    reuses_grad = one_copy(grad_for_a, grad_for_b)
    casts = ProductCasts(
        a=a,
        b=b,
        grad_for_a=grad_for_a,
        b_for_grad_a=b_for_grad_a,
        grad_for_b=grad_for_b,
        a_for_grad_b=a_for_grad_b,
        reuses_a=one_copy(a, a_for_grad_b),
        reuses_b=one_copy(b, b_for_grad_a),
        reuses_grad=reuses_grad,
        shares_a=a is not None and not a.is_random,
        grad_again="grad" if reuses_grad else "grad again",
        second=second,
    )
    signs = {cast.signs for pair in casts.pairs for cast in pair if cast}
    return replace(casts, random_signs="random" in signs)


RECAST_ROWS = 4096
"""The number of rows from which on the backward pass casts a weight again, and its cast is not
saved, one byte an element. That reads the weight once more: 1.7 % of the step of a Llama block of
width 2048 with this number, by the forecast, and less with more (docs/forecast.md)."""


def recasts(b: Tensor, token: str) -> bool:
    """Whether b, the weight of a product, is a parameter that may be cast again; others would be
    saved in place of the cast. token: of the casts."""
    if not isinstance(b, Parameter) and not isinstance(b._base, Parameter):
        return False
    return _is_repeatable(token)


@taken_as_constant
def _is_repeatable(token: str) -> bool:
    """Whether another cast of b, in the casts that this token stands for, gives the same values."""
    casts = casts_of(token)
    return not any(cast and cast.is_random for cast in (casts.b, casts.b_for_grad_a))


def one_copy(first: Cast | None, second: Cast | None) -> bool:
    """Whether an operand cast under ``first`` serves ``second``, along the other axis."""
    if first is None or second is None:
        return first is second
    across, along = first.tile
    if across != along or first.hadamard:
        return False
    # The first copy has the scale of the history, also where the second cast has none.
    return first.stateless == second.stateless


class SharedCast:
    """What products have made of an input. Layers that read one input, such as the projections q, k
    and v, so cast it once, and save one copy. In graphs the compiler merges equal casts.

    Attributes:
        key: what the cast depends on, besides the memory of the input; () for one that no other
            product may take.
        made: the cast, by the product that made it.
        bytes: the values as they are saved.
    """

    # Without an initializer: a small product has no time for a call.
    key: tuple[object, ...] = ()
    made: Any = None
    bytes: Tensor | None = None


class _Source(weakref.ref[Tensor]):
    """An input that was cast."""

    cast: SharedCast


class _Last(threading.local):
    """The input of the last cast that autograd has recorded, until it is freed."""

    def __init__(self) -> None:
        self.sources: list[_Source] = []


_LAST = _Last()


def shared_cast(x: Tensor, states: States, kind: tuple[object, ...]) -> SharedCast:
    """The cast of ``x`` by the last product, if x is unchanged, under equal constants and an equal
    scale; otherwise one that is not made yet.

    Shared are the casts of what a recorded operation has computed, whose changes torch counts (not
    through ``.data``). A leaf may be a buffer that others write into.

    Args:
        x: the input of a product.
        states: of the product.
        kind: what else the cast, or what is made of it, depends on.
    """
    source = x if x._base is None else x._base
    scale, look, cast = states.a, states.look, SharedCast()
    if source.grad_fn is None:
        return cast
    if look is not None and not look.is_spot:
        return cast
    number: object = None
    if scale is not None:
        if scale.dim():  # not set, or a history
            return cast
        number = id(scale), scale._version
        if type(scale) is Tensor and scale.device.type == "cpu":
            number = float(scale)
    place = x.shape, x.stride(), x.storage_offset(), source._version
    autocast = torch.is_autocast_enabled(x.device.type)
    key = (*place, x.dtype, autocast, number, *kind)
    if x.is_cuda and torch.cuda.is_initialized():
        # Another stream would not wait for the cast.
        key = (*key, torch.cuda.current_stream(x.device))
    for last in _LAST.sources:
        if last() is source and last.cast.key == key:
            return last.cast
    cast.key = key
    return cast


def share(x: Tensor, cast: SharedCast) -> None:
    """Lets the next products of ``x`` take this cast, which autograd has recorded."""
    sources = _LAST.sources
    if not sources or sources[0].cast is not cast:
        source = _Source(x if x._base is None else x._base, sources.remove)
        source.cast = cast
        sources[:] = [source]


class SavedOperand(NamedTuple):
    """A tensor to save, its cast and scale. source: what was cast; None for an input itself.
    recasts: whether the source is saved, and cast again with this scale. shared: the cast, which
    other products of the source may take."""

    values: Tensor
    spec: Cast | None = None
    scale: Tensor | None = None
    source: Tensor | None = None
    recasts: bool = False
    shared: SharedCast | None = None


class _Encoding(NamedTuple):
    """How an operand is saved. in_bytes: in the dtype of its format. scaled: with its scale.
    recast: the cast that it gets again; None for none."""

    in_bytes: bool = False
    scaled: bool = False
    recast: Cast | None = None


def save_operands(ctx: Context, *operands: SavedOperand) -> None:
    """Saves operands, as bytes where that is smaller, after an empty tensor (`casting._Round`)."""
    recorded = is_recorded(ctx)
    compiling = not recorded and torch.compiler.is_compiling()
    saved, encodings, sources = [], [], []
    if not compiling:
        saved.append(operands[0].values.new_empty((0,)))
    # torch.func unwraps saved tensors alone. (Of tensor subclasses calls are not recorded either.)
    unwraps = not (recorded or compiling)
    for operand in operands:
        x, spec = operand.values, operand.spec
        scale, source = operand.scale, operand.source
        dtype = None
        if spec is not None and (recorded or compiling) and x.device.type != "mps":
            dtype = _byte_dtype(spec.format, spec.tile, spec.stored_rule)
        if operand.recasts and source is not None and (recorded or compiling):
            saved.append(source)
            encoding = _Encoding(scaled=scale is not None, recast=spec)
        elif spec is None or dtype is None or dtype.itemsize >= x.element_size():
            saved.append(x)
            encoding = _Encoding()
        else:
            shared = operand.shared
            data = None if shared is None else shared.bytes
            if data is None:
                units = x if scale is None else in_units(x, scale, spec.stored_rule)
                data = _stored(units, dtype) if compiling else units.to(dtype)
            if shared is not None:
                shared.bytes = data
            saved.append(data)
            encoding = _Encoding(in_bytes=True, scaled=scale is not None)
        if encoding.scaled and scale is not None:
            saved.append(scale)
        if operand.shared is not None and operand.shared.key and recorded:
            share(x if source is None else source, operand.shared)
        encodings.append(encoding)
        sources.append(source)
        unwraps = unwraps and type(x) in PLAIN
    if unwraps:
        saved += [source for source in sources if source is not None]
        ctx.sources = [source is not None for source in sources]
    else:
        for i, source in enumerate(sources):
            if compiling or (source is not None and not source.requires_grad):
                sources[i] = None
            elif source is not None and not source.is_leaf:
                sources[i] = _connection(source)
        ctx.sources = sources
    ctx.unwraps, ctx.encodings, ctx.marked = unwraps, encodings, not compiling
    ctx.save_for_backward(*saved)


def _connection(source: Tensor) -> Tensor:
    """A tensor in the graph of ``source`` without its memory."""
    # It is not saved: hooks on saved tensors would store its full size.
    with torch.enable_grad():
        zeros: Tensor = apply_eagerly(_Zeros, source)
    return zeros


def saved_operands(ctx: Context, grad: Tensor) -> list[Tensor]:
    """Those of `save_operands`, in the dtype of ``grad``, differentiable where the backward pass
    is."""
    tensors = iter(_saved_tensors(ctx)[ctx.marked :])
    operands = []
    for in_bytes, scaled, recast in ctx.encodings:
        x = next(tensors)
        scale = next(tensors) if scaled else None
        if recast is not None:
            x = only_after(grad, x.detach())
            x, _ = cast_values(x, recast, -1, scale=scale)
            x = x.to(grad.dtype)
        elif in_bytes:
            x = restored(x, scale, grad.dtype)
        operands.append(x)
    if not (torch.is_grad_enabled() and is_differentiated_again()):
        return operands
    sources = ctx.sources
    if ctx.unwraps:
        sources = [next(tensors) if is_saved else None for is_saved in sources]
    pairs = zip(operands, sources, strict=True)
    return [
        x if s is None else x + apply_eagerly(_Zeros, s).to(x.dtype) for x, s in pairs
    ]


class _Zeros(Function):
    """Negative zeros, one in memory, with the gradient of ``x``. Adding them changes no number."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.new_full((), -0.0).expand(x.shape)

    @staticmethod
    def setup_context(ctx: Context, inputs: Arguments, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> Tensor:
        return grad


def _saved_tensors(ctx: Context) -> tuple[Tensor, ...]:
    """``ctx.saved_tensors``; names the remedy if a checkpoint has recomputed other ones."""
    try:
        return ctx.saved_tensors
    except CheckpointError as error:
        raise CheckpointError(f"{_RECOMPUTED}\n{error}") from error


saved_tensors = compiled_as(lambda ctx: ctx.saved_tensors)(_saved_tensors)


_RECOMPUTED = (
    "a product with casts was recomputed differently: a checkpoint inside of fp8.autocast "
    "recomputes outside of it, without casts, unless it is called with "
    "checkpoint(..., use_reentrant=False, context_fn=fp8.checkpoint_contexts), and one inside of "
    "fp8.override needs its backward pass inside of the block"
)


@cache
def _byte_dtype(
    format: str | Format,
    tile: tuple[int, int],
    rule: str | None,
) -> torch.dtype | None:
    """The FP8 dtype in which an operand is saved; None to save it unchanged."""
    # A rule that reads values may give a tensor several scales.
    several = rule is not None and LOWERED[rule].is_simulated
    if tile != (0, 0) or several:
        return None
    return get_format(format).dtype


def _stored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype``, in a graph; by a copy: its partitioner counts a conversion twice."""
    return torch.zeros_like(x, dtype=dtype).copy_(convertible(x, dtype))


def restored(data: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """``data * scale``, computed in float32 or wider and rounded to ``dtype``."""
    one_scale = scale is None or not scale.ndim
    bytes = one_scale and type(data) is Tensor and data.dtype.itemsize == 1
    on_cpu = data.device.type == "cpu" and not torch.compiler.is_dynamo_compiling()
    looks_up = bytes and on_cpu
    values = data
    if looks_up:
        values = torch.arange(256, dtype=torch.uint8).view(data.dtype)
    values = values.to(torch.promote_types(dtype, torch.float32))
    if scale is not None:
        values = values * scale
    values = values.to(dtype)
    if not looks_up:
        return values
    # A lookup takes a fifth of the time of a conversion.
    index = data.view(torch.uint8).flatten().int()
    return values.index_select(0, index).view(data.shape)
