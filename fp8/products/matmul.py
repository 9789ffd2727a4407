"""Every matrix product is computed here: three GEMMs with their scales and casts.

    forward    y  = s_y  * Q(x) Q(w)^T
    backward   dx = s_dx * Q(g) Q(w)
               dw = s_dw * Q(g)^T Q(x)

A scale is an argument of the GEMM (``alpha`` of addmm and baddbmm), which saves a pass over the
output. ``Q`` is the cast of the recipe, separate for each of the six operands, and the identity
without a recipe. With casts by rows or blocks, x, w and g are cast from high precision again for
their second product, along the axis that it sums over. Kernels are called as ``torch.ops.aten``,
which torch-function modes do not intercept, so a product is never cast twice.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..casts.casting import LoweredCast, as_read, cast_values, rounded, times
from ..casts.counts import is_sampled, product_name
from ..casts.operands import (
    Casts,
    Copies,
    SavedOperand,
    casts_of,
    copies_of,
    named,
    one_copy,
    save_operands,
    saved_operands,
)
from ..casts.rotation import rotation_signs
from ..common.compiler import compiled_as, is_differentiated_again
from ..formats.format import dtype_name
from ..formats.quantize import refuse_nested
from ..frame import FRAMES
from ..recipes.recipe import Recipe
from ..torch_internals.autograd_functions import apply, apply_eagerly
from ..torch_internals.decorators import in_graph
from .active import Scales, histories, product_recipe

aten = torch.ops.aten

ONES: Scales = (1, 1, 1)  # ints: torch.compile would treat floats as dynamic


class Geometry(NamedTuple):
    """The arguments of `aten.convolution`."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int


def _cast(
    x: Tensor,
    spec: LoweredCast | None,
    axis: int,
    geometry: Geometry | None,
    history: Tensor | None = None,
    record: bool | None = None,
    signs: Tensor | None = None,
    *,
    weight: bool = False,
    differentiable: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`rounded` or `cast_values`. In a convolution, feature maps (batch, channels, *size) and its
    weight are cast as matrices: see `fp8.products.convolution`."""
    if spec is None:
        return x, None
    cast = rounded if differentiable else cast_values
    if geometry is None or (spec.tile == (0, 0) and not spec.is_simulated):
        return cast(x, spec, axis, history, record, signs)
    last = x.movedim(1, -1)
    matrix = last.flatten(1) if weight else last.flatten(0, -2)
    if weight and geometry.transposed:
        axis = -3 - axis
    return cast(matrix, spec, axis)[0].reshape(last.shape).movedim(-1, 1), None


def gemm(a: Tensor, b: Tensor, alpha: float, fuses: bool, bias: Tensor | None = None) -> Tensor:
    """``alpha * a @ b (+ bias)`` for two matrices or two batches of them. fuses: as `_fuses`."""
    if bias is not None:
        return aten.addmm.default(bias, a, b, alpha=alpha)
    batches = a.ndim == 3
    if alpha == 1.0 or fuses:
        y = aten.bmm.default(a, b) if batches else aten.mm.default(a, b)
        return y if alpha == 1.0 else y * alpha
    ignored = a.new_zeros((1,))  # ignored, as beta is 0; not empty, because vmap multiplies by beta
    product = aten.baddbmm.default if batches else aten.addmm.default
    return product(ignored, a, b, beta=0, alpha=alpha)


@compiled_as(lambda a: a.ndim == 3 and a.dtype != torch.float16)
def _fuses(a: Tensor) -> bool:
    """Whether the scale is applied as a separate multiplication: in a graph, where it fuses with
    its neighbours and baddbmm would materialize its ignored input. Not in float16, where the
    unscaled product could overflow."""
    return False


class Settings(NamedTuple):
    """The constants of a product. geometry: of a convolution. bias_scale: as in `linear`."""

    scales: Scales
    casts: Casts
    copies: Copies
    fuses: bool = False
    geometry: Geometry | None = None
    bias_scale: float = 1.0


class Operands(NamedTuple):
    """The cast operands, and the scale factors of those with one. history: of the gradient."""

    a: Tensor
    b: Tensor
    scale_a: Tensor | None
    scale_b: Tensor | None
    history: Tensor | None


class _Product(Function):
    """``s_y * a b^T (+ bias)`` for a (m, k) and b (n, k), or batches (B, m, k) and (B, n, k), the
    layout of FP8 GEMMs; or the convolution of maps a and a weight b. a and b are passed to receive
    gradients, and for casts along their other axis."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        a: Tensor, b: Tensor, bias: Tensor | None, operands: Operands, how: Settings
    ) -> Tensor:
        bias = _scaled_bias(bias, how.bias_scale)
        if how.geometry is not None:
            if bias is not None and bias.dtype != operands.a.dtype:  # torch drops imaginary parts
                raise ValueError(
                    f"bias must have the dtype of the input, {operands.a.dtype}, got {bias.dtype}"
                )
            weight = times(operands.b, how.scales[0])
            return aten.convolution.default(operands.a, weight, bias, *how.geometry)
        return gemm(operands.a, operands.b.mT, how.scales[0], how.fuses, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        # The history is not saved with save_for_backward: it is updated before it is used.
        a, b, _, operands, ctx.how = inputs
        ctx.history, ctx.scales, ctx.fuses = operands.history, ctx.how.scales, ctx.how.fuses
        ctx.turned = operands.b.mT.is_contiguous()  # the right operand of a matmul
        casts, copies = ctx.how.casts, ctx.how.copies
        save_operands(
            ctx,
            _to_save(a, operands.a, operands.scale_a, casts.a, copies.a),
            _to_save(b, operands.b, operands.scale_b, casts.b, copies.b),
        )

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = saved_operands(ctx, grad.dtype)
        needs_a, needs_b, needs_bias, *_ = ctx.needs_input_grad
        casts, of = ctx.how.copies.casts, ctx.how.geometry
        again_a = again_b = None
        for_a: Any = None
        for_b: Any = None
        g = grad if casts.grad_for_a is None and casts.grad_for_b is None else as_read(grad)
        signs = rotation_signs(casts.grad_for_a, grad), rotation_signs(casts.grad_for_b, grad)
        cast = partial(_cast, geometry=of, differentiable=is_differentiated_again())
        recorded = {"history": ctx.history, "record": True}

        def second(
            x: Tensor, spec: LoweredCast | None, signs: Tensor | None, weight: bool
        ) -> Tensor:
            y = x if spec is None else cast(as_read(x), spec, -2, signs=signs, weight=weight)[0]
            return y.to(grad.dtype)

        if needs_a:
            for_a, _ = cast(g, casts.grad_for_a, -1, signs=signs[0], **recorded)
            if of is not None:
                again_b = second(b, casts.b_for_grad_a, signs[0], True)
        if needs_b:
            for_b = for_a
            if for_a is None or not one_copy(casts.grad_for_a, casts.grad_for_b):
                for_b, _ = cast(g, casts.grad_for_b, -2, signs=signs[1], **recorded)
            again_a = second(a, casts.a_for_grad_b, signs[1], False)
        if needs_a and of is None:  # in this order stochastic casts draw their bits
            again_b = second(b, casts.b_for_grad_a, signs[0], True)
        if of is None:
            da, db = _both(ctx, again_a, again_b, for_a, for_b)
        else:
            da, db = _of_convolution(ctx, a, b, again_a, again_b, for_a, for_b)
        return da, db, _of_bias(grad, ctx.scales[2]) if needs_bias else None, None, None


def _to_save(
    x: Tensor, values: Tensor, scale: Tensor | None, spec: LoweredCast | None, copied: bool
) -> SavedOperand:
    if values is x or not copied:
        return SavedOperand(x)
    return SavedOperand(values, spec, scale, x)


class _Plain(Function):
    """`_Product` without casts."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        a: Tensor, b: Tensor, bias: Tensor | None, scales: Scales, fuses: bool, bias_scale: float
    ) -> Tensor:
        return gemm(a, b.mT, scales[0], fuses, _scaled_bias(bias, bias_scale))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, _, ctx.scales, ctx.fuses, _ = inputs
        ctx.turned = b.mT.is_contiguous()  # as in `_Product`
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        if grad.dtype.is_complex:
            a, b = a.conj(), b.conj()
        needs_a, needs_b, needs_bias, *_ = ctx.needs_input_grad
        a, b = a if needs_b else None, b if needs_a else None
        da, db = _both(ctx, a, b, grad, grad)
        return da, db, _of_bias(grad, ctx.scales[2]) if needs_bias else None, *[None] * 3


def _both(
    ctx: Any, a: Tensor | None, b: Tensor | None, for_a: Tensor, for_b: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of two operands, from the output's gradient as cast for each. a is None if b
    needs no gradient, and vice versa. ctx.turned: whether b's has the layout of its transpose."""
    da = db = None
    turned, fuses, (_, s_a, s_b) = ctx.turned, ctx.fuses, ctx.scales
    if fuses and for_a is for_b and s_a == s_b:  # one multiplication for both
        for_a = for_b = for_a * s_a
        s_a = s_b = 1.0
    if b is not None:
        da = gemm(for_a, b, s_a, fuses)
    if a is not None:
        first, second = (a.mT, for_b) if turned else (for_b.mT, a)
        db = gemm(first, second, s_b, fuses)
        db = db.mT if turned else db
    return da, db


def _of_convolution(
    ctx: Any,
    a: Tensor,
    b: Tensor,
    again_a: Tensor | None,
    again_b: Tensor | None,
    for_a: Tensor,
    for_b: Tensor,
) -> tuple[Tensor | None, Tensor | None]:
    """`_both` of a convolution. Scales multiply what is smaller than the maps."""
    da = db = None
    geometry, (_, s_a, s_b) = ctx.how.geometry, ctx.scales
    gradient = aten.convolution_backward.default  # itself differentiable
    if again_b is not None:
        weight = times(again_b, s_a)
        da, _, _ = gradient(for_a, a.to(for_a.dtype), weight, None, *geometry, [True, False, False])
    if again_a is not None:
        weight = b.to(for_b.dtype)
        _, db, _ = gradient(for_b, again_a, weight, None, *geometry, [False, True, False])
        db = times(db, s_b)
    return da, db


def _scaled_bias(bias: Tensor | None, scale: float) -> Tensor | None:
    """The bias in the dtype of the enclosing `torch.autocast`. One of integers is not scaled: torch
    refuses to add it."""
    if bias is None:
        return None
    numbers = bias.dtype.is_floating_point or bias.dtype.is_complex
    return to_autocast_dtype(times(bias, scale) if numbers else bias)[0]


def _of_bias(grad: Tensor, scale: float) -> Tensor:
    """The gradient of a bias along dimension 1."""
    return times(grad.sum([d for d in range(grad.ndim) if d != 1]), scale)


def _uncast(a: Tensor, b: Tensor, bias: Tensor | None, scales: Scales, bias_scale: float) -> Tensor:
    """`_as_it_is` in a graph."""
    a, b = to_autocast_dtype(a, b)
    return _Plain.apply(a, b, bias, scales, _fuses(a), bias_scale)


@partial(in_graph, graph=_uncast)
def _as_it_is(
    a: Tensor, b: Tensor, bias: Tensor | None, scales: Scales, bias_scale: float
) -> Tensor:
    """The product without casts."""
    a, b = to_autocast_dtype(a, b)
    return apply_eagerly(_Plain, a, b, bias, scales, False, bias_scale)


def multiply(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    scales: Scales,
    recipe: Recipe | None,
    backend: str,
    kind: str = "linear",
    bias_scale: float = 1.0,
) -> Tensor:
    """Casts the operands to the recipe's formats, then to the dtype of torch.autocast, which has
    every value of an 8-bit format (with a scale factor: within its exponent range), and multiplies
    them."""
    if a.dtype.is_complex and b.dtype.is_complex:
        recipe = None
    elif not a.dtype.is_floating_point:
        scales, bias_scale = ONES, 1.0
    if recipe is None:
        return _as_it_is(a, b, bias, scales, bias_scale)
    layer = kind != "matmul"
    states = histories(recipe, kind, a, b, layer=layer)
    if (pass_ := FRAMES.items[-1].measurement) is not None:
        return measured(pass_, recipe, states, a, b, _as_it_is(a, b, bias, scales, bias_scale))
    name = product_name(kind, b if kind == "linear" else None, recipe)
    unnamed = casts_of(recipe.text, layer)
    casts = named(unnamed, name, layer) if name else unnamed
    sampled = bool(name) and is_sampled(name)  # such products are simulated, with torch's sums
    if recipe.accumulate is not None and not sampled:
        from ..lab.sums import product as sums

        (like,) = to_autocast_dtype(a[:0])
        how = sums.Settings(scales, casts, recipe.sums, dtype_name(like.dtype), bias_scale)
        return sums.product(a, b, bias, states, how)
    if backend != "simulate" and not sampled:
        from ..kernels import product as native

        if native.takes(backend, a, b):
            (like,) = to_autocast_dtype(a[:0])
            if kinds := native.kernels(backend, a, b, unnamed, like.dtype):
                dtype, fast = dtype_name(like.dtype), recipe.is_fast
                settings = native.Settings(kinds, scales, casts, dtype, bias_scale, fast, layer)
                return native.product(a, b, bias, states, settings)
    return simulated(a, b, bias, scales, casts, states, None, bias_scale)


@in_graph
def simulated(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    scales: Scales,
    casts: Casts,
    states: list[Any],
    geometry: Geometry | None = None,
    bias_scale: float = 1.0,
) -> Tensor:
    """Casts the operands and multiplies their values, or convolves them."""
    of_a, of_b, of_grad = states
    signs = rotation_signs(casts.a, a)
    x, w, scale_x, scale_w = a, b, None, None
    if casts.a is not None:
        a = as_read(a)
        x, scale_x = _cast(a.detach(), casts.a, -1, geometry, of_a, signs=signs)
    if casts.b is not None:
        b = as_read(b)
        w, scale_w = _cast(b.detach(), casts.b, -1, geometry, of_b, signs=signs, weight=True)
    x, w = to_autocast_dtype(x, w)
    operands = Operands(x, w, scale_x, scale_w, of_grad)
    how = Settings(scales, casts, copies_of(casts), _fuses(x), geometry, bias_scale)
    return apply(_Product, a, b, bias, operands, how)


def measured(
    pass_: Any,
    recipe: Recipe,
    states: list[Any],
    a: Tensor,
    b: Tensor,
    y: Tensor,
    parts: Any = None,
) -> Tensor:
    """``y``, the uncast product of a and b; measures its operands and its gradient. parts: as in
    `fp8.casts.measuring.Measurement.operand`."""
    for state, x, cast in zip(states[:2], (a, b), recipe.forward, strict=True):
        pass_.operand(state, x, cast, parts)
    return pass_.gradient(states[2], y, recipe.grad, parts)


def to_autocast_dtype(*tensors: Tensor | None) -> tuple[Any, ...]:
    """The arguments, of which the first is a tensor, in the dtype of the enclosing
    `torch.autocast`. As in torch, float64 and tensors that are not floating point stay."""
    device = tensors[0].device.type  # type: ignore[union-attr]
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        t.to(dtype)
        if t is not None and t.dtype.is_floating_point and t.dtype != torch.float64
        else t
        for t in tensors
    )


def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    scales: Scales = ONES,
    recipe: Recipe | None = None,
    backend: str = "simulate",
    unit: bool = False,
    bias_scale: float = 1.0,
) -> Tensor:
    """``s_y * input @ weight.T + bias``, with a separate scale for each gradient.

    input: (..., in). weight: (out, in), or (in,) for an output without the last dimension. bias:
    (out,) or None. Returns (..., out). All have one floating-point dtype, which is that of the
    result (torch raises otherwise). Accumulation is that of the kernel; NaN and Inf propagate.
    scales: (s_y, s_dx, s_dw). The bias gradient is s_dw times the sum of the output's uncast
    gradient. Integers are not scaled, complex numbers not cast. recipe: None uses recipe and
    backend of the enclosing `fp8.autocast`. unit: whether the tensors are unit-scaled, which
    decides the recipe under "auto". bias_scale: a factor of the bias in the output, but not of its
    gradient. Raises ValueError for shapes that do not fit.
    """
    if recipe is None and (block := FRAMES.items[-1].block) is not None:
        recipe, backend = product_recipe(unit), block.backend
    if recipe is not None and input.is_nested:
        refuse_nested(input)
    if one := weight.ndim == 1:
        weight, bias = weight[None], None if bias is None else bias.reshape(1)
    if weight.ndim != 2 or input.ndim == 0 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            "linear needs an input of shape (..., in) and a weight of shape (out, in), got "
            f"{tuple(input.shape)} and {tuple(weight.shape)}"
        )
    rows = input if input.ndim == 2 else input[None] if input.ndim == 1 else input.flatten(0, -2)
    y = multiply(rows, weight, bias, scales, recipe, backend, "linear", bias_scale)
    y = y if input.ndim == 2 else y.reshape(*input.shape[:-1], weight.shape[0])
    return y.squeeze(-1) if one else y


def matmul(
    left: Tensor,
    right: Tensor,
    *,
    scales: Scales = ONES,
    recipe: Recipe | None = None,
    backend: str = "simulate",
    unit: bool = False,
    cast: bool = True,
) -> Tensor:
    """``s_y * left @ right`` with the shapes and broadcasting of `torch.matmul`.

    Both operands are cast as the recipe's input; in the gradient of the right one, the casts are
    those of grad_weight. cast: False for none, whatever the block. Otherwise as `linear`.
    """
    if recipe is None and cast and (block := FRAMES.items[-1].block) is not None:
        recipe, backend = product_recipe(unit), block.backend
    if 0 in (left.ndim, right.ndim) or left.shape[-1] != right.shape[-2 if right.ndim > 1 else 0]:
        raise ValueError(
            f"matmul needs matching inner sizes, got shapes {tuple(left.shape)} and "
            f"{tuple(right.shape)}"
        )
    a = left.unsqueeze(0) if left.ndim == 1 else left
    b = right.unsqueeze(1) if right.ndim == 1 else right
    batch = a.shape[:-2]
    if b.ndim == 2:  # a batch times one matrix is one product
        rows = a if a.ndim == 2 else a.flatten(0, -2)
    else:
        if b.shape[:-2] != batch:
            batch = torch.broadcast_shapes(batch, b.shape[:-2])
            a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
        rows, b = (a, b) if len(batch) == 1 else (a.flatten(0, -3), b.flatten(0, -3))
    # Not the attribute mT, which torch.compile makes an alias outside of control flow.
    y = multiply(rows, b.transpose(-2, -1), None, scales, recipe, backend, "matmul")
    y = y if y.ndim == a.ndim else y.reshape(*batch, a.shape[-2], b.shape[-1])
    y = y.squeeze(-1) if right.ndim == 1 else y
    return y.squeeze(-1 if right.ndim == 1 else -2) if left.ndim == 1 else y
