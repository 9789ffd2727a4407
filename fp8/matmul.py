"""The one place where a matrix product is computed: three GEMMs, their scales, their casts.

    forward    y  = s_y  * Q(x) Q(w)^T
    backward   dx = s_dx * Q(g) Q(w)
               dw = s_dw * Q(g)^T Q(x)

A scale rides in the GEMM (the ``alpha`` of addmm and baddbmm) instead of passing over the output
again. ``Q`` comes from the recipe, and is the identity when there is none. The kernels are called
as ``torch.ops.aten``, which no torch-function mode rewrites: a product is never cast twice, also
when the backward pass, or the graph that a compiler made of it, runs under a mode.
"""

from __future__ import annotations

import threading
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .formats import Format, get_format
from .function import apply
from .quantize import quantize
from .recipe import Cast, Recipe
from .scaling import SCALINGS

__all__ = ["active_recipe", "linear", "matmul"]

aten = torch.ops.aten

Scales = tuple[float, float, float]
"""Factors of the output and of the gradients of the first and second operand."""

ONES: Scales = (1.0, 1.0, 1.0)

Spec = tuple[Any, ...]
"""A Cast as strings and numbers, or () for none: no object crosses an autograd function."""


class _Active(threading.local):
    """The `fp8.autocast` blocks that are open in this thread, innermost last.

    blocks holds (recipe, opaque, ...). A list that is changed, not an attribute that is set: what
    the compiler makes of setting an attribute of a thread-local is lost.
    """

    def __init__(self) -> None:
        self.blocks: list[tuple[Any, ...]] = []


ACTIVE = _Active()


def active_recipe() -> Recipe | None:
    """The recipe of the innermost `fp8.autocast` block of this thread, None outside of all."""
    return ACTIVE.blocks[-1][0] if ACTIVE.blocks else None


def cast_forward(x: Tensor, cast: Cast | None) -> Tensor:
    """``x`` rounded under ``cast``; its gradient passes through unchanged, saturated or not."""
    return x if cast is None else _round(x, spec_of(cast))


def cast_backward(x: Tensor, cast: Cast | None) -> Tensor:
    """``x`` itself; its gradient is rounded under ``cast``."""
    return x if cast is None else apply(_RoundGradient, x, spec_of(cast))


_FIELDS = tuple(field.name for field in fields(Format))


def spec_of(cast: Cast | None) -> Spec:
    """``cast`` as plain values. A Format object becomes the tuple of its fields."""
    if cast is None:
        return ()
    format: Any = cast.format
    if isinstance(format, Format):
        format = tuple(getattr(format, name) for name in _FIELDS)
    return (format, cast.scaling, cast.rounding, cast.overflow, cast.random_bits)


def _rounded(x: Tensor, spec: Spec) -> Tensor:
    """``x`` in the spec's format. No gradient."""
    name, scaling, rounding, overflow, random_bits = spec
    if isinstance(name, str):
        format = get_format(name)
    else:
        format = Format(**dict(zip(_FIELDS, name, strict=True)))
    return quantize(
        x,
        format,
        rounding=rounding,
        overflow=overflow,
        scale=SCALINGS[scaling](x, format),
        random_bits=random_bits,
    )


def rounded_gradient(grad: Tensor, spec: Spec) -> Tensor:
    """An output's gradient as the backward products use it; differentiable, straight through."""
    return _round(grad, spec) if spec else grad


def _round(x: Tensor, spec: Spec) -> Tensor:
    return apply(_Round, x, spec) if torch.is_grad_enabled() else _rounded(x, spec)


class _Round(Function):
    """Saves its output, which the product saves anyway: activation checkpointing counts what is
    saved, and so notices when it recomputes outside of the block what was cast inside."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, spec: Spec) -> Tensor:
        return _rounded(x, spec)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None


class _RoundGradient(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, spec: Spec) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.spec = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return rounded_gradient(grad, ctx.spec), None


def _gemm(a: Tensor, b: Tensor, alpha: float, bias: Tensor | None = None) -> Tensor:
    """``alpha * a @ b (+ bias)`` for two matrices or two batches of matrices."""
    if bias is not None:
        return aten.addmm.default(bias, a, b, alpha=alpha)
    batches = a.dim() == 3
    if alpha == 1.0:
        return aten.bmm.default(a, b) if batches else aten.mm.default(a, b)
    ignored = a.new_zeros((1,))  # beta is 0; not empty, because vmap multiplies by beta
    product = aten.baddbmm.default if batches else aten.addmm.default
    return product(ignored, a, b, beta=0, alpha=alpha)


class _Product(Function):
    """``s_y * a b^T (+ bias)`` for a (m, k) and b (n, k), or batches (B, m, k) and (B, n, k).

    Every product has this one form: it is the layout of the FP8 GEMM, and the gradient of a
    weight (n, k) comes out in the weight's own layout. Arguments: a, b, bias (n,) of two matrices
    or None, the three scales, the spec of the gradient's cast.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        a: Tensor, b: Tensor, bias: Tensor | None, s_y: float, s_a: float, s_b: float, spec: Spec
    ) -> Tensor:
        return _gemm(a, b.mT, s_y, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, _, _, ctx.s_a, ctx.s_b, ctx.spec = inputs
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        needs_a, needs_b, needs_bias, *_ = ctx.needs_input_grad
        g = rounded_gradient(grad, ctx.spec) if needs_a or needs_b else grad
        da = _gemm(g, b, ctx.s_a) if needs_a else None
        db = _gemm(g.mT, a, ctx.s_b) if needs_b else None
        dbias = None
        if needs_bias:
            dbias = grad.sum(0) if ctx.s_b == 1.0 else grad.sum(0) * ctx.s_b
        return da, db, dbias, None, None, None, None


def operands(
    recipe: Recipe | None, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Any, ...]:
    """The operands of a layer's product, cast: to the recipe's formats, then to autocast's dtype.

    In that order each is rounded to its format once, from its full precision; torch.autocast's
    16-bit types hold every value of an 8-bit format (with a scale: where their exponents reach).
    """
    if recipe is not None:
        input, weight = cast_forward(input, recipe.input), cast_forward(weight, recipe.weight)
    return to_autocast_dtype(input, weight, bias)


def to_autocast_dtype(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors in the dtype of the enclosing `torch.autocast`; as they are outside of one.

    None, float64 and what is not floating point stay as they are, as in torch. The first must be a
    tensor.
    """
    device = tensors[0].device.type  # type: ignore[union-attr]
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )


def check_scales(scales: Scales) -> Scales:
    if len(scales) != 3:
        raise ValueError(f"scales must be three numbers (output, two gradients), not {scales!r}")
    return scales


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scales: Scales = ONES,
    recipe: Recipe | None = None,
) -> Tensor:
    """``s_y * input @ weight.T + bias``, with a scale of its own for each gradient.

    input: (..., in). weight: (out, in), or (in,) for an output without its last dimension.
    bias: (out,) or None. Returns (..., out). All of one floating-point dtype, which is the
    result's (torch's own errors otherwise); accumulation is the kernel's, NaN and Inf spread.
    scales: (s_y, s_dx, s_dw); the bias gradient is s_dw times the sum of the output's gradient,
    which no cast has touched.
    recipe: the casts of the operands; None takes the recipe of the enclosing `fp8.autocast`.
    Under `torch.autocast` the operands are cast to the recipe's format first (so that they are
    rounded to it once) and then to autocast's dtype.
    Raises ValueError for shapes that do not fit.
    """
    recipe = recipe or active_recipe()
    s_y, s_dx, s_dw = check_scales(scales)
    if weight.dim() == 1:
        bias = None if bias is None else bias.reshape(1)
        return linear(input, weight[None], bias, scales=scales, recipe=recipe).squeeze(-1)
    if weight.dim() != 2:
        raise ValueError(f"linear needs a weight of 2 dimensions, got shape {tuple(weight.shape)}")
    if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear needs an input of shape (..., {weight.shape[1]}) for a weight of shape "
            f"{tuple(weight.shape)}, got {tuple(input.shape)}"
        )
    input, weight, bias = operands(recipe, input, weight, bias)
    spec = () if recipe is None else spec_of(recipe.grad)
    if input.dim() == 2:
        return apply(_Product, input, weight, bias, s_y, s_dx, s_dw, spec)
    rows = input.unsqueeze(0) if input.dim() == 1 else input.flatten(0, -2)
    y = apply(_Product, rows, weight, bias, s_y, s_dx, s_dw, spec)
    return y.reshape(*input.shape[:-1], weight.shape[0])


def matmul(
    left: Tensor, right: Tensor, *, scales: Scales = ONES, recipe: Recipe | None = None
) -> Tensor:
    """``s_y * left @ right`` with the shapes and broadcasting of `torch.matmul`.

    scales: (s_y, s_dleft, s_dright). Both operands are cast as the recipe's input; otherwise as
    `linear`.
    """
    recipe = recipe or active_recipe()
    scales = check_scales(scales)
    if left.dim() == 0 or right.dim() == 0:
        raise ValueError("matmul needs operands of at least one dimension, got a 0-dim tensor")
    if left.shape[-1] != right.shape[-2 if right.dim() > 1 else 0]:
        raise ValueError(
            f"matmul needs matching inner sizes, got shapes {tuple(left.shape)} and "
            f"{tuple(right.shape)}"
        )
    if recipe is not None:
        left, right = cast_forward(left, recipe.input), cast_forward(right, recipe.input)
    left, right = to_autocast_dtype(left, right)
    spec = () if recipe is None else spec_of(recipe.grad)
    a = left.unsqueeze(0) if left.dim() == 1 else left
    b = right.unsqueeze(1) if right.dim() == 1 else right
    y = _batched(a, b, scales, spec)
    y = y.squeeze(-1) if right.dim() == 1 else y
    return y.squeeze(-1 if right.dim() == 1 else -2) if left.dim() == 1 else y


def _batched(a: Tensor, b: Tensor, scales: Scales, spec: Spec) -> Tensor:
    """The product of two matrices or (broadcast) batches of them, in one call of `_Product`."""
    batch = a.shape[:-2]
    if b.dim() == 2:  # a batch times one matrix is one product
        rows = a if a.dim() == 2 else a.flatten(0, -2)
    else:
        if b.shape[:-2] != batch:
            batch = torch.broadcast_shapes(batch, b.shape[:-2])
            a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
        rows, b = (a, b) if len(batch) == 1 else (a.flatten(0, -3), b.flatten(0, -3))
    y = apply(_Product, rows, b.mT, None, *scales, spec)
    return y if y.dim() == a.dim() else y.reshape(*batch, a.shape[-2], b.shape[-1])
