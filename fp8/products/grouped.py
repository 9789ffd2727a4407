"""Grouped matrix products: the product of each of several groups, as mixtures of experts need it.

Each group has the casts and GEMMs of `fp8.products.matmul`: ``a b^T``, where a and b are stacks
(groups, rows, inner) or matrices that are split by offsets. Their ranks determine what is split:

    a (tokens, k)       b (groups, n, k)   rows of a: the experts' layers
    a (groups, m, k)    b (groups, n, k)   nothing: a product for each group
    a (m, tokens)       b (n, tokens)      the summed axis of both: gradients of experts' weights
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.autograd import Function

from ..casts.counts import product_name
from ..casts.groups import aligned, cast_groups, pieces, product_shape
from ..casts.operands import (
    NO_STATES,
    ONES,
    Constants,
    SavedOperand,
    Scales,
    States,
    casts_of,
    save_operands,
    saved_operands,
    token_of,
)
from ..casts.rotation import rotation_signs, without_autocast
from ..common.compiler import is_differentiated_again
from ..frame import FRAMES
from ..recipes.recipe import Recipe
from ..torch_internals import Arguments, Context
from ..torch_internals.autograd_functions import apply
from ..torch_internals.decorators import in_graph
from .active import histories, product_recipe, warn_unsummed
from .matmul import Operands, gemm, measured


@torch.library.custom_op(
    "fp8::multiply_groups",
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor? offs, float alpha) -> Tensor",
)
def _multiply_groups(a: Tensor, b: Tensor, offs: Tensor | None, alpha: float) -> Tensor:
    """``alpha * a @ b`` by groups, in the shapes of `torch.nn.functional.grouped_mm`; zero outside
    of all groups."""
    y = a.new_zeros(product_shape(a, b, offs))
    rows = -2 if b.ndim == 3 else -1
    columns = -1 if a.ndim == 3 else -2
    left, right = pieces(a, offs, rows), pieces(b, offs, columns)
    # A graph calls the operator outside of `torch.autocast`, and so does eager code.
    with without_autocast(a):
        for x, w, into in zip(left, right, pieces(y, offs, columns), strict=True):
            if into.numel() and x.numel():
                into.copy_(gemm(x, w, alpha, fuses=False))
    return y


@_multiply_groups.register_fake
def _(a: Tensor, b: Tensor, offs: Tensor | None, alpha: float) -> Tensor:
    return a.new_empty(product_shape(a, b, offs))


def _save(ctx: Context, inputs: Arguments, output: Tensor) -> None:
    a, b, offs, ctx.alpha = inputs
    ctx.save_for_backward(a, b, offs)


def _differentiate(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The backward pass for a second derivative of products without casts."""
    a, b, offs = ctx.saved_tensors
    da = MULTIPLY_GROUPS(grad, b.mT, offs, ctx.alpha)
    return da, MULTIPLY_GROUPS(a.mT, grad, offs, ctx.alpha), None, None


_multiply_groups.register_autograd(_differentiate, setup_context=_save)

#: The operator of all grouped products, as modes below autograd see it.
MULTIPLY_GROUPS = torch.ops.fp8.multiply_groups


class _Grouped(Function):
    """``s_y * a b^T`` by groups. a and b are passed to receive gradients. split: the split of
    a, as in `cast_groups`."""

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
    def setup_context(ctx: Context, inputs: Arguments, output: Tensor) -> None:
        a, b, offs, ctx.split, operands, ctx.how = inputs
        ctx.states = operands.states
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
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, *offsets = saved_operands(ctx, grad)
        offs = offsets[0] if offsets else None
        states, split, how = ctx.states, ctx.split, ctx.how
        casts, (_, s_a, s_b) = casts_of(how.casts), how.scales
        if is_differentiated_again() and casts.is_cast:
            raise RuntimeError(
                "create_graph=True: a grouped product with casts has one gradient"
            )
        groups, kept = (offs, split), (states.grad, True)
        needs_a, needs_b, *_ = ctx.needs_input_grad
        da = db = for_a = None
        if needs_a:
            signs = rotation_signs(casts.grad_for_a, grad)
            label = how.label("grad", states.look)
            for_a, _ = cast_groups(
                grad,
                *groups,
                -1,
                casts.grad_for_a,
                *kept,
                signs,
                label,
            )
            label = how.label(f"{casts.second} again", states.look)
            b, _ = cast_groups(b, *groups, -2, casts.again_b, signs=signs, label=label)
            da = MULTIPLY_GROUPS(for_a, b, offs, s_a)
        if needs_b:
            for_b, signs = for_a, rotation_signs(casts.grad_for_b, grad)
            if for_b is None or not casts.reuses_grad:
                label = how.label(casts.grad_again, states.look)
                for_b, _ = cast_groups(
                    grad,
                    *groups,
                    -2,
                    casts.grad_for_b,
                    *kept,
                    signs,
                    label,
                )
            label = how.label("input again", states.look)
            a, _ = cast_groups(a, *groups, -2, casts.again_a, signs=signs, label=label)
            ends = aligned(offs, casts.grad_for_b) if split == -2 else offs
            if ctx.turned:
                db = MULTIPLY_GROUPS(a.mT, for_b, ends, s_b).mT
            else:
                db = MULTIPLY_GROUPS(for_b.mT, a, ends, s_b)
        return da, db, *[None] * 4


def _product(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None,
    scales: Scales,
    recipe: Recipe | None,
) -> Tensor:
    """``a b^T`` by groups. b is cast as a weight if it is a stack."""
    layer, how = b.ndim == 3, Constants(scales=scales)
    split = -2 if layer else -1
    measurement = FRAMES.items[-1].measurement
    if recipe is None:
        return _simulated(a, b, offs, split, how, NO_STATES)
    groups = len(b if offs is None else offs)
    states = histories(recipe, "grouped_mm", a, b, layer=layer, groups=groups)
    if measurement is not None:
        y = _simulated(a, b, offs, split, how, NO_STATES)
        parts = partial(pieces, offs=offs, axis=split)
        return measured(measurement, recipe, states, a, b, y, parts)
    name = product_name("grouped_mm", b if layer else None, recipe)
    warn_unsummed(recipe, "a grouped product")
    how = how.changed(casts=token_of(recipe.text, layer), name=name)
    return _simulated(a, b, offs, split, how, states)


@in_graph
def _simulated(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None,
    split: int,
    how: Constants,
    states: States,
) -> Tensor:
    # late: by a first product
    from ..torch_internals.flop_counter import GROUPED, count_flops

    count_flops(GROUPED)
    casts = casts_of(how.casts)
    signs = rotation_signs(casts.a, a)
    label = how.label("input", states.look)
    x, scale_a = cast_groups(
        a,
        offs,
        split,
        -1,
        casts.a,
        states.a,
        signs=signs,
        label=label,
    )
    label = how.label(casts.second, states.look)
    w, scale_b = cast_groups(
        b,
        offs,
        split,
        -1,
        casts.b,
        states.b,
        signs=signs,
        label=label,
    )
    operands = Operands(x.detach(), w.detach(), scale_a, scale_b, states)
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
