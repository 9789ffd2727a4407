"""MS-AMP's functions by their names, computed here: MS-AMP itself was written for torch 2.1 and has
no distribution to install."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..levels import initialize as levels
from ..recipes.policy import Policy
from ..recipes.recipe import AUTO, Recipe

__all__ = ["clip_grad_norm_", "initialize"]


def initialize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    opt_level: str = "O1",
    use_te: bool = False,
    *,
    recipe: str | Recipe | Policy | None = AUTO,
) -> tuple[nn.Module, Optimizer]:
    """``msamp.initialize``, by `fp8.initialize`.

    Args:
        model, optimizer, opt_level: as in `fp8.initialize`, whose errors are raised.
        use_te: whether the model has layers of TransformerEngine, which compute their own products
            in FP8: ``recipe`` is then ignored, and `fp8.initialize` leaves their weights unchanged.
        recipe: of the products. "tensor", which "auto" selects for a model that is not unit-scaled,
            is closest to MS-AMP's. None leaves them unchanged.

    Returns:
        (model, optimizer).
    """
    return levels.initialize(model, optimizer, opt_level, None if use_te else recipe)


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """``msamp.clip_grad_norm_``: `torch.nn.utils.clip_grad_norm_`, without clipping for
    ``max_norm`` <= 0.

    Args:
        parameters: parameters whose gradients are plain tensors or ScaledTensors.
        max_norm, norm_type, error_if_nonfinite: as in torch.

    Returns:
        The norm of all gradients together.

    Raises:
        RuntimeError: if the norm is not finite, with ``error_if_nonfinite``.
    """
    limit = max_norm if max_norm > 0 else torch.inf
    return nn.utils.clip_grad_norm_(parameters, limit, norm_type, error_if_nonfinite)
