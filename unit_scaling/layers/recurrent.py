"""Recurrent layers."""

from __future__ import annotations

from inspect import signature

from torch import nn

from .. import functional as U
from .scaled import MULT, Normal

__all__ = ["GRU", "LSTM", "RNN"]


#: The arguments of torch's layers, whose constructors take any.
_LAYER = [
    p
    for n, p in signature(nn.RNNBase).parameters.items()
    if n not in ("mode", "proj_size")
]
_NONLINEARITY = MULT.replace(name="nonlinearity", default="tanh", annotation=str)


class _Recurrent(Normal):
    forward = Normal.substituted


class LSTM(_Recurrent, nn.LSTM, like=_LAYER):
    """`unit_scaling.functional.lstm` as a module: `torch.nn.LSTM` with weights at unit scale.

    Arguments, input, states and results are as in torch, without ``proj_size``. Weights are
    initialised with a standard normal, biases with zero. So for `GRU` and `RNN`, which takes a
    ``nonlinearity``, "tanh" or "relu". ``forward`` raises NotImplementedError for packed sequences.
    """


_RNN = [*_LAYER[:3], _NONLINEARITY, *_LAYER[3:]]


# fmt: off
class GRU(_Recurrent, nn.GRU, like=_LAYER): ...
class RNN(_Recurrent, nn.RNN, op=U.rnn_tanh, like=_RNN): ...
