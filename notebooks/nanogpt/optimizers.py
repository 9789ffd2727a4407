"""AdamW, and those with states in low precision that a run may use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import fp8
import unit_scaling as uu
from unit_scaling.parameter import has_parameter_data

if TYPE_CHECKING:
    from .settings import Settings

Groups = list[dict[str, Any]]


def _torch(groups: Groups, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, fused=True, **settings)


def _blocks(groups: Groups, **settings: Any) -> torch.optim.Optimizer:
    formats = {"first_moment": "e4m3_block", "second_moment": "e5m3_block"}
    return fp8.optim.AdamW(groups, **formats, **settings)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": _torch,
    "fp8": fp8.optim.AdamW,  # first moments in e4m3, second ones in float16
    "8bit": _blocks,
}
"""Name -> what makes an AdamW of groups, lr and betas."""


def make_optimizer(
    model: nn.Module, lr: float, settings: Settings
) -> torch.optim.Optimizer:
    """AdamW as in nanoGPT: matrices decay; biases and the gains of norms do not.

    Of a unit-scaled model the parameters have learning rates of their own: with optimizer "adamw"
    by `uu.optim.AdamW`, whose weight decay is that of a step. A step then takes as much off a
    weight as one at the peak of settings.lr takes off the plain one.
    """
    parameters = list(model.parameters())
    is_scaled = all(has_parameter_data(p) for p in parameters)
    decay = settings.weight_decay * (settings.lr if is_scaled else 1.0)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    if is_scaled and settings.optimizer == "adamw":
        return uu.optim.AdamW(groups, lr, settings.betas, fused=True)
    if is_scaled:
        groups = uu.optim.scaled_parameters(groups, "adam", lr)
    return OPTIMIZERS[settings.optimizer](groups, lr=lr, betas=settings.betas)
