"""Weights that are computed by parametrizations, in layers that are converted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import nn

from ..common.compiler import eager_only
from ..common.mixin import Gained, gain
from ..context.active import ACTIVE
from ..modes.autocast import autocast


class OfParameters(Gained):
    """The computation of a parametrized weight: its products are not those of the layer."""

    def around(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        with autocast(enabled=False) if ACTIVE.blocks else nullcontext():
            return forward(*args, **kwargs)


@eager_only()
def leave_parametrizations(layer: nn.Module) -> None:
    """Leaves the products that compute the weights of a layer in high precision."""
    computed: Any = layer._modules.get("parametrizations") or {}
    for part in computed.values():
        gain(part, OfParameters)
