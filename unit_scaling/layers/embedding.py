"""Embeddings."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import functional as U
from ..parameter import MupType
from .scaled import Weighted

__all__ = ["Embedding", "EmbeddingBag"]


class Embedding(Weighted, nn.Embedding, op=U.embedding):
    """`unit_scaling.functional.embedding` as a module, with a standard normal weight.

    Arguments and ``from_pretrained``, including freezing, are those of `torch.nn.Embedding`.
    """

    weight_mup_type: MupType = "weight"


class EmbeddingBag(Weighted, nn.EmbeddingBag, op=U.embedding_bag):
    """`unit_scaling.functional.embedding_bag` as a module, with a standard normal weight.

    Arguments and ``from_pretrained`` are those of `torch.nn.EmbeddingBag`.
    """

    weight_mup_type: MupType = "weight"

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Any:
        """Returns ``op`` of the inputs."""
        return super().forward(input, offsets=offsets, per_sample_weights=per_sample_weights)
