"""Matrix products in low precision. Every product of the two packages is computed here.

How a layer ``y = x w^T`` trains in FP8
---------------------------------------

**Three products.** x has shape (m, k): m tokens of k inputs. w has shape (n, k). g is the gradient
of y::

    forward      y  = s_y  * Q(x) Q(w)^T      sums over k
    grad_input   dx = s_dx * Q(g) Q(w)        sums over n
    grad_weight  dw = s_dw * Q(g)^T Q(x)      sums over m

``s`` are the factors of unit scaling, 1 for other layers. They are an argument of the GEMM
(``alpha``), which saves a pass over its result.

**Six casts.** Each product has two operands, and a recipe states a cast for each of the six: a
format, a source of its scale and a rounding. ``Q`` is that cast; without a recipe it is the
identity. x and w usually are e4m3, which has three mantissa bits, and g is e5m2, which has two
and reaches further (Micikevicius et al., arXiv:2209.05433, section 3).

**What a scale costs.** ``Q(x)`` holds ``x / scale`` in the format, and the GEMM multiplies its
result by the scales of both operands.

- "unit" has no scale, and "static" one number that was measured before: x is read once.
- "tensor" reads x twice: first for its largest magnitude, then for the cast.
- "delayed" takes the largest magnitude of earlier steps, and records the magnitude of this one.
- "row", "block", "mx" and "nv" have a scale for each tile along the summed axis. A tile is in
  registers when its magnitude is known, so x is read once.

**Why both layouts.** An FP8 tensor core sums along the contiguous axis of both operands. x is
summed over k in the forward pass and over m in grad_weight, so a kernel needs it in both layouts,
and so it does w and g. If one scale covers the tensor, the second layout has the same values:
it is a transposed copy. If tiles have scales, they lie along the other axis there: the values
differ, and the operand is cast again from high precision. `ProductCasts.reuses_a` and `reuses_b`
say which.

**What is saved for the backward pass.** x as it was cast, one byte a value, where the second
product reuses it; else as it came, in high precision. Layers that read one x share one cast. w as
it was cast, or as a parameter that is cast again, if x has many rows.

**Simulation and kernels.** In simulation the cast values are computed in the dtype of x, and the
GEMM multiplies them as they are. `fp8.kernels` multiplies the same values on FP8 hardware.
The GEMMs are called as ``torch.ops.aten``, which torch-function modes do not intercept: a product
is never cast twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..casts.casting import PLAIN, as_read, cast_values, times
from ..casts.counts import Label, is_sampled, product_name
from ..casts.operands import (
    NO_STATES,
    ONES,
    RECAST_ROWS,
    Constants,
    Geometry,
    SavedOperand,
    Scales,
    SharedCast,
    States,
    casts_of,
    recasts,
    save_operands,
    saved_operands,
    shared_cast,
    token_of,
)
from ..casts.rotation import rotation_signs
from ..common.compiler import compiled_as, is_differentiated_again
from ..formats.format import dtype_name
from ..formats.quantize import refuse_nested
from ..frame import FRAMES
from ..recipes.cast import Cast
from ..recipes.history import LayerState
from ..recipes.recipe import Recipe
from ..torch_internals import Arguments, Context
from ..torch_internals.autograd_functions import apply, apply_eagerly
from ..torch_internals.decorators import in_graph
from .active import histories, product_recipe

if TYPE_CHECKING:
    from ..casts.measuring import Measurement, Parts

aten = torch.ops.aten


def gemm(
    a: Tensor,
    b: Tensor,
    alpha: float,
    fuses: bool,
    bias: Tensor | None = None,
) -> Tensor:
    """``alpha * a @ b (+ bias)`` for two matrices or two batches of them. fuses: as `_fuses`."""
    if bias is not None:
        return aten.addmm.default(bias, a, b, alpha=alpha)
    batches = a.ndim == 3
    if alpha == 1.0 or fuses:
        y = aten.bmm.default(a, b) if batches else aten.mm.default(a, b)
        if alpha == 1.0:
            return y
        return y * alpha
    # Ignored, as beta is 0; not empty, because vmap multiplies by beta.
    ignored = a.new_zeros((1,))
    product = aten.baddbmm.default if batches else aten.addmm.default
    return product(ignored, a, b, beta=0, alpha=alpha)


@compiled_as(lambda a: a.dtype != torch.float16)
def _fuses(a: Tensor) -> bool:
    """Whether the scale of batches is a separate multiplication: in a graph, where it fuses with
    its neighbours and baddbmm would materialize its ignored input. Not in float16, where the
    unscaled product could overflow."""
    return False


class Operands(NamedTuple):
    """The cast operands, and the scale factors of operands with one. states: the states of the
    product. shared: the cast of a, which other products of a may take."""

    a: Tensor
    b: Tensor
    scale_a: Tensor | None
    scale_b: Tensor | None
    states: States
    shared: SharedCast | None = None


class _Product(Function):
    """``s_y * a b^T (+ bias)`` for a (m, k) and b (n, k), or batches (B, m, k) and (B, n, k), the
    layout of FP8 GEMMs. a and b are passed to receive gradients, and for casts along their other
    axis."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        operands: Operands,
        how: Constants,
    ) -> Tensor:
        if bias is not None:
            bias = _scaled_bias(bias, how.bias_scale)
        return gemm(operands.a, operands.b.mT, how.scales[0], how.fuses, bias)

    @staticmethod
    def setup_context(ctx: Context, inputs: Arguments, output: Tensor) -> None:
        # States are not saved with save_for_backward: they are updated before they are used.
        a, b, _, operands, ctx.how = inputs
        ctx.states = operands.states
        ctx.turned = operands.b.mT.is_contiguous()  # the right operand of a matmul
        casts = casts_of(ctx.how.casts)
        of_a, of_b = SavedOperand(a, shared=operands.shared), SavedOperand(b)
        if casts.reuses_a and operands.a is not a:
            of_a = SavedOperand(
                operands.a, casts.a, operands.scale_a, a, shared=operands.shared
            )
        if casts.reuses_b and operands.b is not b:
            of_b = SavedOperand(
                operands.b, casts.b, operands.scale_b, b, ctx.how.recasts
            )
        save_operands(ctx, of_a, of_b)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        how, dbias = ctx.how, None
        needs_a, needs_b, needs_bias, *_ = ctx.needs_input_grad
        for_a, for_b, a, b = _recast(ctx, grad, cast_values, cast_values)
        left = a.to(grad.dtype) if needs_b else None
        right = b.to(grad.dtype) if needs_a else None
        da, db = _both(left, right, for_a, for_b, how, ctx.turned)
        if needs_bias:
            dbias = grad.sum(0)
            if how.scales[2] != 1:
                dbias = dbias * how.scales[2]
        return da, db, dbias, None, None


CastOperand = Callable[..., tuple[Tensor, Tensor | None]]
"""`cast_values`, or one with its arguments."""


def _recast(
    ctx: Context,
    grad: Tensor,
    cast: CastOperand,
    cast_b: CastOperand,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradient of the output as it is cast for a and for b, and a and b as they are cast for
    the gradient of the other. cast_b: casts b."""
    a, b = saved_operands(ctx, grad)
    needs_a, needs_b, *_ = ctx.needs_input_grad
    how, states = ctx.how, ctx.states
    casts, look = casts_of(how.casts), states.look
    reports = bool(how.name) or look is not None
    signs_a = signs_b = None
    if casts.grad_for_a is not None or casts.grad_for_b is not None:
        grad = as_read(grad)
    if casts.random_signs:
        signs_a = rotation_signs(casts.grad_for_a, grad)
        signs_b = rotation_signs(casts.grad_for_b, grad)
    for_a = for_b = grad
    if torch.is_grad_enabled() and is_differentiated_again():
        cast = partial(cast, differentiable=True)
        cast_b = partial(cast_b, differentiable=True)
    label: Label = ""
    # Stochastic casts draw their bits in this order.
    if needs_a and casts.grad_for_a is not None:
        if reports:
            label = how.label("grad", look)
        for_a, _ = cast(
            grad, casts.grad_for_a, -1, states.grad, True, signs_a, label=label
        )
    if needs_b and needs_a and casts.reuses_grad:
        for_b = for_a
    elif needs_b and casts.grad_for_b is not None:
        if reports:
            label = how.label(casts.grad_again, look)
        for_b, _ = cast(
            grad, casts.grad_for_b, -2, states.grad, True, signs_b, label=label
        )
    if needs_b and casts.a_for_grad_b is not None and not casts.reuses_a:
        if reports:
            label = how.label("input again", look)
        a, _ = cast(a, casts.a_for_grad_b, -2, signs=signs_b, label=label)
    if needs_a and casts.b_for_grad_a is not None and not casts.reuses_b:
        if reports:
            label = how.label(f"{casts.second} again", look)
        b, _ = cast_b(b, casts.b_for_grad_a, -2, signs=signs_a, label=label)
    return for_a, for_b, a, b


class _Convolution(_Product):
    """The convolution of maps a and a weight b. Feature maps (batch, channels, *size) and the
    weight are cast as matrices: see `fp8.products.convolution`."""

    @staticmethod
    def forward(
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        operands: Operands,
        how: Constants,
    ) -> Tensor:
        if bias is not None:
            bias = _scaled_bias(bias, how.bias_scale)
            if bias.dtype != operands.a.dtype:  # torch drops imaginary parts
                raise ValueError(
                    f"bias must have the dtype of the input, {operands.a.dtype}, got {bias.dtype}"
                )
        assert how.geometry is not None
        weight = times(operands.b, how.scales[0])
        return aten.convolution.default(operands.a, weight, bias, *how.geometry)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        needs_a, needs_b, needs_bias, *_ = ctx.needs_input_grad
        geometry, (_, s_a, s_b) = ctx.how.geometry, ctx.how.scales
        for_a, for_b, a, b = _recast(ctx, grad, *casts_of_maps(geometry))
        gradient = aten.convolution_backward.default  # itself differentiable
        da = db = dbias = None
        if needs_a:
            weight = times(b.to(grad.dtype), s_a)  # smaller than the maps
            like, only = a.to(for_a.dtype), [True, False, False]
            da, _, _ = gradient(for_a, like, weight, None, *geometry, only)
        if needs_b:
            maps, like, only = a.to(grad.dtype), b.to(for_b.dtype), [False, True, False]
            _, db, _ = gradient(for_b, maps, like, None, *geometry, only)
            db = times(db, s_b)
        if needs_bias:
            dbias = times(grad.sum([d for d in range(grad.ndim) if d != 1]), s_b)
        return da, db, dbias, None, None


def casts_of_maps(geometry: Geometry) -> tuple[CastOperand, CastOperand]:
    """`cast_values` of the feature maps, and of the weight, of a convolution."""
    maps = partial(cast_maps, geometry=geometry, weight=False)
    return maps, partial(cast_maps, geometry=geometry, weight=True)


def cast_maps(
    x: Tensor,
    spec: Cast,
    axis: int,
    *args: Any,
    geometry: Geometry,
    weight: bool,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`cast_values` of feature maps, or of the weight, of a convolution."""
    if spec.tile == (0, 0) and not spec.is_simulated:
        return cast_values(x, spec, axis, *args, **options)
    last = x.movedim(1, -1)
    matrix = last.flatten(0, -2)
    if weight:
        matrix = last.flatten(1)
    if weight and geometry.transposed:
        axis = -3 - axis
    y, _ = cast_values(matrix, spec, axis, **options)
    return y.reshape(last.shape).movedim(-1, 1), None


class _Plain(Function):
    """`_Product` without casts."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor, bias: Tensor | None, how: Constants) -> Tensor:
        if bias is not None:
            bias = _scaled_bias(bias, how.bias_scale)
        return gemm(a, b.mT, how.scales[0], how.fuses, bias)

    @staticmethod
    def setup_context(ctx: Context, inputs: Arguments, output: Tensor) -> None:
        a, b, _, ctx.how = inputs
        ctx.turned = b.mT.is_contiguous()  # as in `_Product`
        ctx.save_for_backward(a, b)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        # torch's gradient of a function of complex numbers is the conjugate one.
        if grad.dtype.is_complex:
            a, b = a.conj(), b.conj()
        needs_a, needs_b, needs_bias, *_ = ctx.needs_input_grad
        if not needs_b:
            a = None
        if not needs_a:
            b = None
        da, db = _both(a, b, grad, grad, ctx.how, ctx.turned)
        dbias = times(grad.sum(0), ctx.how.scales[2]) if needs_bias else None
        return da, db, dbias, None


def _both(
    a: Tensor | None,
    b: Tensor | None,
    for_a: Tensor,
    for_b: Tensor,
    how: Constants,
    turned: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of two operands, from the output's gradient as cast for each. a is None if b
    needs no gradient, and vice versa. turned: whether the gradient of b has the layout of its
    transpose."""
    da = db = None
    fuses, (_, s_a, s_b) = how.fuses, how.scales
    if fuses and for_a is for_b and s_a == s_b:  # one multiplication for both
        for_a = for_b = for_a * s_a
        s_a = s_b = 1.0
    if b is not None:
        da = gemm(for_a, b, s_a, fuses)
    if a is not None and turned:
        db = gemm(a.mT, for_b, s_b, fuses).mT
    elif a is not None:
        db = gemm(for_b.mT, a, s_b, fuses)
    return da, db


def _scaled_bias(bias: Tensor, scale: float) -> Tensor:
    """The bias in the dtype of the enclosing `torch.autocast`. One of integers is not scaled: torch
    refuses to add it."""
    if scale != 1 and (bias.dtype.is_floating_point or bias.dtype.is_complex):
        bias = bias * scale
    (bias,) = to_autocast_dtype(bias)
    return bias


def _uncast(a: Tensor, b: Tensor, bias: Tensor | None, how: Constants) -> Tensor:
    """`_as_it_is` in a graph."""
    a, b = to_autocast_dtype(a, b)
    how = how.changed(fuses=a.ndim == 3 and _fuses(a))
    return _Plain.apply(a, b, bias, how)


@partial(in_graph, graph=_uncast)
def _as_it_is(a: Tensor, b: Tensor, bias: Tensor | None, how: Constants) -> Tensor:
    """The product without casts."""
    a, b = to_autocast_dtype(a, b)
    return apply_eagerly(_Plain, a, b, bias, how)


def multiply(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    how: Constants,
    recipe: Recipe | None,
    backend: str,
    kind: str = "linear",
    state: LayerState | None = None,
) -> Tensor:
    """Casts the operands to the recipe's formats, then to the dtype of torch.autocast, which has
    every value of an 8-bit format (with a scale factor: within its exponent range), and multiplies
    them. how: scales and bias_scale."""
    # No format has complex numbers.
    if a.dtype.is_complex and b.dtype.is_complex:
        recipe = None
    elif not a.dtype.is_floating_point:
        how = Constants()
    if recipe is None:
        return _as_it_is(a, b, bias, how)
    layer, states = kind != "matmul", NO_STATES
    frame = FRAMES.items[-1]
    if state is None and frame.block is not None:
        state = frame.block.state
    if recipe.keeps_history or (state is not None and state.looks):
        states = histories(recipe, kind, a, b, layer=layer, state=state)
    if frame.measurement is not None:
        y = _as_it_is(a, b, bias, how)
        return measured(frame.measurement, recipe, states, a, b, y)
    name = ""
    if frame.recording or (recipe.fixed and state is None):
        name = product_name(kind, b if kind == "linear" else None, recipe)
    how = how.changed(casts=token_of(recipe.text, layer), name=name)
    if kind == "linear":
        # An exported program admits any number of rows.
        exports = torch.compiler.is_exporting() if state is None else state.exports
        if not exports and a.shape[0] >= RECAST_ROWS and recasts(b, how.casts):
            how = how.changed(recasts=True)
    on_device = backend == "native" or (backend == "auto" and a.device.type == "cuda")
    if on_device or recipe.accumulate is not None:
        return _on_tensor_cores(a, b, bias, how, states, recipe, backend)
    return simulated(a, b, bias, how, states)


def _on_tensor_cores(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    how: Constants,
    states: States,
    recipe: Recipe,
    backend: str,
) -> Tensor:
    """The product with the sums of an accelerator, or by kernels where they support it."""
    if is_sampled(how.name):
        return simulated(a, b, bias, how, states)
    (like,) = to_autocast_dtype(a[:0])
    how = how.changed(dtype=dtype_name(like.dtype), fast=recipe.is_fast)
    if recipe.accumulate is not None:
        from ..lab.sums import product as sums

        return sums.product(a, b, bias, states, how.changed(sums=recipe.sums))
    from ..kernels import product as native

    if native.takes(backend, a, b):
        kernels = native.kernels(backend, a, b, how.casts, like.dtype)
        if kernels:
            how = how.changed(kernels=kernels)
            return native.product(a, b, bias, states, how)
    return simulated(a, b, bias, how, states)


@in_graph
def simulated(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    how: Constants,
    states: States,
) -> Tensor:
    """Casts the operands and multiplies their values, or convolves them."""
    # Torch-function modes have seen the product as a whole. Classes of tensors see its operations.
    classes = type(a) not in PLAIN or type(b) not in PLAIN
    with nullcontext() if classes else torch.DisableTorchFunction():
        casts, look = casts_of(how.casts), states.look
        signs = scale_x = scale_w = None
        shared = SharedCast()
        if casts.random_signs:
            signs = rotation_signs(casts.a, a)
        cast_a: CastOperand = cast_values
        cast_b: CastOperand = cast_values
        function: type[Function] = _Product
        if how.geometry is not None:
            cast_a, cast_b = casts_of_maps(how.geometry)
            function = _Convolution
        if casts.a is not None or casts.a_for_grad_b is not None:
            a = as_read(a)
        if casts.b is not None or casts.b_for_grad_a is not None:
            b = as_read(b)
        x, w = a, b
        reports = bool(how.name) or look is not None
        label: Label = ""
        if casts.a is not None:
            if reports:
                label = how.label("input", look)
            if casts.shares_a and not how.name:
                shared = shared_cast(a, states, (how.casts, how.geometry is None))
            if shared.made is None:
                shared.made = cast_a(
                    a.detach(), casts.a, -1, states.a, None, signs, label=label
                )
            x, scale_x = shared.made
        if casts.b is not None:
            if reports:
                label = how.label(casts.second, look)
            w, scale_w = cast_b(
                b.detach(), casts.b, -1, states.b, None, signs, label=label
            )
        x, w = to_autocast_dtype(x, w)
        if x.ndim == 3 and _fuses(x):
            how = how.changed(fuses=True)
        operands = Operands(x, w, scale_x, scale_w, states, shared)
        return apply(function, a, b, bias, operands, how)


def measured(
    measurement: Measurement,
    recipe: Recipe,
    states: States,
    a: Tensor,
    b: Tensor,
    y: Tensor,
    parts: Parts | None = None,
) -> Tensor:
    """``y``, the uncast product of a and b; measures its operands and its gradient. parts: as in
    `fp8.casts.measuring.Measurement.operand`."""
    measurement.operand(states.a, a, recipe.input, parts)
    measurement.operand(states.b, b, recipe.forward[1], parts)
    return measurement.gradient(states.grad, y, recipe.grad, parts)


def to_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The arguments in the dtype of the enclosing `torch.autocast`. As in torch, float64 and
    tensors that are not floating point stay."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype, converted = torch.get_autocast_dtype(device), []
    for t in tensors:
        if t.dtype.is_floating_point and t.dtype != torch.float64:
            t = t.to(dtype)
        converted.append(t)
    return tuple(converted)


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
    state: LayerState | None = None,
) -> Tensor:
    """``s_y * input @ weight.T + bias``, with a separate scale for each gradient.

    input: (..., in). weight: (out, in), or (in,) for an output without the last dimension. bias:
    (out,) or None. Returns (..., out). All have one floating-point dtype, which the result has too
    (torch raises otherwise). The kernel determines how sums accumulate; NaN and
    Inf propagate.
    scales: (s_y, s_dx, s_dw). The bias gradient is s_dw times the sum of the output's uncast
    gradient. Integers are not scaled, complex numbers not cast. recipe: None uses recipe and
    backend of the enclosing `fp8.autocast`. unit: whether the tensors are unit-scaled, which
    decides the recipe under "auto". bias_scale: a factor of the bias in the output, but not of its
    gradient. state: the state of the layer, for a recipe that keeps scales; None: of the block.
    Raises ValueError for shapes that do not fit.
    """
    if recipe is None and (block := FRAMES.items[-1].block) is not None:
        recipe, backend = product_recipe(unit), block.backend
    if recipe is not None and input.is_nested:
        refuse_nested(input)
    one = weight.ndim == 1
    if one:
        weight = weight[None]
        if bias is not None:
            bias = bias.reshape(1)
    if weight.ndim != 2 or input.ndim == 0 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            "linear needs an input of shape (..., in) and a weight of shape (out, in), got "
            f"{tuple(input.shape)} and {tuple(weight.shape)}"
        )
    rows = input
    if input.ndim == 1:
        rows = input[None]
    elif input.ndim > 2:
        rows = input.flatten(0, -2)
    how = Constants(scales=scales, bias_scale=bias_scale)
    y = multiply(rows, weight, bias, how, recipe, backend, "linear", state)
    if input.ndim != 2:
        y = y.reshape(*input.shape[:-1], weight.shape[0])
    if one:
        return y.squeeze(-1)
    return y


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

    Both operands are cast as the recipe's input; the gradient of the right one has the casts of
    grad_weight. cast: False for none, whatever the block. Otherwise as `linear`.
    """
    if recipe is None and cast and (block := FRAMES.items[-1].block) is not None:
        recipe, backend = product_recipe(unit), block.backend
    inner = right.shape[-2:-1] or right.shape
    if 0 in (left.ndim, right.ndim) or left.shape[-1:] != inner:
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
            a = a.expand(*batch, *a.shape[-2:])
            b = b.expand(*batch, *b.shape[-2:])
        rows = a
        if len(batch) > 1:
            rows, b = a.flatten(0, -3), b.flatten(0, -3)
    # Not the attribute mT, which torch.compile makes an alias outside of control flow.
    how, right_rows = Constants(scales=scales), b.transpose(-2, -1)
    y = multiply(rows, right_rows, None, how, recipe, backend, "matmul")
    if y.ndim != a.ndim:
        y = y.reshape(*batch, a.shape[-2], b.shape[-1])
    if right.ndim == 1:
        y = y.squeeze(-1)
    if left.ndim == 1:
        return y.squeeze(-1 if right.ndim == 1 else -2)
    return y
