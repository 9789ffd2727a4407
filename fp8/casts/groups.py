"""Casts of stacks of matrices, and of matrices whose rows or columns are split by the offsets of
their ends: every group is cast as a matrix of its own. The sizes of groups are data, so a compiled
graph holds the casts of an operand as one opaque operator."""

from __future__ import annotations

from itertools import pairwise, zip_longest

import torch
from torch import Tensor

from ..common.compiler import updates_states
from ..recipes.cast import Cast, cast_of
from .casting import rounded
from .counts import Label, Observed, Row, observe
from .scaled_tensor import dequantized


def pieces(x: Tensor, offs: Tensor | None, axis: int) -> list[Tensor]:
    """Views of the groups of ``x``, a stack or split along ``axis``. Raises ValueError for offsets
    that descend or exceed its size."""
    if offs is None or x.ndim == 3:
        return list(x.unbind())
    size = x.shape[axis]
    ends = [0, *offs.tolist()]
    if any(a > b for a, b in pairwise(ends)) or ends[-1] > size:
        raise ValueError(f"offs must ascend from 0 to at most {size}, got {ends[1:]}")
    return [x.narrow(axis, start, end - start) for start, end in pairwise(ends)]


def product_shape(a: Tensor, b: Tensor, offs: Tensor | None) -> list[int]:
    """The shape of ``a @ b`` by groups."""
    rows, columns = a.shape[-2], b.shape[-1]
    if a.ndim != b.ndim:
        return [rows, columns]
    if offs is None:
        return [a.shape[0], rows, columns]
    return [offs.shape[0], rows, columns]


def aligned(offs: Tensor | None, spec: Cast | None) -> Tensor | None:
    """The ends of groups along a summed axis after rotation, which pads each group."""
    if offs is None or spec is None or not spec.hadamard:
        return offs
    sizes = torch.diff(offs, prepend=offs.new_zeros(1))
    return (-(-sizes // spec.hadamard) * spec.hadamard).cumsum(0, dtype=torch.int32)


# The sizes of groups are data: traced, a graph would hold for those of one batch.
@torch.library.custom_op(
    "fp8::cast_groups",
    mutates_args=(),
    schema="(Tensor x, Tensor? offs, Tensor? history, Tensor? signs, int split, int axis, "
    "bool record, str text, str label, bool looks) -> (Tensor, Tensor, Tensor)",
)
def _cast_groups(
    x: Tensor,
    offs: Tensor | None,
    history: Tensor | None,
    signs: Tensor | None,
    split: int,
    axis: int,
    record: bool,
    text: str,
    label: str,
    looks: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The cast operand, its scale factors, and the history afterwards. text, label: of the cast.
    looks: whether static scales are measured again."""
    spec = cast_of(text)
    y, scales, after = _results(x, offs, history, split, axis, spec.hadamard)
    ends = aligned(offs, spec) if split == axis else offs
    results = pieces(y, ends, split), pieces(scales, ends, split)
    parts = pieces(x, offs, split)
    for part, values, scaled, state in zip_longest(parts, *results, after):
        # As `fp8.recipes.history.LayerState.buffer` has that of a matrix.
        if state is not None and (looks or not bool(state.any())):
            state = state[None]
        if part.numel():
            cast, scale = rounded(part, spec, axis, state, record, signs, label=label)
            values.copy_(cast)
            if scale is not None:
                scaled.copy_(scale)
    return y, scales, after


@_cast_groups.register_fake
def _(x, offs, history, signs, split, axis, record, text, label, looks):  # type: ignore[no-untyped-def]
    return _results(x, offs, history, split, axis, cast_of(text).hadamard)


def _results(
    x: Tensor,
    offs: Tensor | None,
    history: Tensor | None,
    split: int,
    axis: int,
    hadamard: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """What `_cast_groups` returns for empty groups: zeros, padded for a rotation of each along the
    summed axis; a scale of 1 for each group of a stack or each split row; the history."""
    shape = list(x.shape)
    if hadamard and offs is not None and x.ndim == 2 and split == axis:
        shape[axis] += offs.shape[0] * (hadamard - 1)
    elif hadamard:
        shape[axis] = -(-shape[axis] // hadamard) * hadamard
    y = x.new_zeros(shape) if hadamard else torch.zeros_like(x)
    if x.ndim == 3:
        of_groups = [x.shape[0], 1, 1]
    else:
        of_groups = [1, 1]
        of_groups[split] = y.shape[split]
    dtype = torch.promote_types(x.dtype, torch.float32)
    scales = torch.ones(of_groups, dtype=dtype, device=x.device)
    if history is None:
        return y, scales, x.new_empty((0,))
    return y, scales, history.clone()


def cast_groups(
    x: Tensor,
    offs: Tensor | None,
    split: int,
    axis: int,
    spec: Cast | None,
    history: Tensor | None = None,
    record: bool | None = None,
    signs: Tensor | None = None,
    label: Label = "",
) -> tuple[Tensor, Tensor | None]:
    """`fp8.casts.casting.rounded` of every group of ``x``, not differentiable, and the scale factor
    of each group in a shape that broadcasts to ``x``; None if all are 1, or if each tile has its
    own.

    offs, split: the ends of the groups (int32) along an axis of a matrix; None for a stack. axis:
    the one that the product sums over. Elements outside of all groups become zero. An empty group
    leaves its history, (groups, length) or (groups,), unchanged. If rotated along the axis that
    groups split, the groups of the result end at `aligned`.
    """
    if spec is None:
        return x, None
    if record is None:
        record = updates_states()
    # Groups are measured again in a look alone, and have no spots.
    looks, name = False, label
    if isinstance(label, Row):
        looks, name = not label.look.is_spot, ""
    values = dequantized(x).detach()
    y, scales, after = torch.ops.fp8.cast_groups(
        values,
        offs,
        history,
        signs,
        split,
        axis,
        record,
        spec.text,
        name,
        looks,
    )
    one = spec.tile == (0, 0) and not spec.is_simulated
    if looks and y.shape == x.shape:  # not padded for a rotation
        unknown = torch.full((), torch.nan, device=x.device)
        scale = scales if one else unknown
        observe(label, Observed(values, y, scale, spec.number_format))
    if history is not None and record:
        with torch.no_grad():
            history.copy_(after)
    if one and (spec.stored_rule is not None or history is not None):
        return y, scales
    return y, None
