"""Unit-scaled versions of `torch.nn.functional`: at initialisation, with standard normal inputs,
the output of every function and the gradient of every argument have RMS about 1.

Each function is a row of `unit_scaling.ops.OPS`. ``constraint`` names how its scales are tied (see
`unit_scaling.constraints`), ``mult`` is the op's u-muP hyper-parameter: how non-linear it is.
"""

from ._functional.activations import add, dropout, gelu, silu, silu_glu, softmax
from ._functional.attention import rotary, scaled_dot_product_attention
from ._functional.contraction import einsum
from ._functional.convolution import (
    conv1d,
    conv2d,
    conv3d,
    conv_transpose1d,
    conv_transpose2d,
    conv_transpose3d,
)
from ._functional.embedding import embedding, embedding_bag
from ._functional.losses import cross_entropy, mse_loss
from ._functional.norms import layer_norm, rms_norm
from ._functional.products import addmm, bilinear, linear, linear_readout, matmul
from ._functional.recurrent import (
    gru,
    gru_cell,
    lstm,
    lstm_cell,
    rnn_relu,
    rnn_relu_cell,
    rnn_tanh,
    rnn_tanh_cell,
)
from ._functional.residuals import residual_add, residual_apply, residual_split
from ._functional.unary import (
    atan,
    celu,
    cos,
    elu,
    hardshrink,
    hardsigmoid,
    hardswish,
    hardtanh,
    leaky_relu,
    logsigmoid,
    mish,
    relu,
    relu6,
    relu_squared,
    selu,
    sigmoid,
    sin,
    softplus,
    softshrink,
    softsign,
    tanh,
    tanhshrink,
)

__all__ = [
    "add",
    "addmm",
    "atan",
    "bilinear",
    "celu",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "cos",
    "cross_entropy",
    "dropout",
    "einsum",
    "elu",
    "embedding",
    "embedding_bag",
    "gelu",
    "gru",
    "gru_cell",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "layer_norm",
    "leaky_relu",
    "linear",
    "linear_readout",
    "logsigmoid",
    "lstm",
    "lstm_cell",
    "matmul",
    "mish",
    "mse_loss",
    "relu",
    "relu6",
    "relu_squared",
    "residual_add",
    "residual_apply",
    "residual_split",
    "rms_norm",
    "rnn_relu",
    "rnn_relu_cell",
    "rnn_tanh",
    "rnn_tanh_cell",
    "rotary",
    "scaled_dot_product_attention",
    "selu",
    "sigmoid",
    "silu",
    "silu_glu",
    "sin",
    "softmax",
    "softplus",
    "softshrink",
    "softsign",
    "tanh",
    "tanhshrink",
]
