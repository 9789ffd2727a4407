"""Linear layers whose kernels take only so many tokens, made to take any number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn import functional as F

from ..common.mixin import Gained

__all__ = ["Padded"]


class Padded(Gained):
    """A linear layer that gets as many rows of zeros more as its products need, which are taken off
    its output again. They change no other row, no maximum and no gradient."""

    fp8_multiple: int

    def around(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        input, *others = args
        short = -(input.numel() // max(input.shape[-1], 1)) % self.fp8_multiple
        if not short:
            return forward(*args, **kwargs)
        rows = F.pad(input.reshape(-1, input.shape[-1]), (0, 0, 0, short))
        output = forward(rows, *others, **kwargs)[:-short]
        return output.reshape(*input.shape[:-1], output.shape[-1])
