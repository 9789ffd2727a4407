"""Products whose sums are those of a tensor core: `fp8.Recipe.accumulate`.

Operands are cast as in simulation. The numbers of the format enter the sums; scales multiply the
result, unless the instruction applies them itself (MX and NVFP4 on Blackwell). Where scales differ
along the summed axis, and every ``promote`` products, a sum ends and is added in float32 to the
result, with one rounding, as kernels of Hopper do for scales by blocks (DeepSeek-V3,
arXiv:2412.19437, section 3.3.2).

Convolutions are implicit products of matrices. A sum goes over the kernel positions, the last
dimension fastest, and at each over the channels. The input gradient sums over kernel positions and
output channels; where the stride or an edge leaves no output, a zero is added. The gradient of the
weight sums over the batch and, within it, over output positions. Each group is a product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from ...casts.casting import (
    LoweredCast,
    QuantizedOperand,
    format_of,
    narrowed,
    quantized,
)
from ...casts.groups import Groups, aligned, cast_groups, pieces, product_shape
from ...casts.operands import one_copy, saved_tensors
from ...casts.rotation import rotation_signs
from ...common.compiler import in_graph, is_differentiated_again, updates_states
from ...formats.format import get_format
from ...formats.quantize import check_dtype
from ...products.sums import Geometry, Settings
from ...recipes.rules import scale_format
from ...recipes.scaling import widened
from ...recipes.tensor_cores import instruction_for
from ...tensors.scaled_tensor import dequantized
from .arithmetic import Matrix
from .dot import dot

aten = torch.ops.aten


class _Convolution(NamedTuple):
    """A convolution: its geometry, and the sizes of its output, input and kernel."""

    geometry: Geometry
    output: tuple[int, ...]
    input: tuple[int, ...]
    kernel: tuple[int, ...]


@in_graph
def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    histories: list[Tensor | None],
    how: Settings,
    offs: Tensor | None = None,
) -> Tensor:
    """``s_y * a b^T + bias`` for a (m, k) and b (n, k), or batches of them.

    histories: as in `fp8.products.matmul`. A product of which an operand is not cast sums as torch
    does. bias has the dtype of the output, and is added after the result is rounded to it, along
    dimension 1. offs: of a grouped product, as in `fp8.products.grouped`.
    """
    of_a, of_b, of_grad = histories
    casts, record = how.casts, updates_states()
    with torch.no_grad():
        signs, groups = rotation_signs(casts.a, a), Groups(offs, how.split, -1)
        left = operand(a, casts.a, groups, of_a, record, signs)
        right = operand(b, casts.b, groups, of_b, record, signs)
    return _Summed.apply(a, b, bias, offs, of_grad, how, *left, *right)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    histories: list[Tensor | None],
    how: Settings,
    geometry: Geometry,
) -> Tensor:
    """``s_y * convolution(x, weight) + bias``, for casts with one scale for each operand.

    x: (batch, channels, *size). weight: as in `aten.convolution`; what does not fit raises its
    error. histories, how, bias: as in `product`.
    """
    with torch.no_grad():
        shapes = (torch.empty(t.shape, device="meta") for t in (x, weight))
        size = aten.convolution.default(*shapes, None, *geometry).shape[2:]
    of = _Convolution(geometry, tuple(size), tuple(x.shape[2:]), tuple(weight.shape[2:]))
    return product(x, weight, bias, histories, how._replace(convolution=of))


class _Summed(Function):
    """`product`. a and b receive the gradients and are cast again for their second products; the
    last six arguments are their codes for the first."""

    @staticmethod
    def forward(
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        offs: Tensor | None,
        history: Tensor | None,
        how: Settings,
        *operands: Tensor | None,
    ) -> Tensor:
        left, right = QuantizedOperand(*operands[:3]), QuantizedOperand(*operands[3:])  # type: ignore[arg-type]
        if (of := how.convolution) is None:
            y = multiply(left, right, how.casts.a, how.casts.b, offs, how)
        else:
            y = _convolved(left, right, how.casts.a, how.casts.b, of.geometry, of.output, how)
        y = (y * how.scales[0]).to(getattr(torch, how.dtype))
        if bias is None:
            return y
        bias = (bias * how.bias_scale).to(y.dtype)
        return y + bias.view(-1, *[1] * (y.ndim - 2))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, _, offs, ctx.history, ctx.how, *operands = inputs
        casts, ctx.dtypes = ctx.how.casts, (a.dtype, b.dtype)
        of_a = operands[:3] if one_copy(casts.a, casts.a_for_grad_b) else (a, None, None)
        of_b = operands[3:] if one_copy(casts.b, casts.b_for_grad_a) else (b, None, None)
        ctx.save_for_backward(offs, *of_a, *of_b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if is_differentiated_again():
            raise RuntimeError(
                "create_graph=True: products with accumulate= have no second derivative"
            )
        how, history, (offs, *saved) = ctx.how, ctx.history, saved_tensors(ctx)
        casts, (_, s_a, s_b) = how.casts, how.scales
        along, across = Groups(offs, how.split, -1), Groups(offs, how.split, -2)
        da = db = dbias = g = None
        if ctx.needs_input_grad[0]:
            signs = rotation_signs(casts.grad_for_a, grad)
            g = operand(grad, casts.grad_for_a, along, history, True, signs)
            b = _second(saved[3:], casts.b_for_grad_a, across, signs)
            if (of := how.convolution) is None:
                da = multiply(g, b, casts.grad_for_a, casts.b_for_grad_a, offs, how)
            else:
                kinds = casts.grad_for_a, casts.b_for_grad_a
                da = _convolved(g, b.mT, *kinds, of.geometry.turned, of.input, how)
            da = (da * s_a).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            signs = rotation_signs(casts.grad_for_b, grad)
            if g is not None and one_copy(casts.grad_for_a, casts.grad_for_b):
                g = g.mT
            else:
                g = operand(grad, casts.grad_for_b, across, history, True, signs)
            a = _second(saved[:3], casts.a_for_grad_b, across, signs)
            kinds = casts.grad_for_b, casts.a_for_grad_b
            if how.convolution is None:
                db = multiply(g, a, *kinds, offs, how)
            else:
                db = _kernel_gradient(g.mT, a.mT, *kinds, how.convolution, how)
            db = (db * s_b).to(ctx.dtypes[1])
        if ctx.needs_input_grad[2]:
            dbias = grad.sum([d for d in range(grad.ndim) if d != 1]) * s_b
        return da, db, dbias, *[None] * 9


def _second(
    saved: Sequence[Any], spec: LoweredCast | None, groups: Groups, signs: Tensor | None
) -> QuantizedOperand:
    """The codes of an operand for its second product, along its other axis. saved: its codes, or
    itself without them."""
    if saved[1] is not None:
        return QuantizedOperand(*saved).mT
    return operand(saved[0], spec, groups, signs=signs)


def operand(
    x: Tensor,
    spec: LoweredCast | None,
    groups: Groups,
    history: Tensor | None = None,
    record: bool = False,
    signs: Tensor | None = None,
) -> QuantizedOperand:
    """`quantized`, by groups if these split an axis; the values and scale 1 if it is not cast."""
    if spec is not None:
        check_dtype(dequantized(x))
    if spec is not None and groups.split:
        return QuantizedOperand(*cast_groups(x, groups, spec, history, record, signs, apart=True))
    if spec is not None and x.numel():
        return quantized(x, spec, groups.axis, history, record, signs)
    return QuantizedOperand(x if groups.axis == -1 else x.mT, x.new_ones((), dtype=torch.float32))


def multiply(
    a: QuantizedOperand,
    b: QuantizedOperand,
    of_a: LoweredCast | None,
    of_b: LoweredCast | None,
    offs: Tensor | None,
    how: Settings,
) -> Tensor:
    """``a b^T``; float32 if both are cast, otherwise in the dtype of one that is not."""
    if of_a is None or of_b is None:
        dtype = (a if of_a is None else b).values.dtype
        pairs = ((a, of_a), (b, of_b))
        first, second = (_decoded(x, spec, how.split).to(dtype) for x, spec in pairs)
        if how.split:
            y: Tensor = torch.ops.fp8.multiply_groups(first, second.mT, offs, 1.0)
            return y
        return torch.matmul(first, second.mT)
    if a.values.ndim == b.values.ndim:
        offs = aligned(offs, of_a)
    transposed = [x.values.mT.is_contiguous() for x in (a, b)]
    left, right = _as_used(a.values, b.values, transposed)
    settings = (of_a.text, of_b.text, how.sums, bool(how.split), transposed)
    return _summed(left, a.scale, a.unit, right, b.scale, b.unit, offs, *settings)


def _decoded(x: QuantizedOperand, spec: LoweredCast | None, split: int) -> Tensor:
    scale = x.scale
    if spec is not None and not split:
        scale = widened(scale, x.values.shape, spec.tile)
    return x.values * scale.to(x.values.dtype)


# As an operator of its own, because a compiled graph cannot hold its loops.
@torch.library.custom_op(
    "fp8::summed",
    mutates_args=(),
    schema="(Tensor a, Tensor a_scale, Tensor? a_unit, Tensor b, Tensor b_scale, Tensor? b_unit, "
    "Tensor? offs, str of_a, str of_b, str sums, bool grouped, bool[] transposed) -> Tensor",
)
def _summed(
    a: Tensor,
    a_scale: Tensor,
    a_unit: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    b_unit: Tensor | None,
    offs: Tensor | None,
    of_a: str,
    of_b: str,
    sums: str,
    grouped: bool,
    transposed: list[bool],
) -> Tensor:
    """The product of the operands, or that of each group of `cast_groups`, zero outside of all
    groups. of_a, of_b: the texts of their specs. Operands that are ``transposed`` are passed
    as transposes:
    in the order of their memory, as the compiler fails on casts of one tensor in two orders."""
    a, b = _as_used(a, b, transposed)
    left, right = QuantizedOperand(a, a_scale, a_unit), QuantizedOperand(b, b_scale, b_unit)
    specs = LoweredCast.from_text(of_a), LoweredCast.from_text(of_b)
    if not grouped:
        return _product(left, right, *specs, sums)
    y = torch.zeros(product_shape(a, b.mT, offs), device=a.device)
    firsts = _groups(left, offs, -2 if b.ndim == 3 else -1, specs[0])
    seconds = _groups(right, offs, -2 if a.ndim == 3 else -1, specs[1])
    into = pieces(y, offs, -1 if a.ndim == 3 else -2)
    for first, second, part in zip(firsts, seconds, into, strict=True):
        if first is not None and second is not None:
            part.copy_(_product(first, second, *specs, sums))
    return y


def _as_used(a: Tensor, b: Tensor, transposed: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """The operands or, of those that are ``transposed``, the transposes."""
    return a.mT if transposed[0] else a, b.mT if transposed[1] else b


@_summed.register_fake
def _(a, a_scale, a_unit, b, b_scale, b_unit, offs, of_a, of_b, sums, grouped, transposed):  # type: ignore[no-untyped-def]
    a, b = _as_used(a, b, transposed)
    shape = product_shape(a, b.mT, offs) if grouped else [*a.shape[:-1], b.shape[-2]]
    return a.new_empty(shape, dtype=torch.float32)


def _product(
    a: QuantizedOperand, b: QuantizedOperand, of_a: LoweredCast, of_b: LoweredCast, sums: str
) -> Tensor:
    """The product of a (..., m, k) and b (..., n, k), float32."""
    if a.values.ndim == 3:
        pairs = zip(_each(a), _each(b), strict=True)
        batches = [_product(x, w, of_a, of_b, sums) for x, w in pairs]
        if not batches:
            return a.values.new_zeros(0, a.values.shape[1], b.values.shape[1]).float()
        return torch.stack(batches)
    values, others = a.values, b.values
    total = torch.zeros(values.shape[0], others.shape[0], device=values.device)
    if not (values.numel() and others.numel()):  # what has no elements has no scales of tiles
        return total
    chip, promote = sums.split()
    x, w = _Operand.of(a, of_a), _Operand.of(b, of_b)
    formats, stored = (of_a.format, of_b.format), (x.scale_format, w.scale_format)
    how = instruction_for(chip, formats, (x.along, w.along), stored)
    assert how is not None, "Recipe has checked it"
    inside = bool(how.scales)
    part = math.gcd(int(promote), *(() if inside else (x.along, w.along))) or values.shape[1]
    for start in range(0, values.shape[1], part):
        piece = dot(x.matrix(start, part, inside), w.matrix(start, part, inside), how)
        factor = None if inside else _product_of(x.scale_at(start), w.scale_at(start))
        if start and factor is not None:
            total = (total.double() + piece.double() * factor.double()).float()  # one rounding
        else:
            total = total + (piece if factor is None else piece * factor)
    return total * (x.whole * w.whole.mT)


def _groups(
    x: QuantizedOperand, offs: Tensor | None, axis: int, spec: LoweredCast
) -> list[QuantizedOperand | None]:
    """The codes of each group as `quantized` has them; None for one that is empty."""
    assert x.unit is not None
    has_units = scale_format(spec.rule) == "e4m3"
    units = x.unit.unbind() if has_units else [None] * x.unit.shape[0]
    parts = zip(pieces(x.values, offs, axis), pieces(x.scale, offs, axis), units, strict=True)
    return [
        QuantizedOperand(values, narrowed(scale, spec.tile), unit) if values.numel() else None
        for values, scale, unit in parts
    ]


def _each(x: QuantizedOperand) -> list[QuantizedOperand]:
    scales = x.scale if x.scale.ndim == 3 else [x.scale] * len(x.values)
    return [QuantizedOperand(*each, x.unit) for each in zip(x.values, scales, strict=True)]


def _product_of(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The product of the scales of rows of two operands, None for 1."""
    if a is None or b is None:
        return a if b is None else b.mT
    return a * b.mT


class _Operand(NamedTuple):
    """values: (rows, k). tiles: the scale of each row's tiles, (rows, k / along); None without
    tiles along k. whole: the scale of each row, or of all, (rows or 1, 1). scale_format: of the
    tiles' scales, "" for float32."""

    values: Tensor
    low: int
    tiles: Tensor | None
    along: int
    whole: Tensor
    scale_format: str

    @staticmethod
    def of(operand: QuantizedOperand, spec: LoweredCast) -> _Operand:
        values, scale, unit = operand
        x, low, stored = values.float(), format_of(spec).min_exponent, scale_format(spec.rule)
        across, along = spec.tile
        if not along:
            return _Operand(x, low, None, 0, scale.float().reshape(-1, 1), stored)
        one = torch.ones((1, 1), device=x.device)
        scale = widened(scale.float(), (x.shape[0], scale.shape[1]), (across, 1))
        if unit is None:
            return _Operand(x, low, scale, along, one, stored)
        scale = (scale / unit.float()).clamp(max=get_format(stored).max)
        return _Operand(x, low, scale, along, one * unit, stored)

    def matrix(self, start: int, length: int, scaled: bool) -> Matrix:
        """A part of the columns; with its scales, if the instruction applies them."""
        values = self.values[:, start : start + length]
        if not scaled or self.tiles is None:
            return Matrix(values, self.low)
        of = slice(start // self.along, -(-(start + length) // self.along))
        scale_low = get_format(self.scale_format).min_exponent
        return Matrix(values, self.low, self.tiles[:, of], self.along, scale_low)

    def scale_at(self, column: int) -> Tensor | None:
        """The scale of the tiles that hold a column, (rows, 1)."""
        return None if self.tiles is None else self.tiles[:, column // self.along, None]


# Convolutions. What is cast along its other axis is given as a transpose.


def _kernel_gradient(
    g: QuantizedOperand,
    x: QuantizedOperand,
    of_g: LoweredCast | None,
    of_x: LoweredCast | None,
    of: _Convolution,
    how: Settings,
) -> Tensor:
    geometry = of.geometry
    if geometry.transposed:  # the maps that the kernel moves over, and those with one position each
        x, g, of_x, of_g = g, x, of_g, of_x
    plain = geometry._replace(transposed=False)
    moved = x._replace(values=_unfolded(x.values, of.kernel, plain, g.values.shape[2:]).mT)
    by_group = g.values.unflatten(1, (geometry.groups, -1)).movedim(0, 2).flatten(2)
    y = multiply(moved, g._replace(values=by_group), of_x, of_g, None, how)
    return y.unflatten(1, (*of.kernel, -1)).movedim((-1, -2), (1, 2)).flatten(0, 1)


def _convolved(
    maps: QuantizedOperand,
    kernels: QuantizedOperand,
    of_maps: LoweredCast | None,
    of_kernels: LoweredCast | None,
    geometry: Geometry,
    size: Sequence[int],
    how: Settings,
) -> Tensor:
    """The convolution, (batch, channels, *size), in the dtype of `multiply`."""
    batch, w = maps.values.shape[0], kernels.values
    left = maps._replace(values=_unfolded(maps.values, w.shape[2:], geometry, size))
    w = w.unflatten(0, (geometry.groups, -1))
    if geometry.transposed:  # (groups, inputs of one, outputs of one, *kernel)
        w = w.transpose(1, 2)
    right = kernels._replace(values=w.movedim(2, -1).flatten(2))
    y = multiply(left, right, of_maps, of_kernels, None, how)
    return y.unflatten(1, (batch, *size)).movedim(-1, 1).movedim(2, 0).flatten(1, 2)


def _unfolded(x: Tensor, kernel: Sequence[int], how: Geometry, size: Sequence[int]) -> Tensor:
    """What each output reads: (groups, batch * positions, kernel positions * channels of one)."""
    dims, channels = len(size), x.shape[1] // how.groups
    x = x.movedim(1, -1)
    for d in range(dims):
        x = F.pad(x, [0, 0] * (dims - d) + [0, 1])
        index = _positions(x.shape[1 + d] - 1, size[d], kernel[d], how, d, x.device)
        x = x.index_select(1 + d, index.flatten())
    shape = [side for pair in zip(size, kernel, strict=True) for side in pair]
    x = x.reshape(x.shape[0], *shape, how.groups, channels)
    positions, taps = range(1, 2 * dims + 1, 2), range(2, 2 * dims + 1, 2)
    x = x.permute(2 * dims + 1, 0, *positions, *taps, 2 * dims + 2)
    return x.flatten(dims + 2).flatten(1, dims + 1)


def _positions(
    length: int, size: int, kernel: int, how: Geometry, dim: int, device: torch.device
) -> Tensor:
    """The position that output and kernel position read along a dimension, (size, kernel);
    ``length`` for none."""
    stride, padding, dilation = how.stride[dim], how.padding[dim], how.dilation[dim]
    output, tap = torch.arange(size, device=device)[:, None], torch.arange(kernel, device=device)
    if how.transposed:
        moved = output + padding - dilation * tap
        at, exists = moved // stride, moved % stride == 0
    else:
        at = output * stride - padding + dilation * tap
        exists = torch.ones_like(at, dtype=torch.bool)
    return torch.where(exists & (at >= 0) & (at < length), at, length)
