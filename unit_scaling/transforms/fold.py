"""`fold`: the plain model that computes what a unit-scaled one does."""

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

__all__ = ["fold"]

M = TypeVar("M", bound=nn.Module)


@torch.no_grad()
def fold(module: M) -> M:
    """The plain model of the same class, with the factors of `unit_scale` in its weights.

    A copy without the transform: it keeps hooks, dtypes, devices, requires_grad and other
    transforms, and in evaluation it computes what ``module`` does; of a model that `torch.compile`
    wraps it is one of the model itself. Its state_dict is that of the
    plain class. In training other factors hold (those of dropout), and so do other learning rates.

    Exact but for two roundings: factors are no powers of two, so each weight is rounded once in its
    dtype; and norms add their eps to squares of another size, a relative difference of eps / 2
    times how much the square of the ratio differs from 1. The model of ``init="preserve"`` has no
    factors: the result is exact.

    Raises TypeError for what is not a module; ValueError for a model without `unit_scale`, one that
    has not run, and one whose architecture has no place for some factor, by the calls it concerns:
    functions given in ``replace``, and weights that several layers share with different factors.

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
