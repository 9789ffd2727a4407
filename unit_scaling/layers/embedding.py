"""Embeddings."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.types import Device

from .. import functional as U
from ..parameter import TaggedModule

__all__ = ["Embedding", "EmbeddingBag"]


class Embedding(TaggedModule, nn.Embedding):
    """`unit_scaling.functional.embedding` as a module, with a standard normal weight.

    Arguments and ``from_pretrained``, including freezing, are those of `torch.nn.Embedding`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        _weight: Tensor | None = None,
        _freeze: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            padding_idx,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            sparse,
            _weight,
            _freeze,
            device,
            dtype,
        )
        self.tag_parameters(weight="weight")

    def reset_parameters(self) -> None:
        """Initialises the weight with a standard normal; the padding row is zero."""
        super().reset_parameters()
        self.restore_tags()

    def forward(self, input: Tensor) -> Tensor:
        return U.embedding(
            input,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )


class EmbeddingBag(TaggedModule, nn.EmbeddingBag):
    """`unit_scaling.functional.embedding_bag` as a module, with a standard normal weight.

    Arguments and ``from_pretrained`` are those of `torch.nn.EmbeddingBag`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        _weight: Tensor | None = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            max_norm,
            norm_type,
            scale_grad_by_freq,
            mode,
            sparse,
            _weight,
            include_last_offset,
            padding_idx,
            device,
            dtype,
        )
        self.tag_parameters(weight="weight")

    def reset_parameters(self) -> None:
        """Initialises the weight with a standard normal; the padding row is zero."""
        super().reset_parameters()
        self.restore_tags()

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        return U.embedding_bag(
            input,
            self.weight,
            offsets,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.mode,
            self.sparse,
            per_sample_weights,
            self.include_last_offset,
            self.padding_idx,
        )
