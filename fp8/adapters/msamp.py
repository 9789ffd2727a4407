"""MS-AMP: its functions by their names, by MS-AMP itself where it can be imported, which changes
functions of torch, else by `fp8.initialize`."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..common.libraries import need, probe
from ..common.mixin import bare_class
from ..common.report import LEFT_ALONE, Report, Row, note
from ..layers.adapters import ADAPTED, Adapted
from ..recipes.recipe import AUTO
from ..training import levels

__all__ = ["clip_grad_norm_", "initialize"]


def initialize(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    opt_level: str = "O1",
    use_te: bool = False,
) -> tuple[nn.Module, Optimizer]:
    """``msamp.initialize``. `fp8.report` says which library set the level.

    Args:
        model, optimizer, opt_level: as in `fp8.initialize`; MS-AMP itself has no "O3".
        use_te: whether the layers are TransformerEngine's, which compute their own products.

    Returns:
        (model, optimizer); of MS-AMP a new optimizer.

    Raises:
        ImportError: for ``use_te`` without TransformerEngine.
        ValueError, TypeError: as MS-AMP, or as `fp8.initialize`.
    """
    if use_te:
        need("transformer_engine")
    library = probe("msamp")
    if library.module is None:
        recipe = None if use_te else AUTO
        model, optimizer = levels.initialize(model, optimizer, opt_level, recipe)
        note(model, f"by fp8.initialize; MS-AMP: {library.why}")
        return model, optimizer
    model, optimizer = library.module.initialize(model, optimizer, opt_level, use_te)
    vars(model)[ADAPTED] = Adapted("msamp", Report(_rows(model)))
    note(model, f"level {opt_level}, by msamp.initialize of MS-AMP {library.version}")
    return model, optimizer


def _rows(model: nn.Module) -> Iterator[Row]:
    for name, module in model.named_modules():
        kind = bare_class(module).__name__
        own = list(module.parameters(recurse=False))
        # MS-AMP's parameters are no tensors.
        if not all(isinstance(p, Tensor) for p in own):
            yield Row(name, kind, "converted", "MS-AMP")
        elif any(p.dim() > 1 for p in own):
            yield Row(name, kind, LEFT_ALONE, "MS-AMP does not replace it")


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """``msamp.clip_grad_norm_``: as `torch.nn.utils.clip_grad_norm_`, but ``max_norm`` <= 0 clips
    nothing. Returns the norm of all gradients together."""
    # Not imported: this runs in each step, and only a loaded MS-AMP has such gradients.
    library: Any = sys.modules.get("msamp")
    if library is not None:
        return library.clip_grad_norm_(
            parameters, max_norm, norm_type, error_if_nonfinite
        )
    limit = max_norm if max_norm > 0 else torch.inf
    return nn.utils.clip_grad_norm_(parameters, limit, norm_type, error_if_nonfinite)


def revert(model: nn.Module) -> nn.Module:
    """Raises ValueError: MS-AMP has no way back."""
    raise ValueError(
        f"MS-AMP replaced weights of the {bare_class(model).__name__} by its own and has no way "
        "back: make the model again"
    )
