"""The modules, by kind. `unit_scaling.modules` has them all."""

from .attention import MHSA, KeyValueCache, MultiheadAttention
from .containers import DepthModuleList, DepthSequential
from .convolution import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from .embedding import Embedding, EmbeddingBag
from .layers import GELU, CrossEntropyLoss, Dropout, LayerNorm, RMSNorm, SiLU, Softmax
from .linear import Bilinear, Linear, LinearReadout
from .recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from .transformer import MLP, TransformerDecoder, TransformerLayer, TransformerStack

__all__ = [
    "GELU",
    "GRU",
    "LSTM",
    "MHSA",
    "MLP",
    "RNN",
    "Bilinear",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "CrossEntropyLoss",
    "DepthModuleList",
    "DepthSequential",
    "Dropout",
    "Embedding",
    "EmbeddingBag",
    "GRUCell",
    "KeyValueCache",
    "LSTMCell",
    "LayerNorm",
    "Linear",
    "LinearReadout",
    "MultiheadAttention",
    "RMSNorm",
    "RNNCell",
    "SiLU",
    "Softmax",
    "TransformerDecoder",
    "TransformerLayer",
    "TransformerStack",
]
