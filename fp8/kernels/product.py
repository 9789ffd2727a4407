"""Products computed by torch's scaled_mm kernels, with operands of one byte or half a byte per
element, which are saved for the backward pass. Casts and products equal simulation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from ..casts.casting import QuantizedOperand
from ..casts.operands import (
    Constants,
    ProductCasts,
    SharedCast,
    States,
    casts_of,
    saved_tensors,
    share,
    shared_cast,
)
from ..common.compiler import (
    compiled_as,
    is_differentiated_again,
    only_after,
    sum_of_none,
    updates_states,
)
from ..common.dtensor import is_dtensor
from ..formats.format import dtype_name
from ..recipes.cast import Cast, lines_of
from ..recipes.recipe import Recipe
from ..torch_internals import Arguments, Context
from ..torch_internals.autograd_functions import apply, is_recorded, unaliased
from ..torch_internals.decorators import in_graph, taken_as_constant
from . import selftest
from .kernel import ALIGNMENT, Kernel, why_not_device
from .table import KERNELS, kernel_of, multiply, store

# The choice of kernels.


def why_not_recipe(recipe: Recipe) -> str:
    """Why no kernel computes the products of ``recipe`` on any device; "" if there are kernels."""
    if recipe.accumulate is not None:
        return f"the sums of accumulate={recipe.accumulate!r} are simulated"
    if not any(recipe.casts):
        return "it casts no operand"
    return _why_not_casts(recipe.text)


@taken_as_constant
def _why_not_casts(casts: str) -> str:
    """`why_not_recipe`, by the casts of a product. casts: as in `Constants`."""
    for pair in casts_of(casts).pairs:
        _, why = kernel_of(*pair)
        if why:
            return why
    return ""


def why_not_here(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> str:
    """Why the products of layers on ``device``, with results of ``dtype``, are simulated under
    ``recipe``; "" if kernels compute them, by `fp8.kernels.selftest`."""
    why = why_not_device(device) or why_not_recipe(recipe)
    return why or selftest.why_not(
        casts_of(recipe.text).pairs, str(device), dtype_name(dtype)
    )


def kernels_of(recipe: Recipe) -> list[Kernel]:
    """The kernels of the products of ``recipe``, in the order of the table. Products of operands
    in high precision need none."""
    kinds = {kernel_of(*pair)[0] for pair in casts_of(recipe.text).pairs}
    return [row for name, row in KERNELS.items() if name in kinds]


def needs(recipe: Recipe) -> tuple[int, str]:
    """What the kernels of ``recipe``, which has some, need: the number of which the sizes of a
    weight are multiples, and a description of the devices."""
    rows = kernels_of(recipe)
    multiple = max(row.multiple for row in rows)
    newest = max(rows, key=lambda row: row.least)
    return multiple, newest.devices


def kernels(
    backend: str,
    a: Tensor,
    b: Tensor,
    casts: str,
    dtype: torch.dtype,
) -> tuple[str, ...]:
    """The kernels (rows of KERNELS) of a product of a (m, k) and b (n, k), which `takes` accepts,
    with a result of ``dtype``, and of its gradients; () if they are to be simulated. casts: as in
    `Constants`."""
    kinds = selftest.kernels(backend, casts, str(a.device), dtype_name(dtype))
    for kind in kinds:
        row = KERNELS.get(kind)  # None for torch's own product
        if row is not None and not fits(a, b, row.multiple):
            return ()
    return kinds


def takes(backend: str, a: Tensor, b: Tensor) -> bool:
    """Whether to look for `kernels` for a product of a (m, k) and b (n, k). Raises RuntimeError for
    "native" on a device without FP8 products."""
    if backend == "simulate" or (backend == "auto" and a.device.type != "cuda"):
        return False
    if not fits(a, b) or is_dtensor(a) or is_dtensor(b):
        return False
    why_not = why_not_device(a.device)
    if why_not and backend == "native":
        raise RuntimeError(f"backend='native': {why_not}; 'simulate' runs everywhere")
    return not why_not


def fits(a: Tensor, b: Tensor, multiple: int = ALIGNMENT) -> bool:
    """Whether kernels accept a (m, k) and b (n, k), and the operands of their gradients: nonempty
    matrices in float32, bfloat16 or float16, with n and k multiples of ``multiple``."""
    if a.dim() != 2 or b.dim() != 2:
        return False
    if a.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    rows, inner = a.shape
    outputs, _ = b.shape
    # Not min, which would be a guard on a dynamic size.
    if not (rows > 0 and inner > 0 and outputs > 0):
        return False
    return outputs % multiple == 0 and inner % multiple == 0


# The product.


_OUTPUT, _GRAD_A, _GRAD_B = range(3)
"""The three products."""


def _multiply(
    how: Constants,
    product: int,
    a: QuantizedOperand,
    b: QuantizedOperand,
    dtype: torch.dtype,
) -> Tensor:
    """One of the three products."""
    kernel, factor, fast = how.kernels[product], how.scales[product], how.fast[product]
    return multiply(kernel, a, b, factor, dtype, fast)


class _Operands(NamedTuple):
    """The stored operands of the product, and a and b as stored for the backward ones; None if the
    transpose of the first serves. shared: the casts of a, which other products of a may take."""

    a: QuantizedOperand
    b: QuantizedOperand
    again_a: QuantizedOperand | None
    again_b: QuantizedOperand | None
    shared: SharedCast


class _Native(Function):
    """`product`. a and b are passed to receive gradients."""

    @staticmethod
    def forward(
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        operands: _Operands,
        states: States,
        how: Constants,
    ) -> Tensor:
        dtype = getattr(torch, how.dtype)
        y = _multiply(how, _OUTPUT, operands.a, operands.b, dtype)
        y = y[: a.shape[0]]  # without padding rows
        if bias is None:
            return y
        return unaliased(y.add_(bias * how.bias_scale))

    @staticmethod
    def setup_context(ctx: Context, inputs: Arguments, output: Tensor) -> None:
        _, _, _, operands, ctx.states, ctx.how = inputs
        ctx.reuses_a = operands.again_a is None
        ctx.reuses_b = operands.again_b is None
        # One copy is saved of an operand.
        a, b = operands.again_a or operands.a, operands.again_b or operands.b
        if operands.shared.key and is_recorded(ctx):
            share(inputs[0], operands.shared)
        if ctx.how.recasts:
            b = QuantizedOperand(inputs[1], operands.b.scale)
        ctx.save_for_backward(*a, *b)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        if is_differentiated_again() and is_recorded(ctx):
            raise RuntimeError(
                "create_graph=True: products of backend='native' have no second derivative; those "
                "of backend='simulate' have"
            )
        tensors = saved_tensors(ctx)
        a, b = QuantizedOperand(*tensors[:3]), QuantizedOperand(*tensors[3:])
        how, casts = ctx.how, casts_of(ctx.how.casts)
        history, look = ctx.states.grad, ctx.states.look
        needs_a, needs_b, needs_bias, *_ = ctx.needs_input_grad
        if ctx.reuses_a:
            a = a.mT
        if how.recasts and needs_a:
            weight = only_after(grad, b.values)
            b = _weight_again(b._replace(values=weight), casts)
        elif ctx.reuses_b:
            b = b.mT
        da = db = dbias = g = None
        if needs_a:
            label = how.label("grad", look)
            g = store(grad, casts.grad_for_a, -1, history, True, label)
            da = _multiply(how, _GRAD_A, g, b, grad.dtype)
            da = da[: grad.shape[0]]  # without padding rows
        if needs_b:
            # Where it has one scale, one cast of the gradient serves both products.
            if g is None:
                label = how.label(casts.grad_again, look)
                g = store(grad, casts.grad_for_b, -2, history, True, label)
            else:
                g = _second(grad, g, casts.reuses_grad, casts.grad_for_b) or g.mT
            db = _multiply(how, _GRAD_B, g, a, grad.dtype)
        if needs_bias:
            dbias = grad.sum(0) * how.scales[_GRAD_B]
        return da, db, dbias, None, None, None


def _weight_again(b: QuantizedOperand, casts: ProductCasts) -> QuantizedOperand:
    """A weight as stored for the gradient of a. b: the weight, and the scale of its first cast."""
    if casts.reuses_b and not b.scale.dim():
        scale = None if casts.b is None or casts.b.scaling == "unit" else b.scale
        return store(b.values, casts.b, -2, scale=scale)
    return store(b.values, casts.b_for_grad_a, -2)


def _second(
    x: Tensor,
    stored: QuantizedOperand,
    reuses: bool,
    second: Cast | None,
) -> QuantizedOperand | None:
    """``x`` for its product along the other axis; None if ``stored``, of one scale, serves it."""
    if reuses and not stored.scale.dim():
        return None
    return store(x, second, -2)


def _at_once(
    first: QuantizedOperand, second: QuantizedOperand | None
) -> tuple[QuantizedOperand, QuantizedOperand]:
    """In a graph a copy, as the partitioner never computes one again, and a sum of no bytes of it,
    as it moves what the forward product does not need to the backward graph."""
    later = first.mT if second is None else second
    values = _copied(later.values)
    scale = later.scale if second is None else _copied(later.scale)
    bytes = first.values.view(torch.uint8)
    bytes = bytes | sum_of_none(values)
    if second is not None:
        bytes = bytes | sum_of_none(scale)
    first = first._replace(values=bytes.view(first.values.dtype))
    return first, later._replace(values=values, scale=scale)


def _copied(x: Tensor) -> Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format).copy_(x)


@compiled_as(_at_once)
def _cast_at_once(
    first: QuantizedOperand, second: QuantizedOperand | None
) -> tuple[QuantizedOperand, QuantizedOperand | None]:
    return first, second


@taken_as_constant
def weight_token(casts: str) -> str:
    """A string that is equal for equal casts of b in the casts of a product that this token stands
    for. A graph guards it as one value."""
    of_product = casts_of(casts)
    return lines_of((of_product.b, of_product.b_for_grad_a))


def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    states: States,
    how: Constants,
) -> Tensor:
    """``s_y * a b^T + bias`` for a (m, k) and b (n, k), computed by kernels."""
    cached = None
    cache = getattr(b, "fp8_cache", None)  # of `fp8.layers.cached_weights`
    if cache is not None and cache.token == weight_token(how.casts):
        cached = cache.read(b)
    return _computed(a, b, bias, states, how, cached, updates_states())


@in_graph
def _computed(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    states: States,
    how: Constants,
    cached: tuple[QuantizedOperand, QuantizedOperand] | None,
    record: bool,
) -> Tensor:
    """`product`. cached: b for the output, and for the gradient of a. record: whether gradients are
    computed."""
    casts, look = casts_of(how.casts), states.look
    again_a = again_b = None
    with torch.no_grad():
        shared = SharedCast()
        if casts.shares_a and not how.name:
            kind = how.casts, how.dtype, how.kernels, record
            shared = shared_cast(a, states, kind)
        if shared.made is None:
            left = store(a, casts.a, -1, states.a, record, how.label("input", look))
            if record:
                again_a = _second(a, left, casts.reuses_a, casts.a_for_grad_b)
            shared.made = left, again_a
        left, again_a = shared.made
        if cached is not None:
            how = how.changed(recasts=False)
            right, again = cached
            again_b = again if record else None
        else:
            label = how.label(casts.second, look)
            right = store(b, casts.b, -1, states.b, record, label)
            if record and not how.recasts:
                again_b = _second(b, right, casts.reuses_b, casts.b_for_grad_a)
            both = casts.second == "weight" and casts.b_for_grad_a is not None
            if (
                record
                and not how.recasts
                and both
                and right.scale.dtype == torch.float32
            ):
                right, again_b = _cast_at_once(right, again_b)
    operands = _Operands(left, right, again_a, again_b, shared)
    return apply(_Native, a, b, bias, operands, states, how)
