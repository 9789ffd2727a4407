"""Products whose sums are those of a tensor core: `fp8.Recipe.accumulate`.

Operands are cast as in simulation. The numbers of the format enter the sums; scales multiply the
result, unless the instruction applies them itself (MX and NVFP4 on Blackwell). Where scales differ
along the summed axis, and every ``promote`` products, a sum ends and is added in float32 to the
result, with one rounding, as kernels of Hopper do for scales by blocks (DeepSeek-V3,
arXiv:2412.19437, section 3.3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ...casts.casting import (
    LoweredCast,
    QuantizedOperand,
    format_of,
    quantized,
)
from ...casts.operands import one_copy, saved_tensors
from ...casts.rotation import rotation_signs
from ...common.compiler import in_graph, is_differentiated_again, updates_states
from ...formats.format import get_format
from ...formats.quantize import check_dtype
from ...products.sums import Settings
from ...recipes.rules import scale_format
from ...recipes.scaling import widened
from ...recipes.tensor_cores import instruction_for
from ...tensors.scaled_tensor import dequantized
from .arithmetic import Matrix
from .dot import dot


@in_graph
def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    histories: list[Tensor | None],
    how: Settings,
) -> Tensor:
    """``s_y * a b^T + bias`` for a (m, k) and b (n, k), or batches of them.

    histories: as in `fp8.products.matmul`. A product of which an operand is not cast sums as torch
    does. bias has the dtype of the output, and is added after the result is rounded to it.
    """
    of_a, of_b, of_grad = histories
    casts, record = how.casts, updates_states()
    with torch.no_grad():
        signs = rotation_signs(casts.a, a)
        left = operand(a, casts.a, -1, of_a, record, signs)
        right = operand(b, casts.b, -1, of_b, record, signs)
    return _Summed.apply(a, b, bias, of_grad, how, *left, *right)


class _Summed(Function):
    """`product`. a and b receive the gradients and are cast again for their second products; the
    last six arguments are their codes for the first."""

    @staticmethod
    def forward(
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        history: Tensor | None,
        how: Settings,
        *operands: Tensor | None,
    ) -> Tensor:
        left, right = QuantizedOperand(*operands[:3]), QuantizedOperand(*operands[3:])  # type: ignore[arg-type]
        y = multiply(left, right, how.casts.a, how.casts.b, how.sums)
        y = (y * how.scales[0]).to(getattr(torch, how.dtype))
        return y if bias is None else y + (bias * how.bias_scale).to(y.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, _, ctx.history, ctx.how, *operands = inputs
        casts, ctx.dtypes = ctx.how.casts, (a.dtype, b.dtype)
        of_a = operands[:3] if one_copy(casts.a, casts.a_for_grad_b) else (a, None, None)
        of_b = operands[3:] if one_copy(casts.b, casts.b_for_grad_a) else (b, None, None)
        ctx.save_for_backward(*of_a, *of_b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if is_differentiated_again():
            raise RuntimeError(
                "create_graph=True: products with accumulate= have no second derivative"
            )
        how, history, saved = ctx.how, ctx.history, saved_tensors(ctx)
        casts, (_, s_a, s_b) = how.casts, how.scales
        da = db = dbias = g = None
        if ctx.needs_input_grad[0]:
            signs = rotation_signs(casts.grad_for_a, grad)
            g = operand(grad, casts.grad_for_a, -1, history, True, signs)
            b = _second(saved[3:], casts.b_for_grad_a, signs)
            da = multiply(g, b, casts.grad_for_a, casts.b_for_grad_a, how.sums)
            da = (da * s_a).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            signs = rotation_signs(casts.grad_for_b, grad)
            if g is not None and one_copy(casts.grad_for_a, casts.grad_for_b):
                g = g.mT
            else:
                g = operand(grad, casts.grad_for_b, -2, history, True, signs)
            a = _second(saved[:3], casts.a_for_grad_b, signs)
            db = multiply(g, a, casts.grad_for_b, casts.a_for_grad_b, how.sums)
            db = (db * s_b).to(ctx.dtypes[1])
        if ctx.needs_input_grad[2]:
            dbias = grad.sum(0) * s_b
        return da, db, dbias, *[None] * 8


def _second(
    saved: Sequence[Any], spec: LoweredCast | None, signs: Tensor | None
) -> QuantizedOperand:
    """The codes of an operand for its second product, along its other axis. saved: its codes, or
    itself without them."""
    if saved[1] is not None:
        return QuantizedOperand(*saved).mT
    return operand(saved[0], spec, -2, signs=signs)


def operand(
    x: Tensor,
    spec: LoweredCast | None,
    axis: int,
    history: Tensor | None = None,
    record: bool = False,
    signs: Tensor | None = None,
) -> QuantizedOperand:
    """`quantized`; the values and scale 1 if it is not cast."""
    if spec is not None:
        check_dtype(dequantized(x))
    if spec is not None and x.numel():
        return quantized(x, spec, axis, history, record, signs)
    return QuantizedOperand(x if axis == -1 else x.mT, x.new_ones((), dtype=torch.float32))


def multiply(
    a: QuantizedOperand,
    b: QuantizedOperand,
    of_a: LoweredCast | None,
    of_b: LoweredCast | None,
    sums: str,
) -> Tensor:
    """``a b^T``; float32 if both are cast, otherwise in the dtype of one that is not."""
    if of_a is None or of_b is None:
        dtype = (a if of_a is None else b).values.dtype
        pairs = ((a, of_a), (b, of_b))
        first, second = (_decoded(x, spec).to(dtype) for x, spec in pairs)
        return torch.matmul(first, second.mT)
    transposed = [x.values.mT.is_contiguous() for x in (a, b)]
    left, right = _as_used(a.values, b.values, transposed)
    settings = (of_a.text, of_b.text, sums, transposed)
    return _summed(left, a.scale, a.unit, right, b.scale, b.unit, *settings)


def _decoded(x: QuantizedOperand, spec: LoweredCast | None) -> Tensor:
    scale = x.scale if spec is None else widened(x.scale, x.values.shape, spec.tile)
    return x.values * scale.to(x.values.dtype)


# As an operator of its own, because a compiled graph cannot hold its loops.
@torch.library.custom_op(
    "fp8::summed",
    mutates_args=(),
    schema="(Tensor a, Tensor a_scale, Tensor? a_unit, Tensor b, Tensor b_scale, Tensor? b_unit, "
    "str of_a, str of_b, str sums, bool[] transposed) -> Tensor",
)
def _summed(
    a: Tensor,
    a_scale: Tensor,
    a_unit: Tensor | None,
    b: Tensor,
    b_scale: Tensor,
    b_unit: Tensor | None,
    of_a: str,
    of_b: str,
    sums: str,
    transposed: list[bool],
) -> Tensor:
    """The product of the operands. of_a, of_b: the texts of their specs. Operands that are
    ``transposed`` are passed as transposes: in the order of their memory, as the compiler fails on
    casts of one tensor in two orders."""
    a, b = _as_used(a, b, transposed)
    left, right = QuantizedOperand(a, a_scale, a_unit), QuantizedOperand(b, b_scale, b_unit)
    specs = LoweredCast.from_text(of_a), LoweredCast.from_text(of_b)
    return _product(left, right, *specs, sums)


def _as_used(a: Tensor, b: Tensor, transposed: Sequence[bool]) -> tuple[Tensor, Tensor]:
    """The operands or, of those that are ``transposed``, the transposes."""
    return a.mT if transposed[0] else a, b.mT if transposed[1] else b


@_summed.register_fake
def _(a, a_scale, a_unit, b, b_scale, b_unit, of_a, of_b, sums, transposed):  # type: ignore[no-untyped-def]
    a, b = _as_used(a, b, transposed)
    return a.new_empty([*a.shape[:-1], b.shape[-2]], dtype=torch.float32)


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
