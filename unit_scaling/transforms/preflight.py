"""The transform that `fp8.preflight` finds as an entry point, group ``fp8.transforms``."""

from __future__ import annotations

from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from .. import optim
from .compile import M
from .unit_scale import unit_scale


def initialized(model: M) -> M:
    """`unit_scale`, to be trained by `unit_scaling.optim` at its own rate."""
    return unit_scale(model)


def _own_rate(model: nn.Module, optimizer: Optimizer) -> Optimizer:
    """`unit_scaling.optim.AdamW` at its default learning rate, with the betas of the user's. Raises
    ValueError where the user's is neither Adam nor AdamW, whose runs it could not be compared
    with."""
    if not isinstance(optimizer, Adam | AdamW):
        kind = type(optimizer).__name__
        raise ValueError(
            f"unit_scale(model) trains with AdamW, and the reference with {kind}"
        )
    return optim.AdamW(model.parameters(), betas=optimizer.param_groups[0]["betas"])


initialized.recipe = "static"  # type: ignore[attr-defined]
initialized.label = "unit_scale(model), lr of uu.optim"  # type: ignore[attr-defined]
initialized.optimizer = _own_rate  # type: ignore[attr-defined]
