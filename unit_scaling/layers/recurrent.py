"""Recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from .. import functional as U
from ..ops.recurrent import PACKED
from ..parameter import MupType, TaggedModule

__all__ = ["GRU", "LSTM", "RNN", "GRUCell", "LSTMCell", "RNNCell"]


class _Recurrent(TaggedModule):
    """Base of all recurrent layers. ``self`` is also the torch module of the same name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        kinds: dict[str, MupType] = {
            name: "weight" if p.dim() > 1 else "bias"
            for name, p in self.named_parameters(recurse=False)
        }
        self.tag_parameters(**kinds)

    def reset_parameters(self) -> None:
        """Initialises weights with a standard normal and biases with zero."""
        for p in self.parameters(recurse=False):
            nn.init.normal_(p) if p.dim() > 1 else nn.init.zeros_(p)
        self.restore_tags()


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


class LSTM(_Recurrent, nn.LSTM):
    """`unit_scaling.functional.lstm` as a module: `torch.nn.LSTM` with weights at unit scale.

    Arguments, input, states and results are those of torch. Weights are initialised with a standard
    normal, biases with zero.

    Raises:
        NotImplementedError: proj_size is used, or (in ``forward``) the sequence is packed.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        proj_size: int = 0,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if proj_size:
            raise NotImplementedError("an LSTM with proj_size has no unit-scaled form")
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            proj_size,
            device,
            dtype,
        )

    def forward(  # type: ignore[override]
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, (hidden, cell) = _run(self, U.lstm, input, hx)
        return output, (hidden, cell)


class GRU(_Recurrent, nn.GRU):
    """`unit_scaling.functional.gru` as a module: `torch.nn.GRU` with weights at unit scale; see
    `LSTM`.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device=device,
            dtype=dtype,
        )

    def forward(self, input: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        output, (hidden,) = _run(self, U.gru, input, None if hx is None else (hx,))
        return output, hidden


class RNN(_Recurrent, nn.RNN):
    """`torch.nn.RNN` with weights at unit scale; see `LSTM`.

    Args:
        nonlinearity: "tanh" or "relu".
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            input_size,
            hidden_size,
            num_layers,
            nonlinearity,
            bias,
            batch_first,
            dropout,
            bidirectional,
            device=device,
            dtype=dtype,
        )

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


class LSTMCell(_Recurrent, nn.LSTMCell):
    """`unit_scaling.functional.lstm_cell` as a module: `torch.nn.LSTMCell` at unit scale; see
    `LSTM`.
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, device, dtype)

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        hidden, cell = _step(self, U.lstm_cell, input, hx)
        return hidden, cell


class GRUCell(_Recurrent, nn.GRUCell):
    """`unit_scaling.functional.gru_cell` as a module: `torch.nn.GRUCell` at unit scale; see
    `LSTM`."""

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, device, dtype)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        return _step(self, U.gru_cell, input, None if hx is None else (hx,))[0]


class RNNCell(_Recurrent, nn.RNNCell):
    """`torch.nn.RNNCell` with weights at unit scale; see `LSTM`.

    Args:
        nonlinearity: "tanh" or "relu".
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(input_size, hidden_size, bias, nonlinearity, device, dtype)

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        function = U.rnn_tanh_cell if self.nonlinearity == "tanh" else U.rnn_relu_cell
        return _step(self, function, input, None if hx is None else (hx,))[0]
