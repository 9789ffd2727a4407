"""MS-AMP: its levels, by the library itself where it can be imported, else by `fp8.initialize`.

There is no distribution of it to install, it patches torch when it is imported, and its last
version was written for torch 2.1. Its levels and their arithmetic are `fp8.levels.initialize`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from ..common.libraries import need, probe
from ..common.report import note
from ..levels import initialize as levels
from ..recipes.recipe import AUTO, Recipe

__all__ = ["clip_grad_norm_", "initialize"]


def initialize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    opt_level: str = "O1",
    use_te: bool = False,
    *,
    recipe: str | Recipe | None = AUTO,
) -> tuple[nn.Module, Optimizer]:
    """``msamp.initialize``, and `fp8.initialize` where that cannot be. Returns (model, optimizer).

    opt_level: "O1" or "O2", or "O3", which MS-AMP has for DeepSpeed only: ours is taken.
    use_te: the model has layers of TransformerEngine, which compute their own products in FP8: no
    recipe is set, whatever ``recipe`` is. Where the level is ours, their weights stay as they are.
    recipe: of the products, where the level is ours, as in `fp8.initialize`: "tensor", which "auto"
    is for a model that is not unit-scaled, is the nearest to MS-AMP's; None leaves them as they
    are.
    Which of the two it was, and why, is a line in `fp8.report`. MS-AMP itself is not taken for an
    AdamW: since torch made it a subclass of Adam, MS-AMP 0.4 takes it for Adam, whose weight decay
    is another.
    """
    found = probe("msamp")
    why_not = found.why or _why_not(optimizer, opt_level)
    if why_not:
        recipe = None if use_te else recipe
        model, optimizer = levels.initialize(model, optimizer, opt_level=opt_level, recipe=recipe)
        note(model, f"level {opt_level} by fp8.initialize, not by MS-AMP: {why_not}")
        return model, optimizer
    model, optimizer = found.module.initialize(model, optimizer, opt_level=opt_level, use_te=use_te)
    note(model, f"level {opt_level} by MS-AMP {found.version}")
    return model, optimizer


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """``msamp.clip_grad_norm_``: `torch.nn.utils.clip_grad_norm_`, and no clipping if ``max_norm``
    is 0 or less. Gradients may be plain tensors, ScaledTensors or MS-AMP's ScalingTensors.

    Returns the norm of all gradients together. Raises RuntimeError under ``error_if_nonfinite`` if
    it is not finite.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not all(isinstance(gradient, Tensor) for gradient in gradients):
        clip = need("msamp").clip_grad_norm_
        return clip(parameters, max_norm, norm_type, error_if_nonfinite)
    limit = max_norm if max_norm > 0 else torch.inf
    return nn.utils.clip_grad_norm_(parameters, limit, norm_type, error_if_nonfinite)


def _why_not(optimizer: Optimizer | None, opt_level: str) -> str:
    if opt_level not in ("O1", "O2"):
        return f"it has {opt_level} for DeepSpeed only"
    if issubclass(AdamW, Adam) and (optimizer is None or isinstance(optimizer, AdamW)):
        return "it takes AdamW for Adam under this version of torch"
    return ""
