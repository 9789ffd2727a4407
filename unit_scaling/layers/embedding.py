"""Embeddings."""

from __future__ import annotations

from torch import nn

from .. import functional as U
from ..parameter import MupType
from .scaled import Weighted

__all__ = ["Embedding"]


class Embedding(Weighted, nn.Embedding, op=U.embedding):
    """`unit_scaling.functional.embedding` as a module, with a standard normal weight.

    Arguments and ``from_pretrained``, including freezing, are those of `torch.nn.Embedding`.
    """

    weight_mup_type: MupType = "weight"
