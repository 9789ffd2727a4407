"""`recalibrate`: the gauges of gradients, measured again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fp8.subclass import check_module

from .run.install import find_scope, unwrapped
from .run.scope import UnitScale

__all__ = ["recalibrate"]


def recalibrate(model: nn.Module, batch: Any, loss: Callable[[Any], Tensor] | None = None) -> None:
    """Measures the gauges of a unit-scaled model anew, in one forward and backward pass of a copy.

    batch: a tensor, a tuple or list of arguments, or a mapping of keyword arguments. loss: output
    of the model -> a scalar, where the model does not compute its loss itself.

    A gauge is the power of two that brings the gradients of a region of the model to RMS 1. It is
    measured at the first step and kept. In training gradients change; products lose little as long
    as they stay within some octaves, and nothing of the function or of the gradients of parameters
    depends on it: those keep their power of two, so that an optimizer goes on as before. The
    parameters, their ``.grad``, buffers and the random state are not touched. Compiled code is
    compiled again at its next call.

    Raises TypeError for what is not a module, ValueError for one without `unit_scale`.

    >>> import torch
    >>> from unit_scaling.transforms import recalibrate, unit_scale
    >>> model = unit_scale(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 2)))
    >>> x = torch.randn(4, 8)
    >>> model(x).square().mean().backward()
    >>> recalibrate(model, x, loss=lambda y: y.square().mean())
    """
    check_module("recalibrate", model)
    inner = unwrapped(model)
    if isinstance(inner, DistributedDataParallel):
        inner = unwrapped(inner.module)
    scope = find_scope(inner, UnitScale)
    if scope is None:
        raise ValueError(f"recalibrate: {type(inner).__name__} has no unit_scale")
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        kwargs = dict(batch)
    else:
        args = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    scope.recalibrate(inner, args, kwargs, loss)
