"""Learning rates of parameters that get other tags after their optimizer was made.

The first call of a model of `unit_scale` finds which weights keep their values and which readout is
none. The groups of an optimizer that was made before, which schedules know, stay, and each step of
such a parameter is multiplied by the quotient of the two rates: under SGD, Adam and AdamW, steps
are in proportion to the rate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class LateRates:
    """The parameters of an optimizer whose tags have changed. tags: reads those of a parameter.
    rate: the factor of a learning rate, of anything with tags and a shape."""

    def __init__(self, tags: Callable[[Any], Any], rate: Callable[[Any], float]) -> None:
        self._tags, self._rate = tags, rate
        self._added: list[tuple[Tensor, Any]] = []  # since the last step
        self._late: list[tuple[Tensor, float]] = []  # with the factor of their steps
        self._before: list[Tensor] = []  # their values before the running step

    def add(self, parameters: Iterable[Tensor]) -> None:
        """Remembers the tags that the rates of parameters are for."""
        self._added += [(p, self._tags(p)) for p in parameters]

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compares the tags of added parameters, and copies what the step is multiplied of."""
        for parameter, then in self._added:
            now = self._tags(parameter)
            if now._replace(mup_divisor=then.mup_divisor) == then:
                continue
            old, new = (
                self._rate(SimpleNamespace(**tags._asdict(), shape=parameter.shape))
                for tags in (then, now)
            )
            if old == 0.0 != new:
                raise ValueError(
                    f"{type(optimizer).__name__} was made before the model's first call, which has "
                    f"found another kind for a parameter of shape {tuple(parameter.shape)} whose "
                    "learning rate is 0: make it after that call"
                )
            if old != new:
                self._late.append((parameter, new / old))
        self._added.clear()
        self._before = [parameter.detach().clone() for parameter, _ in self._late]

    @torch.no_grad()
    def after_step(self) -> None:
        """Multiplies the steps that were taken."""
        for (parameter, factor), before in zip(self._late, self._before, strict=False):
            parameter.copy_(torch.lerp(before, parameter, factor))
        self._before = []
