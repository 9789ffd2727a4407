"""Grouped matrix products: the product of each of several groups, as mixtures of experts need it.

Each group has the casts and GEMMs of `fp8.products.matmul`: ``a b^T``, where a and b are stacks
(groups, rows, inner) or matrices that are split by offsets. Their ranks determine what is split:

    a (tokens, k)       b (groups, n, k)   rows of a: the experts' layers
    a (groups, m, k)    b (groups, n, k)   nothing: a product for each group
    a (m, tokens)       b (n, tokens)      the summed axis of both: gradients of experts' weights
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ..casts.counts import product_name
from ..casts.groups import aligned, cast_groups, pieces, product_shape
from ..casts.operands import (
    ONES,
    Constants,
    SavedOperand,
    Scales,
    casts_of,
    save_operands,
    saved_operands,
    token_of,
)
from ..casts.rotation import rotation_signs, without_autocast
from ..common.compiler import is_differentiated_again
from ..frame import FRAMES
from ..recipes.recipe import Recipe
from ..torch_internals.autograd_functions import apply
from ..torch_internals.decorators import in_graph
from .active import histories, product_recipe, warn_unsummed
from .matmul import NO_STATES, Operands, gemm, measured


@torch.library.custom_op(
    "fp8::multiply_groups",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor? offs, float alpha) -> Tensor",
)
def _multiply_groups(a: Tensor, b: Tensor, offs: Tensor | None, alpha: float) -> Tensor:
    """``alpha * a @ b`` by groups, in the shapes of `torch.nn.functional.grouped_mm`; zero outside
    of all groups. `torch.autocast` does not reach inside, in eager mode as in a graph."""
    y, columns = a.new_zeros(product_shape(a, b, offs)), -1 if a.ndim == 3 else -2
    left, right = pieces(a, offs, -2 if b.ndim == 3 else -1), pieces(b, offs, columns)
    with without_autocast(a):
        for x, w, into in zip(left, right, pieces(y, offs, columns), strict=True):
            if into.numel() and x.numel():
                into.copy_(gemm(x, w, alpha, fuses=False))
    return y


@_multiply_groups.register_fake
def _(a: Tensor, b: Tensor, offs: Tensor | None, alpha: float) -> Tensor:
    return a.new_empty(product_shape(a, b, offs))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, offs, ctx.alpha = inputs
    ctx.save_for_backward(a, b, offs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """For a second derivative of products without casts."""
    a, b, offs = ctx.saved_tensors
    multiply = MULTIPLY_GROUPS
    return (
        multiply(grad, b.mT, offs, ctx.alpha),
        multiply(a.mT, grad, offs, ctx.alpha),
        None,
        None,
    )


_multiply_groups.register_autograd(_differentiate, setup_context=_save)

MULTIPLY_GROUPS = torch.ops.fp8.multiply_groups
"""The operator of all grouped products, as modes below autograd see it."""


class _Grouped(Function):
    """``s_y * a b^T`` by groups. a and b are passed to receive gradients. split: of a, as in
    `cast_groups`."""

    @staticmethod
    def forward(
        a: Tensor,
        b: Tensor,
        offs: Tensor | None,
        split: int,
        operands: Operands,
        how: Constants,
    ) -> Tensor:
        ends = aligned(offs, casts_of(how.casts).a) if split == -1 else offs
        return MULTIPLY_GROUPS(operands.a, operands.b.mT, ends, how.scales[0])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, offs, ctx.split, operands, ctx.how = inputs
        ctx.history, ctx.table = operands.history, operands.table
        ctx.turned = b.mT.is_contiguous()
        casts = casts_of(ctx.how.casts)
        saved = [SavedOperand(a), SavedOperand(b)]
        if casts.reuses_a:
            saved[0] = SavedOperand(operands.a, casts.a, operands.scale_a)
        if casts.reuses_b:
            saved[1] = SavedOperand(operands.b, casts.b, operands.scale_b)
        if offs is not None:
            saved.append(SavedOperand(offs))
        save_operands(ctx, *saved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, *offsets = saved_operands(ctx, grad.dtype)
        offs = offsets[0] if offsets else None
        history, split, how = ctx.history, ctx.split, ctx.how
        casts, (_, s_a, s_b) = casts_of(how.casts), how.scales
        if is_differentiated_again() and casts.is_cast:
            raise RuntimeError(
                "create_graph=True: a grouped product with casts has one gradient"
            )
        groups = (offs, split)
        needs_a, needs_b, *_ = ctx.needs_input_grad
        da = db = for_a = None
        if needs_a:
            signs = rotation_signs(casts.grad_for_a, grad)
            cast, label = casts.grad_for_a, how.label("grad", ctx.table)
            for_a, _ = cast_groups(grad, *groups, -1, cast, history, True, signs, label)
            cast, label = casts.again_b, how.label(f"{casts.second} again", ctx.table)
            again, _ = cast_groups(b, *groups, -2, cast, signs=signs, label=label)
            da = MULTIPLY_GROUPS(for_a, again, offs, s_a)
        if needs_b:
            for_b, signs = for_a, rotation_signs(casts.grad_for_b, grad)
            if for_b is None or not casts.reuses_grad:
                cast, label = casts.grad_for_b, how.label("grad again", ctx.table)
                for_b, _ = cast_groups(
                    grad, *groups, -2, cast, history, True, signs, label
                )
            cast, label = casts.again_a, how.label("input again", ctx.table)
            again, _ = cast_groups(a, *groups, -2, cast, signs=signs, label=label)
            ends = aligned(offs, casts.grad_for_b) if split == -2 else offs
            if ctx.turned:
                db = MULTIPLY_GROUPS(again.mT, for_b, ends, s_b).mT
            else:
                db = MULTIPLY_GROUPS(for_b.mT, again, ends, s_b)
        return da, db, *[None] * 4


def _product(
    a: Tensor, b: Tensor, offs: Tensor | None, scales: Scales, recipe: Recipe | None
) -> Tensor:
    """``a b^T`` by groups. b is cast as a weight if it is a stack."""
    layer, split = b.ndim == 3, -2 if b.ndim == 3 else -1
    groups = b.shape[0] if layer else offs.shape[0]  # type: ignore[union-attr]
    states = histories(recipe, "grouped_mm", a, b, layer=layer, groups=groups)
    if recipe is None:
        return _simulated(a, b, offs, split, Constants(scales=scales), states)
    if (pass_ := FRAMES.items[-1].measurement) is not None:
        y = _simulated(a, b, offs, split, Constants(scales=scales), NO_STATES)
        return measured(
            pass_, recipe, states, a, b, y, lambda x: pieces(x, offs, split)
        )
    name = product_name("grouped_mm", b if layer else None, recipe)
    warn_unsummed(recipe, "a grouped product")
    how = Constants(token_of(recipe.text, layer), scales, name=name)
    return _simulated(a, b, offs, split, how, states)


@in_graph
def _simulated(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None,
    split: int,
    how: Constants,
    states: Sequence[Any],
) -> Tensor:
    # late: by a first product
    from ..torch_internals.flop_counter import GROUPED, count_flops

    count_flops(GROUPED)
    casts, (of_a, of_b, of_grad, table) = casts_of(how.casts), states
    signs = rotation_signs(casts.a, a)
    first = how.label("input", table)
    second = how.label(casts.second, table)
    cast_a, scale_a = cast_groups(
        a, offs, split, -1, casts.a, of_a, signs=signs, label=first
    )
    cast_b, scale_b = cast_groups(
        b, offs, split, -1, casts.b, of_b, signs=signs, label=second
    )
    operands = Operands(
        cast_a.detach(), cast_b.detach(), scale_a, scale_b, of_grad, table
    )
    return apply(_Grouped, a, b, offs, split, operands, how)


def _check(left: Tensor, right: Tensor, offs: Tensor | None) -> None:
    got = f"got shapes {tuple(left.shape)} and {tuple(right.shape)}"
    if not {left.ndim, right.ndim} <= {2, 3}:
        raise ValueError(f"grouped_mm needs operands of 2 or 3 dimensions, {got}")
    if (offs is None) != (left.ndim == right.ndim == 3):
        raise ValueError(
            f"grouped_mm needs offs if an operand is a matrix, and only then; {got}"
        )
    if left.shape[-1] != right.shape[-2]:
        raise ValueError(f"grouped_mm needs matching inner sizes, {got}")
    if offs is not None and (offs.dtype != torch.int32 or offs.ndim != 1):
        raise ValueError(
            f"offs must be int32 of one dimension, got {offs.ndim} of {offs.dtype}"
        )
    counts = [x.shape[0] for x in (left, right) if x.ndim == 3]
    counts += [] if offs is None else [offs.shape[0]]
    if len(set(counts)) != 1 or not counts[0]:
        raise ValueError(
            f"grouped_mm needs one number of groups, from 1; got {counts}; {got}"
        )


def grouped_mm(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    *,
    scales: Scales = ONES,
    recipe: Recipe | None = None,
    unit: bool = False,
) -> Tensor:
    """``s_y * left @ right`` by groups, as `torch.nn.functional.grouped_mm`.

    left: (tokens, k), (groups, m, k), (m, tokens) or (groups, m, k). right: (groups, k, n),
    (groups, k, n), (tokens, n) or (k, tokens), respectively. Returns (tokens, n), (groups, m, n),
    (groups, m, n) or (m, tokens), in their dtype. offs: (groups,), int32: the ends of the groups
    along tokens; None for two stacks. Rows beyond the last end are zero in the result and in
    gradients. scales, recipe, unit: as in `fp8.products.matmul.matmul`. Raises ValueError for other
    shapes and offsets, TypeError for operands of different dtypes.

    The stack (of two, the second one) is the weight; two matrices are two activations. Every group
    is cast as one matrix, as in TransformerEngine (GroupedLinear), torchao (moe_training) and
    DeepSeek-V3 (arXiv:2412.19437, section 3.3): scales of whole operands belong to a group, and
    blocks along tokens begin with one. A group without tokens leaves its history as it is. NaN and
    Inf stay in their group. The casts are simulated; `torch.autocast` changes no dtype.
    """
    if recipe is None:
        recipe = product_recipe(unit)
    _check(left, right, offs)
    if left.dtype != right.dtype:
        raise TypeError(
            f"grouped_mm needs one dtype, got {left.dtype} and {right.dtype}"
        )
    s_y, s_left, s_right = scales
    if (
        left.ndim == 3 and right.ndim == 2
    ):  # the stack is the weight: (right^T left^T)^T
        turned = (s_y, s_right, s_left)
        return _product(right.mT, left, offs, turned, recipe).mT
    return _product(left, right.mT, offs, scales, recipe)
