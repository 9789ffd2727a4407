"""The one place where a matrix product is computed: three GEMMs, their scales, their casts.

    forward    y  = s_y  * Q(x) Q(w)^T
    backward   dx = s_dx * Q(g) Q(w)
               dw = s_dw * Q(g)^T Q(x)

A scale rides in the GEMM (the ``alpha`` of addmm and baddbmm) instead of passing over the output
again. ``Q`` comes from the recipe, and is the identity when there is none. The kernels are called
as ``torch.ops.aten``, which no torch-function mode rewrites: a product is never cast twice, also
when the backward pass runs under a mode.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .formats import Format, get_format
from .quantize import quantize, quantize_forward
from .recipe import Cast, Recipe
from .scaling import SCALINGS

__all__ = ["active_recipe", "linear", "matmul"]

aten = torch.ops.aten
ONES = (1.0, 1.0, 1.0)

# The recipes of the enclosing fp8.autocast blocks, innermost last. A list that modes push to and
# pop from, because it can be read inside a compiled graph, where thread-locals cannot.
_ACTIVE: list[Recipe] = []


def active_recipe() -> Recipe | None:
    """The recipe of the innermost `fp8.autocast` block, or None outside all of them."""
    return _ACTIVE[-1] if _ACTIVE else None


def cast_forward(x: Tensor, cast: Cast | None) -> Tensor:
    """``x`` rounded under ``cast``; its gradient passes through unchanged."""
    if cast is None:
        return x
    scale = SCALINGS[cast.scaling](x, get_format(cast.format))
    return quantize_forward(
        x, cast.format, rounding=cast.rounding, overflow=cast.overflow, scale=scale
    )


def cast_backward(x: Tensor, cast: Cast | None) -> Tensor:
    """``x`` itself; its gradient is rounded under ``cast``."""
    return x if cast is None else _CastGradient.apply(x, *_spec(cast))


_FIELDS = tuple(field.name for field in fields(Format))


def _spec(cast: Cast | None) -> tuple[Any, ...]:
    """A cast as strings and numbers: no object crosses an autograd function under compile."""
    if cast is None:
        return ()
    format = cast.format
    if isinstance(format, Format):
        format = tuple(getattr(format, name) for name in _FIELDS)  # type: ignore[assignment]
    return (format, cast.scaling, cast.rounding, cast.overflow)


def _cast(x: Tensor, spec: tuple[Any, ...]) -> Tensor:
    if not spec:
        return x
    name, scaling, rounding, overflow = spec
    format = (
        get_format(name)
        if isinstance(name, str)
        else Format(**dict(zip(_FIELDS, name, strict=True)))
    )
    scale = SCALINGS[scaling](x, format)
    return quantize(x, format, rounding=rounding, overflow=overflow, scale=scale)


class _CastGradient(Function):
    @staticmethod
    def forward(x: Tensor, *spec: Any) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.spec = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_cast(grad, ctx.spec), *(None for _ in ctx.spec))


def _gemm(a: Tensor, b: Tensor, alpha: float, bias: Tensor | None = None) -> Tensor:
    """``alpha * a @ b (+ bias)`` for two matrices or two batches of matrices."""
    if a.dim() == 3:
        if alpha == 1.0:
            return aten.bmm.default(a, b)
        return aten.baddbmm.default(a.new_empty((1, 1, 1)), a, b, beta=0, alpha=alpha)
    if bias is not None:
        return aten.addmm.default(bias, a, b, alpha=alpha)
    if alpha == 1.0:
        return aten.mm.default(a, b)
    return aten.addmm.default(a.new_empty((1,)), a, b, beta=0, alpha=alpha)


class _Product(Function):
    """``s_y * a b^T (+ bias)`` for a (m, k) and b (n, k), or batches (B, m, k) and (B, n, k).

    Every product has this one form: it is the layout of the FP8 GEMM, and the gradient of a
    weight (n, k) comes out in the weight's own layout.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        a: Tensor, b: Tensor, bias: Tensor | None, s_y: float, s_a: float, s_b: float, *spec: Any
    ) -> Tensor:
        return _gemm(a, b.mT, s_y, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, _, _, ctx.s_a, ctx.s_b, *ctx.spec = inputs
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        g = _cast(grad, tuple(ctx.spec))
        da = _gemm(g, b, ctx.s_a) if ctx.needs_input_grad[0] else None
        db = _gemm(g.mT, a, ctx.s_b) if ctx.needs_input_grad[1] else None
        dbias = None
        if ctx.needs_input_grad[2]:
            dbias = grad.sum(0)
            dbias = dbias if ctx.s_b == 1.0 else dbias * ctx.s_b
        return (da, db, dbias, None, None, None, *(None for _ in ctx.spec))


def to_autocast_dtype(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The tensors in the dtype of the enclosing `torch.autocast`; as they are outside of one."""
    first = next(t for t in tensors if t is not None)
    if not torch.is_autocast_enabled(first.device.type):
        return tensors
    dtype = torch.get_autocast_dtype(first.device.type)
    return tuple(
        t.to(dtype) if t is not None and t.is_floating_point() and t.dtype != torch.float64 else t
        for t in tensors
    )


def check_scales(scales: tuple[float, float, float]) -> tuple[float, float, float]:
    if len(scales) != 3:
        raise ValueError(f"scales must be three numbers (output, two gradients), not {scales!r}")
    return scales


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scales: tuple[float, float, float] = ONES,
    recipe: Recipe | None = None,
) -> Tensor:
    """``s_y * input @ weight.T + bias``, with a scale of its own for each gradient.

    input: (..., in). weight: (out, in). bias: (out,) or None. Returns (..., out).
    scales: (s_y, s_dx, s_dw); the bias gradient is s_dw times the sum of the output's gradient.
    recipe: the casts of the operands; None takes the recipe of the enclosing `fp8.autocast`.
    Under `torch.autocast` the operands are cast to the recipe's format first (so they are rounded
    once) and then to autocast's dtype.
    """
    recipe = recipe or active_recipe()
    s_y, s_dx, s_dw = check_scales(scales)
    if weight.dim() != 2:
        raise ValueError(f"linear needs a weight of 2 dimensions, got shape {tuple(weight.shape)}")
    if input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"linear needs an input of shape (..., {weight.shape[1]}) for a weight of shape "
            f"{tuple(weight.shape)}, got {tuple(input.shape)}"
        )
    if recipe is not None:
        input, weight = cast_forward(input, recipe.input), cast_forward(weight, recipe.weight)
    input, weight, bias = to_autocast_dtype(input, weight, bias)
    rows = input.unsqueeze(0) if input.dim() == 1 else input.flatten(0, -2)
    spec = _spec(recipe.grad) if recipe is not None else ()
    y = _Product.apply(rows, weight, bias, s_y, s_dx, s_dw, *spec)
    return y if input.dim() == 2 else y.reshape(*input.shape[:-1], weight.shape[0])


def matmul(
    left: Tensor,
    right: Tensor,
    *,
    scales: tuple[float, float, float] = ONES,
    recipe: Recipe | None = None,
) -> Tensor:
    """``s_y * left @ right`` with the shapes and broadcasting of `torch.matmul`.

    scales: (s_y, s_dleft, s_dright). Both operands are cast as the recipe's input.
    """
    recipe = recipe or active_recipe()
    s_y, s_dl, s_dr = check_scales(scales)
    if left.dim() == 0 or right.dim() == 0:
        raise ValueError("matmul needs operands of at least one dimension, got a 0-dim tensor")
    if recipe is not None:
        left, right = cast_forward(left, recipe.input), cast_forward(right, recipe.input)
    left, right = to_autocast_dtype(left, right)
    spec = _spec(recipe.grad) if recipe is not None else ()
    a = left.unsqueeze(0) if left.dim() == 1 else left
    b = right.unsqueeze(1) if right.dim() == 1 else right
    if a.shape[-1] != b.shape[-2]:
        raise ValueError(
            f"matmul needs matching inner sizes, got shapes {tuple(left.shape)} and "
            f"{tuple(right.shape)}"
        )
    batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    shape = (*batch, a.shape[-2], b.shape[-1])
    if b.dim() == 2:
        a = a.flatten(0, -2)
    else:
        a = a.expand(*batch, *a.shape[-2:]).flatten(0, -3)
        b = b.expand(*batch, *b.shape[-2:]).flatten(0, -3)
    y = _Product.apply(a, b.mT, None, s_y, s_dl, s_dr, *spec).reshape(shape)
    y = y.squeeze(-1) if right.dim() == 1 else y
    return y.squeeze(-1 if right.dim() == 1 else -2) if left.dim() == 1 else y
