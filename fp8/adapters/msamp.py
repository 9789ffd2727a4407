"""MS-AMP: its levels, computed by the library if it can be imported, else by `fp8.initialize`.

MS-AMP has no distribution to install, and its last version was written for torch 2.1.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from ..common.libraries import need, probe
from ..common.report import note
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
    """``msamp.initialize``, or `fp8.initialize` if MS-AMP cannot be used.

    `fp8.report` says which of the two was used, and why. MS-AMP itself is not used for an AdamW:
    since torch made AdamW a subclass of Adam, MS-AMP 0.4 treats it as Adam, whose weight decay
    differs.

    Args:
        model, optimizer: as in `fp8.initialize`.
        opt_level: "O1" or "O2"; or "O3", which MS-AMP supports for DeepSpeed only, so
            `fp8.initialize` is used.
        use_te: whether the model has layers of TransformerEngine, which compute their own products
            in FP8: ``recipe`` is then ignored, and `fp8.initialize` leaves their weights unchanged.
        recipe: of the products, if `fp8.initialize` is used. "tensor", which "auto" selects for a
            model that is not unit-scaled, is closest to MS-AMP's. None leaves them unchanged.

    Returns:
        (model, optimizer).

    Raises:
        TypeError, ValueError: as `fp8.initialize`.
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
    """``msamp.clip_grad_norm_``: `torch.nn.utils.clip_grad_norm_`, without clipping for
    ``max_norm`` <= 0.

    Args:
        parameters: parameters whose gradients are plain tensors, ScaledTensors or MS-AMP's
            ScalingTensors.
        max_norm, norm_type: as in torch.
        error_if_nonfinite: raises if the norm is not finite.

    Returns:
        The norm of all gradients together.

    Raises:
        RuntimeError: if the norm is not finite, with ``error_if_nonfinite``.
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
