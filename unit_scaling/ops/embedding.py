"""Embeddings."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from fp8.common.compiler import compiled_as

from ..rules.batch import row_scale
from ..rules.table import Scales, row
from ..scale import scale_each


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

    Args:
        input: integers of any shape.
        weight: (rows, width).

    Returns:
        (*input.shape, width).
    """
    s = embedding_scales(input, weight)
    settings = (padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    # Not the weight's gradient, which is larger and may be sparse; max_norm writes to the weight.
    return _scale_gradient(F.embedding(input, weight, *settings), s["weight"])


@compiled_as(lambda output, scale: scale_each(output, 1.0, scale))
def _scale_gradient(output: Tensor, scale: float) -> Tensor:
    """``output``, with its gradient multiplied by ``scale``. It may be written in place (``x +=
    positions``), unlike the result of an autograd function: eager code uses a hook, and a view,
    whose own hooks see the unscaled gradient."""
    if not output.requires_grad:
        return scale_each(output, 1.0, scale)
    output.register_hook(lambda grad: grad * scale)
    return output.view_as(output)
