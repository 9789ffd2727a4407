"""The modules, by kind. `unit_scaling.modules` has them all."""

from .containers import DepthModuleList, DepthSequential
from .layers import (
    GELU,
    Conv1d,
    CrossEntropyLoss,
    Dropout,
    Embedding,
    LayerNorm,
    Linear,
    LinearReadout,
    RMSNorm,
    SiLU,
    Softmax,
)
from .transformer import MHSA, MLP, TransformerDecoder, TransformerLayer, TransformerStack

__all__ = [
    "GELU",
    "MHSA",
    "MLP",
    "Conv1d",
    "CrossEntropyLoss",
    "DepthModuleList",
    "DepthSequential",
    "Dropout",
    "Embedding",
    "LayerNorm",
    "Linear",
    "LinearReadout",
    "RMSNorm",
    "SiLU",
    "Softmax",
    "TransformerDecoder",
    "TransformerLayer",
    "TransformerStack",
]
