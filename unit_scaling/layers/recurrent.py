"""Recurrent layers."""

from __future__ import annotations

from inspect import Parameter, signature
from typing import Any

from torch import Tensor, nn

from .. import functional as U
from ..ops.recurrent import PACKED
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

    def _kinds(self) -> dict[str, MupType]:
        own = self.named_parameters(recurse=False)
        return {name: "weight" if p.dim() > 1 else "bias" for name, p in own}


def _run(module: Any, function: Any, input: Tensor, states: Any) -> tuple[Tensor, list[Tensor]]:
    """The output and the last states of a layer, for a batch or a single sequence.

    Raises NotImplementedError for a packed sequence, ValueError for another number of dimensions.
    """
    if not isinstance(input, Tensor):
        raise NotImplementedError(PACKED)
    if input.dim() not in (2, 3):
        raise ValueError(f"input must have 2 or 3 dimensions, got shape {tuple(input.shape)}")
    alone = input.dim() == 2
    batch_dim = 0 if module.batch_first else 1
    input = input.unsqueeze(batch_dim) if alone else input
    if states is None:
        layers = module.num_layers * (2 if module.bidirectional else 1)
        zeros = input.new_zeros(layers, input.shape[batch_dim], module.hidden_size)
        states = (zeros, zeros)
    elif alone:
        states = tuple(s.unsqueeze(1) for s in states)
    weights = [weight for layer in module.all_weights for weight in layer]
    output, *last = function(
        input,
        states if function is U.lstm else states[0],
        weights,
        module.bias,
        module.num_layers,
        module.dropout,
        module.training,
        module.bidirectional,
        module.batch_first,
    )
    if alone:
        return output.squeeze(batch_dim), [s.squeeze(1) for s in last]
    return output, last


class LSTM(_Recurrent, nn.LSTM, op=U.lstm, like=_LSTM):
    """`unit_scaling.functional.lstm` as a module: `torch.nn.LSTM` with weights at unit scale.

    Arguments, input, states and results are those of torch. Weights are initialised with a standard
    normal, biases with zero.

    Raises:
        NotImplementedError: proj_size is used, or (in ``forward``) the sequence is packed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.proj_size:
            raise NotImplementedError("an LSTM with proj_size has no unit-scaled form")

    def forward(  # type: ignore[override]
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, (hidden, cell) = _run(self, U.lstm, input, hx)
        return output, (hidden, cell)


class GRU(_Recurrent, nn.GRU, op=U.gru, like=_GRU):
    """`unit_scaling.functional.gru` as a module: `torch.nn.GRU` with weights at unit scale; see
    `LSTM`.
    """

    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        output, (hidden,) = _run(self, U.gru, input, None if hx is None else (hx,))
        return output, hidden


class RNN(_Recurrent, nn.RNN, op=U.rnn_tanh, like=[*_GRU[:3], _NONLINEARITY, *_GRU[3:]]):
    """`torch.nn.RNN` with weights at unit scale; see `LSTM`.

    Args:
        nonlinearity: "tanh" or "relu".
    """

    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        function = U.rnn_tanh if self.nonlinearity == "tanh" else U.rnn_relu
        output, (hidden,) = _run(self, function, input, None if hx is None else (hx,))
        return output, hidden


def _step(module: Any, function: Any, input: Tensor, states: Any) -> tuple[Tensor, ...]:
    """The next states of a cell, for a batch or a single example."""
    if input.dim() not in (1, 2):
        raise ValueError(f"input must have 1 or 2 dimensions, got shape {tuple(input.shape)}")
    alone = input.dim() == 1
    input = input.unsqueeze(0) if alone else input
    if states is None:
        zeros = input.new_zeros(input.shape[0], module.hidden_size)
        states = (zeros, zeros)
    elif alone:
        states = tuple(s.unsqueeze(0) for s in states)
    weights = (module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh)
    if function is U.lstm_cell:
        last = function(input, states, *weights)
    else:
        last = (function(input, states[0], *weights),)
    return tuple(s.squeeze(0) for s in last) if alone else last


class LSTMCell(_Recurrent, nn.LSTMCell, op=U.lstm_cell):
    """`unit_scaling.functional.lstm_cell` as a module: `torch.nn.LSTMCell` at unit scale; see
    `LSTM`.
    """

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        hidden, cell = _step(self, U.lstm_cell, input, hx)
        return hidden, cell


class GRUCell(_Recurrent, nn.GRUCell, op=U.gru_cell):
    """`unit_scaling.functional.gru_cell` as a module: `torch.nn.GRUCell` at unit scale; see
    `LSTM`."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        return _step(self, U.gru_cell, input, None if hx is None else (hx,))[0]


class RNNCell(_Recurrent, nn.RNNCell, op=U.rnn_tanh_cell):
    """`torch.nn.RNNCell` with weights at unit scale; see `LSTM`.

    Args:
        nonlinearity: "tanh" or "relu".
    """

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        function = U.rnn_tanh_cell if self.nonlinearity == "tanh" else U.rnn_relu_cell
        return _step(self, function, input, None if hx is None else (hx,))[0]
