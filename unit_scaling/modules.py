"""Unit-scaled versions of the modules of `torch.nn`, and a transformer made of them.

Each is a subclass of the module of the same name in torch, where there is one: `isinstance`,
`state_dict` keys and `repr` are torch's. Weights start at RMS 1, biases at zero.
"""

from ._modules.containers import DepthModuleList, DepthSequential
from ._modules.layers import (
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
from ._modules.transformer import MHSA, MLP, TransformerDecoder, TransformerLayer, TransformerStack

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
