"""Embeddings, and sums and means of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional as F

from fp8.common.compiler import compiled_as

from ..rules.batch import row_scale
from ..rules.table import Scales, row
from ..scale import scale_each
from .generated import by_name, defaults_of, described


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

    The factor is applied to the gradient of the output, not of the weight: it is smaller, the
    weight gradient may be sparse, and ``max_norm`` changes the weight in place. Other arguments are
    torch's.

    Args:
        input: integers of any shape.
        weight: (rows, width).

    Returns:
        (*input.shape, width).
    """
    s = embedding_scales(input, weight)
    output = F.embedding(
        input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse
    )
    return _scale_gradient(output, s["weight"])


@compiled_as(lambda output, scale: scale_each(output, 1.0, scale))
def _scale_gradient(output: Tensor, scale: float) -> Tensor:
    """``output``, with its gradient multiplied by ``scale``. It may be written in place (``x +=
    positions``), unlike the result of an autograd function: eager code uses a hook, and a view,
    whose own hooks see the unscaled gradient."""
    if not output.requires_grad:
        return scale_each(output, 1.0, scale)
    output.register_hook(lambda grad: grad * scale)
    return output.view_as(output)


def embedding_bag_scales(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    mode: str = "mean",
    include_last_offset: bool = False,
) -> Scales:
    """The sum of n rows has RMS sqrt(n), their mean 1/sqrt(n), for n rows in a bag on average.

    A maximum keeps about the RMS of its n rows, is not scaled, and propagates its gradient to one
    of them. A row of the weight sums gradients of lookups/rows entries, divided by n for the mean;
    the weight of an entry sums over features.
    """
    size: float = max(input.shape[-1] if input.ndim > 1 else 1, 1)
    if offsets is not None:
        size = max(input.numel() / max(offsets.numel() - include_last_offset, 1), 1.0)
    rows, lookups = weight.shape[0] or 1, input.numel() or 1
    output = {"sum": size**-0.5, "mean": size**0.5}.get(mode, 1.0)
    each = {"sum": 1.0, "mean": size}.get(mode, size**0.5)
    entry_scale = (weight.shape[1] or 1) ** -0.5
    grad = each * row_scale(lookups / rows)
    return {"output": output, "weight": grad, "per_sample_weights": entry_scale}


def _embedding_bag(input: Tensor, weight: Tensor, *args: Any, **named: Any) -> Tensor:
    theirs = by_name("embedding_bag", _NAMES, args, named)
    read = ("offsets", "mode", "include_last_offset")
    s = embedding_bag_scales(input, weight, **{key: theirs[key] for key in read if key in theirs})
    if theirs.get("per_sample_weights") is not None:  # on top of the output's gradient factor
        entry_scale = s["per_sample_weights"] / s["weight"]
        theirs["per_sample_weights"] = scale_each(theirs["per_sample_weights"], 1.0, entry_scale)
    return scale_each(F.embedding_bag(input, weight, **theirs), s["output"], s["weight"])


_ARGUMENTS = defaults_of(F.embedding_bag)
_NAMES = tuple(_ARGUMENTS)[2:]
_ABOUT = """Computes ``s * embedding_bag(input, weight)``, with a scaled gradient of the weight.

Other arguments are torch's.

Args:
    input: integers, (bags, size), or (entries,) with ``offsets``.
    weight: (rows, width).
    offsets: (bags,), the start of each bag.
    mode: "sum", "mean" or "max".
    per_sample_weights: as input, RMS about 1; only for "sum". Their gradient is torch's.
"""
embedding_bag = row(embedding_bag_scales, replaces=(F.embedding_bag,))(
    described(_embedding_bag, "embedding_bag", _ABOUT, _ARGUMENTS, F.embedding_bag)
)
