"""Look-ups of rows of a weight, and of sums of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..rules.batch import row_scale
from ..rules.table import Scales, row
from ..scale import scale_each

__all__ = ["embedding", "embedding_bag"]


def embedding_scales(input: Tensor, weight: Tensor) -> Scales:
    """Each row of the weight is looked up batch/rows times on average."""
    lookups = input.numel() or 1
    return {"output": 1.0, "weight": row_scale(lookups / (weight.shape[0] or 1))}


@row(embedding_scales, replaces=(F.embedding,))
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`torch.nn.functional.embedding` with a unit-scaled gradient of the weight.

    input: integers of any shape. weight: (rows, width). Returns (*input.shape, width).
    The gradient of the output is scaled rather than the weight's: it is the smaller one, the
    weight's may be sparse, and ``max_norm`` changes the weight in place.
    """
    s = embedding_scales(input, weight)
    output = F.embedding(
        input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
    )
    return _scale_gradient(output, s["weight"])


def _scale_gradient(output: Tensor, scale: float) -> Tensor:
    """``output``, with its gradient multiplied by ``scale``: a tensor that may be written to.

    What an autograd function returns may not (``x = embedding(ids); x += positions``): eagerly a
    hook does it, and writes after it do not change what the hook sees. The view keeps it from
    other hooks, which see the gradient as it arrives.
    """
    if torch.compiler.is_compiling() or not output.requires_grad:
        return scale_each(output, 1.0, scale)
    output.register_hook(lambda grad: grad * scale)
    return output.view_as(output)


def _bag_size(input: Tensor, offsets: Tensor | None, include_last_offset: bool = False) -> float:
    """How many rows a bag has on average, at least 1."""
    if offsets is None:
        return max(input.shape[-1] if input.dim() > 1 else 1, 1)
    bags = offsets.numel() - include_last_offset
    return max(input.numel() / max(bags, 1), 1.0)


def embedding_bag_scales(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    mode: str = "mean",
    include_last_offset: bool = False,
) -> Scales:
    """A bag of n rows on average: its sum has RMS sqrt(n), its mean 1/sqrt(n).

    A maximum keeps the scale, though not the mean, of its n rows: it is left as it is, and sends
    its gradient to one of them. Each row of the weight collects a gradient from lookups/rows of
    the entries, 1/n as large with the mean; a weight of an entry one from each feature.
    """
    size = _bag_size(input, offsets, include_last_offset)
    rows, lookups = weight.shape[0] or 1, input.numel() or 1
    output = {"sum": size**-0.5, "mean": size**0.5}.get(mode, 1.0)
    each = {"sum": 1.0, "mean": size}.get(mode, size**0.5)
    own = (weight.shape[1] or 1) ** -0.5
    grad = each * row_scale(lookups / rows)
    return {"output": output, "weight": grad, "per_sample_weights": own}


@row(embedding_bag_scales, replaces=(F.embedding_bag,))
def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """``s * embedding_bag(input, weight)``, with a unit-scaled gradient of the weight.

    input: integers, (bags, size), or (entries,) with the start of each bag in offsets: (bags,).
    weight: (rows, width). mode: "sum", "mean" or "max". per_sample_weights: as input, RMS about 1;
    with "sum" only, as in torch, and their gradient is torch's. Returns (bags, width).
    """
    s = embedding_bag_scales(input, weight, offsets, mode, include_last_offset)
    plain = not sparse and max_norm is None and per_sample_weights is None
    bag_size = _bag_size(input, offsets, include_last_offset)
    on_weight = plain and weight.shape[0] * bag_size < input.numel()  # fewer rows than bags
    if on_weight:
        weight = scale_each(weight, s["output"], s["weight"])
    if per_sample_weights is not None:  # the factor of the output's gradient comes on top
        own = s["per_sample_weights"] / s["weight"]
        per_sample_weights = scale_each(per_sample_weights, 1.0, own)
    output = F.embedding_bag(
        input,
        weight,
        offsets,
        max_norm,
        norm_type,
        scale_grad_by_freq,
        mode,
        sparse,
        per_sample_weights,
        include_last_offset,
        padding_idx,
    )
    return output if on_weight else scale_each(output, s["output"], s["weight"])
