"""Measures the RMS of operands in a pass without casts, for `fp8.calibrate`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from ..common.dtensor import is_dtensor, unreduced
from ..common.validation import refuse_transformed
from ..formats.format import get_format
from ..frame import framed
from ..recipes.cast import Cast
from ..recipes.scaling import second_moment, static_rms
from ..torch_internals import Arguments
from .scaled_tensor import dequantized

Parts = Callable[[Tensor], Iterable[Tensor]]


@dataclass
class Moment:
    """The operands with one static scale: its state, the sum of their squares in units of the RMS
    that it gives them, their number."""

    state: Tensor
    total: Tensor | float = 0.0
    elements: int = 0


class Measurement:
    """Sums of squares of operands. of_states: whether products have states. moments: by the address
    of a state. leaders: address of a state -> that of the first product that read the tensor."""

    def __init__(self, of_states: bool = True) -> None:
        self.of_states = of_states
        self.moments: dict[int, Moment] = {}
        self.leaders: dict[int, int] = {}
        self._read: dict[Arguments, tuple[int, Tensor]] = {}

    def operand(
        self,
        state: Tensor | None,
        x: Tensor,
        cast: Cast | None,
        parts: Parts | None = None,
    ) -> None:
        """Adds ``x``, of this cast, with its state. parts: splits x into groups with a state
        each."""
        if parts is not None and state is not None:
            for each, part in zip(state, parts(x), strict=True):
                self.operand(each, part, cast)
            return
        if cast is None or state is None or state.ndim > 1 or state.numel() != 1:
            return
        total = second_moment(unreduced(x) if is_dtensor(x) else dequantized(x))
        refuse_transformed(total)
        moment = self.moments.setdefault(state.data_ptr(), Moment(state))
        moment.total = moment.total + total / static_rms(get_format(cast.format)) ** 2
        moment.elements += x.numel()
        plain = type(x) in (Tensor, Parameter) and not x.is_inference()
        if torch.is_grad_enabled() and plain:
            key = (x.data_ptr(), x.shape, x.stride(), x.dtype, x._version)
            # Keeps x, so that no other tensor gets its address.
            leader, _ = self._read.setdefault(key, (state.data_ptr(), x.detach()))
            if leader != state.data_ptr():
                self.leaders[state.data_ptr()] = leader

    def gradient(
        self,
        state: Tensor | None,
        y: Tensor,
        cast: Cast | None,
        parts: Parts | None = None,
    ) -> Tensor:
        """Returns ``y`` and adds its gradient once that is computed."""
        if state is not None and y.requires_grad:
            y.register_hook(lambda grad: self.operand(state, grad, cast, parts))
        return y


def uncast() -> AbstractContextManager[None]:
    """Within the block, products of this thread are not cast, and have no states."""
    return framed(measurement=Measurement(of_states=False))
