"""`recalibrate`: the gauges of gradients, measured again."""

from __future__ import annotations

from torch import nn

from fp8.common.mixin import check_module
from fp8.common.step import Batch, Loss, arguments, unwrapped

from .run.install import find_scope
from .run.scope import UnitScale

__all__ = ["recalibrate"]


def recalibrate(model: nn.Module, batch: Batch, loss: Loss | None = None) -> None:
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
    scope = find_scope(inner, UnitScale)
    if scope is None:
        raise ValueError(f"recalibrate: {type(inner).__name__} has no unit_scale")
    scope.recalibrate(inner, *arguments(batch), loss)
