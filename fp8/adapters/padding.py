"""Pads inputs of linear layers whose kernels support only certain numbers of tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import functional as F

from ..common.mixin import Gained


class Padded(Gained):
    """A linear layer that pads its input with rows of zeros to the multiple that its products need,
    and removes them from its output. They do not change other rows, maxima or gradients."""

    fp8_multiple: int

    def around(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        input, *others = args
        short = -(input.numel() // max(input.shape[-1], 1)) % self.fp8_multiple
        if not short:
            return forward(*args, **kwargs)
        rows = F.pad(input.reshape(-1, input.shape[-1]), (0, 0, 0, short))
        output = forward(rows, *others, **kwargs)[:-short]
        return output.reshape(*input.shape[:-1], output.shape[-1])
