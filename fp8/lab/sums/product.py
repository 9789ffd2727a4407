"""Products that sum as a tensor core does, or exactly: `fp8.Recipe.accumulate`.

Operands are cast as in simulation. The numbers of the format enter the sums; scales multiply the
result. Where scales differ along the summed axis, and every ``promote`` products, a sum ends and is
added in float32 to the result, with one rounding, as kernels of Hopper do for scales by blocks
(DeepSeek-V3, arXiv:2412.19437, section 3.3.2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ...casts.casting import QuantizedOperand, quantized
from ...casts.counts import Label
from ...casts.operands import Constants, States, casts_of, saved_tensors
from ...casts.rotation import rotation_signs
from ...casts.scaled_tensor import dequantized
from ...common.compiler import is_differentiated_again, updates_states
from ...formats.quantize import check_dtype
from ...recipes.cast import Cast, cast_of
from ...recipes.scaling import widened
from ...recipes.tensor_cores import EXACT, TENSOR_CORES
from ...torch_internals.decorators import in_graph
from ...torch_internals.flop_counter import SUMMED, count_flops
from .dot import dot

# torch declares no attributes of the context of an autograd function.
Context = Any


@in_graph
def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    states: States,
    how: Constants,
) -> Tensor:
    """``s_y * a b^T + bias`` for a (m, k) and b (n, k), or batches of them.

    A product of which an operand is not cast sums as torch
    does. bias has the dtype of the output, and is added after the result is rounded to it.
    """
    casts = casts_of(how.casts)
    record = updates_states()
    with torch.no_grad():
        signs = rotation_signs(casts.a, a)
        label = how.label("input")
        left = operand(a, casts.a, -1, states.a, record, signs, label)
        label = how.label(casts.second)
        right = operand(b, casts.b, -1, states.b, record, signs, label)
    return _Summed.apply(a, b, bias, states.grad, how, *left[:2], *right[:2])


class _Summed(Function):
    """`product`. a and b receive the gradients and are cast again for their second products; the
    last four arguments are their codes for the first."""

    @staticmethod
    def forward(
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        history: Tensor | None,
        how: Constants,
        *operands: Tensor | None,
    ) -> Tensor:
        left = QuantizedOperand(*operands[:2])  # type: ignore[arg-type]
        right = QuantizedOperand(*operands[2:])  # type: ignore[arg-type]
        casts = casts_of(how.casts)
        y = multiply(left, right, casts.a, casts.b, how.sums)
        y = (y * how.scales[0]).to(getattr(torch, how.dtype))
        if bias is None:
            return y
        return y + (bias * how.bias_scale).to(y.dtype)

    @staticmethod
    def setup_context(
        ctx: Context,
        inputs: tuple[Any, ...],
        output: Tensor,
    ) -> None:
        a, b, _, ctx.history, ctx.how, *operands = inputs
        ctx.dtypes = a.dtype, b.dtype
        casts = casts_of(ctx.how.casts)
        if not casts.reuses_a:
            operands[:2] = a, None
        if not casts.reuses_b:
            operands[2:] = b, None
        ctx.save_for_backward(*operands)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        if is_differentiated_again():
            raise RuntimeError(
                "create_graph=True: products with accumulate= have no second derivative"
            )
        how = ctx.how
        history = ctx.history
        saved = saved_tensors(ctx)
        casts = casts_of(how.casts)
        _, s_a, s_b = how.scales
        da = db = dbias = None
        g = None
        if ctx.needs_input_grad[0]:
            signs = rotation_signs(casts.grad_for_a, grad)
            label = how.label("grad")
            g = operand(grad, casts.grad_for_a, -1, history, True, signs, label)
            b = _second(saved[2:], casts.b_for_grad_a, signs)
            da = multiply(g, b, casts.grad_for_a, casts.b_for_grad_a, how.sums)
            da = (da * s_a).to(ctx.dtypes[0])
        if ctx.needs_input_grad[1]:
            signs = rotation_signs(casts.grad_for_b, grad)
            if g is not None and casts.reuses_grad:
                g = g.mT
            else:
                label = how.label(casts.grad_again)
                g = operand(grad, casts.grad_for_b, -2, history, True, signs, label)
            a = _second(saved[:2], casts.a_for_grad_b, signs)
            db = multiply(g, a, casts.grad_for_b, casts.a_for_grad_b, how.sums)
            db = (db * s_b).to(ctx.dtypes[1])
        if ctx.needs_input_grad[2]:
            dbias = grad.sum(0) * s_b
        return da, db, dbias, *[None] * 6


def _second(
    saved: Sequence[Tensor],
    spec: Cast | None,
    signs: Tensor | None,
) -> QuantizedOperand:
    """The codes of an operand for its second product, along its other axis. saved: its codes, or
    itself without them."""
    values, scale = saved
    if scale is not None:
        return QuantizedOperand(values, scale).mT
    return operand(values, spec, -2, signs=signs)


def operand(
    x: Tensor,
    spec: Cast | None,
    axis: int,
    history: Tensor | None = None,
    record: bool = False,
    signs: Tensor | None = None,
    label: Label = "",
) -> QuantizedOperand:
    """`quantized`; the values and scale 1 if it is not cast."""
    if spec is not None:
        check_dtype(dequantized(x))
        if x.numel():
            return quantized(x, spec, axis, history, record, signs, label=label)
    one = x.new_ones((), dtype=torch.float32)
    if axis == -1:
        return QuantizedOperand(x, one)
    return QuantizedOperand(x.mT, one)


def multiply(
    a: QuantizedOperand,
    b: QuantizedOperand,
    of_a: Cast | None,
    of_b: Cast | None,
    sums: str,
) -> Tensor:
    """``a b^T``; float32 if both are cast, otherwise in the dtype of one that is not."""
    if of_a is None or of_b is None:
        dtype = b.values.dtype
        if of_a is None:
            dtype = a.values.dtype
        first = _decoded(a, of_a)
        second = _decoded(b, of_b)
        return torch.matmul(first.to(dtype), second.to(dtype).mT)
    transposed = [x.values.mT.is_contiguous() for x in (a, b)]
    left, right = _as_used(a.values, b.values, transposed)
    return _summed(
        left, a.scale, right, b.scale, of_a.text, of_b.text, sums, transposed
    )


def _decoded(x: QuantizedOperand, spec: Cast | None) -> Tensor:
    scale = x.scale
    if spec is not None:
        scale = widened(scale, x.values.shape, spec.tile)
    return x.values * scale.to(x.values.dtype)


# It is an operator of its own, because a compiled graph cannot hold its loops.
@torch.library.custom_op(
    "fp8::summed",
    mutates_args=(),
    schema="(Tensor a, Tensor a_scale, Tensor b, Tensor b_scale, str of_a, str of_b, str sums, "
    "bool[] transposed) -> Tensor",
)
def _summed(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    of_a: str,
    of_b: str,
    sums: str,
    transposed: list[bool],
) -> Tensor:
    """The product of the operands. of_a, of_b: the texts of their casts. transposed: the operands
    that are passed as transposes."""
    # In the order of their memory, as the compiler fails on casts of one tensor in two orders.
    a, b = _as_used(a, b, transposed)
    left = QuantizedOperand(a, a_scale)
    right = QuantizedOperand(b, b_scale)
    return _product(left, right, cast_of(of_a), cast_of(of_b), sums)


def _as_used(
    a: Tensor,
    b: Tensor,
    transposed: Sequence[bool],
) -> tuple[Tensor, Tensor]:
    """The operands or, of those that are ``transposed``, the transposes."""
    if transposed[0]:
        a = a.mT
    if transposed[1]:
        b = b.mT
    return a, b


count_flops(SUMMED)


@_summed.register_fake
def _(a, a_scale, b, b_scale, of_a, of_b, sums, transposed):  # type: ignore[no-untyped-def]
    a, b = _as_used(a, b, transposed)
    return a.new_empty([*a.shape[:-1], b.shape[-2]], dtype=torch.float32)


def _product(
    a: QuantizedOperand,
    b: QuantizedOperand,
    of_a: Cast,
    of_b: Cast,
    sums: str,
) -> Tensor:
    """The product of a (..., m, k) and b (..., n, k), float32."""
    if a.values.ndim == 3:
        pairs = zip(_each(a), _each(b), strict=True)
        batches = [_product(x, w, of_a, of_b, sums) for x, w in pairs]
        if not batches:
            return a.values.new_zeros(0, a.values.shape[1], b.values.shape[1]).float()
        return torch.stack(batches)
    x = a.values.float()
    w = b.values.float()
    total = torch.zeros(x.shape[0], w.shape[0], device=x.device)
    if not (x.numel() and w.numel()):  # what has no elements has no scales of tiles
        return total
    chip, promote = sums.split()
    lows = of_a.number_format.min_exponent, of_b.number_format.min_exponent
    part = math.gcd(int(promote), of_a.tile[1], of_b.tile[1]) or x.shape[1]
    for start in range(0, x.shape[1], part):
        columns = slice(start, start + part)
        left = x[:, columns]
        right = w[:, columns]
        if chip == EXACT:
            piece = torch.mm(left.double(), right.double().mT).float()
        else:
            piece = dot(left, right, lows, TENSOR_CORES[chip])
        factor = _scale_at(start, a, of_a) * _scale_at(start, b, of_b).mT
        # A fused multiply-add: float64 has the exact product. The sum is rounded twice, as once for
        # factors that are powers of two (Figueroa 1995, "When is double rounding innocuous?": two
        # float32 numbers, 53 >= 2 * 24 + 2 bits); for others, one in about 2**29 may differ.
        exact = total.double() + piece.double() * factor.double()
        total = exact.float()
    # One of two orders: kernels choose by shapes (`fp8.lab.parity.epilogue`).
    return _scale_of_rows(b, of_b).mT * (_scale_of_rows(a, of_a) * total)


def _each(x: QuantizedOperand) -> list[QuantizedOperand]:
    scales: Sequence[Tensor] = [x.scale] * len(x.values)
    if x.scale.ndim == 3:
        scales = x.scale.unbind()
    pairs = zip(x.values, scales, strict=True)
    return [QuantizedOperand(values, scale) for values, scale in pairs]


def _scale_at(
    column: int,
    x: QuantizedOperand,
    spec: Cast,
) -> Tensor:
    """The scale of the tiles that hold a column, (rows, 1); 1 without tiles along k."""
    across, along = spec.tile
    if not along:
        return x.scale.new_ones(1, 1, dtype=torch.float32)
    of_column = x.scale.float()[:, column // along, None]
    return widened(of_column, (len(x.values), 1), (across, 1))


def _scale_of_rows(x: QuantizedOperand, spec: Cast) -> Tensor:
    """The scale of each row, or of all, (rows, 1); 1 with tiles along k."""
    if spec.tile[1]:
        return x.scale.new_ones(1, 1, dtype=torch.float32)
    return x.scale.float().reshape(-1, 1)
