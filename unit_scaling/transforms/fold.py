"""`fold`: converts a unit-scaled model to an equivalent plain model."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import nn

from fp8.common.mixin import check_module, lose
from fp8.common.step import unwrapped

from .compile import copied
from .run.install import find_scope, uninstall
from .run.pretrained import Pretrained
from .run.scope import UnitScale

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def fold(module: M) -> M:
    """Returns a plain model with the factors of `unit_scale` multiplied into its weights.

    The copy has the class and state_dict of the plain model and computes the same output as
    ``module`` in evaluation mode. Hooks, dtypes, devices, requires_grad and other transforms are
    kept. Training differs: dropout has other factors, and the effective learning rates change.

    The result is exact up to two roundings. The factors are not powers of two, so each weight is
    rounded once in its dtype. Norms add eps to squares of another scale: the relative difference is
    eps / 2 times the deviation of the squared ratio from 1. With ``init="preserve"`` there are no
    factors and the result is exact.

    Args:
        module: a model with `unit_scale` that has run. If it is wrapped by `torch.compile`, the
            wrapped model is folded.

    Returns:
        A model of the same class, without the transform.

    Raises:
        TypeError: ``module`` is not an `nn.Module`.
        ValueError: the model has no `unit_scale`, has not run, or has a factor that no weight can
            absorb: functions in ``replace``, and weights shared by layers with different factors.
            The message names the calls.

    >>> import torch
    >>> from unit_scaling.transforms import fold, unit_scale
    >>> x, model = torch.randn(4, 8), unit_scale(torch.nn.Linear(8, 8))
    >>> y = model(x)
    >>> torch.testing.assert_close(fold(model)(x), y)
    """
    check_module("fold", module)
    scope = find_scope(module, UnitScale)
    if scope is None:
        raise ValueError(f"fold needs a model with unit_scale, got a {type(module).__name__}")
    inner: Any = unwrapped(module)
    factors = scope.outside(inner).factors
    result: M = copied(inner, "fold")
    tensors = dict((*result.named_parameters(), *result.named_buffers()))
    for name, factor in factors.items():
        tensors[name].mul_(factor)
    uninstall(result, UnitScale)
    for part in result.modules():
        lose(part, Pretrained)
    return result
