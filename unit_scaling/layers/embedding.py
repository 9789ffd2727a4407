"""Embeddings."""

from __future__ import annotations

from torch import nn

from ..parameter import MupType
from .scaled import Weighted

__all__ = ["Embedding"]


class Embedding(Weighted, nn.Embedding):
    """`unit_scaling.functional.embedding` as a module, with a standard normal weight.

    Arguments and ``from_pretrained``, including freezing, are as in `torch.nn.Embedding`.
    """

    weight_mup_type: MupType = "weight"
