"""Recurrent layers as Python loops, as torch's fused kernel does not expose its products.

They compute torch's function with weights, inputs and hidden states at unit scale:

- The gates are ``(x W_ih + h W_hh) / sqrt(1 + 1/gates)`` with x W_ih scaled by 1/sqrt(fan-in) and h
  W_hh by 1/sqrt(fan-out). Every step multiplies the gradient through time by W_hh, which sums over
  all gates: scaled by the fan-in, it would grow from step to step.
- A hidden state is torch's times a constant that gives it RMS 1 after the first few steps, for
  standard normal gates. It stays bounded, and an open gate keeps its state.

Nothing else is scaled: gradients are derivatives of this function, but for a factor of weight
gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..common.calls import Kwargs
from ..rules.batch import row_scale
from ..rules.table import Scales, positional, row
from .dropouts import dropout as unit_dropout
from .generated import REQUIRED, defaults_of, described
from .products import linear

States = list[Tensor]
"""The hidden state (batch, hidden), then the cell state if there is one."""

Step = Callable[[Tensor, Tensor, States], States]
"""(product of the input, product of the hidden state, states) -> the next states."""

# E[sigmoid(z)**2] and E[tanh(z)**2] for standard normal z, by quadrature.
_SIGMOID, _TANH = 0.293379036, 0.394294490
# In each step the second moment of a state is multiplied by _SIGMOID and gains _SIGMOID * _TANH.
# The second moment of torch's cell state is therefore _SIGMOID * _TANH / (1 - _SIGMOID) = 0.1637;
# the second moment of tanh of a normal variable with this variance is 0.126124106.
_TANH_OF_CELL = 0.126124106
LSTM_FACTOR = (_SIGMOID * _TANH_OF_CELL) ** -0.5
GRU_FACTOR = ((1 - _SIGMOID) / (_SIGMOID * _TANH)) ** 0.5
TANH_FACTOR = _TANH**-0.5
RELU_FACTOR = math.sqrt(2)


def _gates(x: Tensor, h: Tensor, gates: int) -> Tensor:
    return (x + h) * (1 + 1 / gates) ** -0.5


def _lstm_step(x: Tensor, h: Tensor, states: States) -> States:
    i, f, g, o = _gates(x, h, 4).chunk(4, dim=-1)
    cell = f.sigmoid() * states[1] + i.sigmoid() * g.tanh()
    return [(o.sigmoid() * cell.tanh() * LSTM_FACTOR).to(x.dtype), cell]


def _gru_step(x: Tensor, h: Tensor, states: States) -> States:
    reset_x, update_x, new_x = x.chunk(3, dim=-1)
    reset_h, update_h, new_h = h.chunk(3, dim=-1)
    reset = _gates(reset_x, reset_h, 3).sigmoid() * _SIGMOID**-0.5
    update = _gates(update_x, update_h, 3).sigmoid()
    new = _gates(new_x, reset * new_h, 3).tanh() * GRU_FACTOR
    return [(new + update * (states[0] - new)).to(x.dtype)]


def _tanh_step(x: Tensor, h: Tensor, states: States) -> States:
    return [_gates(x, h, 1).tanh() * TANH_FACTOR]


def _relu_step(x: Tensor, h: Tensor, states: States) -> States:
    return [_gates(x, h, 1).relu() * RELU_FACTOR]


def _direction(
    step: Step, sequence: Tensor, states: States, weights: Sequence[Tensor]
) -> tuple[Tensor, States]:
    """All hidden states (length, batch, hidden) and the last states of one direction of a layer."""
    w_ih, w_hh = weights[:2]
    b_ih, b_hh = weights[2:] or (None, None)
    outputs = []
    each = len(sequence) ** -0.5  # weight gradients sum over all steps
    for x in linear(sequence, w_ih, b_ih).unbind(0):
        h = linear(states[0], w_hh, b_hh, "to_grad_input_scale", weight_grad_mult=each)
        states = step(x, h, states)
        outputs.append(states[0])
    return torch.stack(outputs), states


def _layer(
    step: Step,
    input: Tensor,
    hx: Tensor | Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool = True,
    num_layers: int = 1,
    dropout: float = 0.0,
    train: bool = False,
    bidirectional: bool = False,
    batch_first: bool = False,
) -> tuple[Tensor, ...]:
    """(all outputs of the last layer, the last of each kind of state, layer by layer)."""
    directions = 1 + bidirectional
    count = len(params) // (num_layers * directions)
    if count not in (2, 4):
        raise NotImplementedError("an LSTM with proj_size has no unit-scaled form")
    sequence = input
    last = []
    if batch_first:
        sequence = input.transpose(0, 1)
    states: States = [hx] if isinstance(hx, Tensor) else list(hx)
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            i = layer * directions + direction
            weights = params[i * count : (i + 1) * count]
            start = [s[i] for s in states]
            if direction:
                sequence = sequence.flip(0)
            output, final = _direction(step, sequence, start, weights)
            if direction:
                output = output.flip(0)
            outputs.append(output)
            last.append(final)
        sequence = outputs[0]
        if bidirectional:
            sequence = torch.cat(outputs, dim=-1)
        if dropout and train and layer < num_layers - 1:
            sequence = unit_dropout(sequence, dropout)
    if batch_first:
        sequence = sequence.transpose(0, 1)
    return (sequence, *map(torch.stack, zip(*last, strict=True)))


_NAMED = positional(
    "input hx params has_biases num_layers dropout train bidirectional batch_first"
)


def _unpacked(*args: Any, **kwargs: Any) -> Kwargs:
    """The arguments of a layer by name. torch has others for a packed sequence."""
    if len(args) > 3 and not isinstance(args[3], bool):
        raise NotImplementedError(
            "a packed sequence has no unit-scaled form: pad it, and leave the padding out of the "
            "loss"
        )
    return _NAMED(*args, **kwargs)


def _op(
    name: str, step: Step, factor: float, rule: str, about: str
) -> Callable[..., tuple[Tensor, ...]]:
    """Adds the row of torch's function ``name``. rule, about: the docstrings of rule and body."""

    def scales(input: Tensor) -> Scales:
        return {"output": factor, "params": row_scale(math.prod(input.shape[:-1]))}

    def body(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
        return _layer(step, *args, **kwargs)

    _, *arguments = defaults_of(_layer).items()
    described(scales, f"{name}_scales", rule, {"input": REQUIRED}, scales)
    described(body, name, about, dict(arguments), _layer)
    return row(scales, adapters={getattr(torch, name): _unpacked})(body)


_LSTM = """Computes the output, hidden state and cell state of `torch.nn.LSTM`, unit-scaled.

It loops over the steps and is slower than torch's kernel. The cell state has torch's scale.

Args:
    input: (length, batch, in), or (batch, length, in) if ``batch_first``.
    hx: hidden and cell state, each (layers * directions, batch, hidden).
    params: for each layer and direction the weights of input and hidden state and, if
        ``has_biases``, their biases, as in torch.

Raises:
    NotImplementedError: the sequence is packed, or proj_size is used.
"""
_GRU = "Computes output and hidden state of `torch.nn.GRU`, unit-scaled; as `lstm` with one state."
_RNN = "Computes output and hidden state of `torch.nn.RNN`{}, unit-scaled; arguments as in `gru`."

lstm = _op(
    "lstm",
    _lstm_step,
    LSTM_FACTOR,
    "5.2 for the hidden state, which is a sigmoid times the tanh of a cell state of RMS 0.4.",
    _LSTM,
)
gru = _op(
    "gru",
    _gru_step,
    GRU_FACTOR,
    "2.5 for the hidden state: the candidate is scaled such that the state has RMS 1.",
    _GRU,
)
rnn_tanh = _op("rnn_tanh", _tanh_step, TANH_FACTOR, "1/RMS of tanh.", _RNN.format(""))
rnn_relu = _op(
    "rnn_relu", _relu_step, RELU_FACTOR, "1/RMS of relu.", _RNN.format(" with relu")
)
