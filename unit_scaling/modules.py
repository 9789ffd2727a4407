"""Unit-scaled versions of the modules of `torch.nn`, and a transformer made of them.

Each is a subclass of the module of the same name in torch, where there is one: `isinstance`,
`state_dict` keys and `repr` are torch's. Weights start at RMS 1, biases at zero. `MODULES` maps
one to the other.
"""

from torch import nn

from ._modules.attention import MHSA, KeyValueCache, MultiheadAttention
from ._modules.containers import DepthModuleList, DepthSequential
from ._modules.convolution import (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    ConvTranspose3d,
)
from ._modules.embedding import Embedding, EmbeddingBag
from ._modules.layers import GELU, CrossEntropyLoss, Dropout, LayerNorm, RMSNorm, SiLU, Softmax
from ._modules.linear import Bilinear, Linear, LinearReadout
from ._modules.recurrent import GRU, LSTM, RNN, GRUCell, LSTMCell, RNNCell
from ._modules.transformer import MLP, TransformerDecoder, TransformerLayer, TransformerStack

__all__ = [
    "GELU",
    "GRU",
    "LSTM",
    "MHSA",
    "MLP",
    "MODULES",
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

#: Module of torch.nn -> its unit-scaled version, which takes its arguments in the same order.
MODULES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Bilinear: Bilinear,
    nn.Conv1d: Conv1d,
    nn.Conv2d: Conv2d,
    nn.Conv3d: Conv3d,
    nn.ConvTranspose1d: ConvTranspose1d,
    nn.ConvTranspose2d: ConvTranspose2d,
    nn.ConvTranspose3d: ConvTranspose3d,
    nn.CrossEntropyLoss: CrossEntropyLoss,
    nn.Dropout: Dropout,
    nn.Embedding: Embedding,
    nn.EmbeddingBag: EmbeddingBag,
    nn.GELU: GELU,
    nn.GRU: GRU,
    nn.GRUCell: GRUCell,
    nn.LSTM: LSTM,
    nn.LSTMCell: LSTMCell,
    nn.LayerNorm: LayerNorm,
    nn.Linear: Linear,
    nn.MultiheadAttention: MultiheadAttention,
    nn.RMSNorm: RMSNorm,
    nn.RNN: RNN,
    nn.RNNCell: RNNCell,
    nn.SiLU: SiLU,
    nn.Softmax: Softmax,
}
