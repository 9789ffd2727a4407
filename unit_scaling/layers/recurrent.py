"""Recurrent layers."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any

from torch import nn

from .. import functional as U
from ..parameter import MupType
from .scaled import Normal

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNCell"]


#: The arguments of torch's layers, whose constructors take any.
_LSTM = [p for name, p in signature(nn.RNNBase).parameters.items() if name != "mode"]
_GRU = [p for p in _LSTM if p.name != "proj_size"]
_NONLINEARITY = Parameter(
    "nonlinearity", Parameter.POSITIONAL_OR_KEYWORD, default="tanh", annotation=str
)


class _Recurrent(Normal):
    """Base of all recurrent layers. ``self`` is also the torch module of the same name."""

    forward = Normal.substituted

    def _kinds(self) -> dict[str, MupType]:
        parameters = self.named_parameters(recurse=False)
        return {name: "weight" if p.dim() > 1 else "bias" for name, p in parameters}


class LSTM(_Recurrent, nn.LSTM, op=U.lstm, like=_LSTM):
    """`unit_scaling.functional.lstm` as a module: `torch.nn.LSTM` with weights at unit scale.

    Arguments, input, states and results are those of torch. Weights are initialised with a standard
    normal, biases with zero. So for the other recurrent layers; those of `RNN` and `RNNCell` take a
    ``nonlinearity``, "tanh" or "relu".

    Raises:
        NotImplementedError: proj_size is used, or (in ``forward``) the sequence is packed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.proj_size:
            raise NotImplementedError("an LSTM with proj_size has no unit-scaled form")


# fmt: off
class GRU(_Recurrent, nn.GRU, op=U.gru, like=_GRU): ...
class RNN(_Recurrent, nn.RNN, op=U.rnn_tanh, like=[*_GRU[:3], _NONLINEARITY, *_GRU[3:]]): ...
class LSTMCell(_Recurrent, nn.LSTMCell, op=U.lstm_cell): ...
class GRUCell(_Recurrent, nn.GRUCell, op=U.gru_cell): ...
class RNNCell(_Recurrent, nn.RNNCell, op=U.rnn_tanh_cell): ...
