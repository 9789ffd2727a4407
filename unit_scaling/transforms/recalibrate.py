"""`recalibrate`: measures the gradient scale factors of a unit-scaled model again."""

from __future__ import annotations

from torch import nn

from fp8.common.mixin import check_module
from fp8.common.step import Batch, Loss, arguments, unwrapped

from .run.install import find_scope
from .run.scope import UnitScale


def recalibrate(model: nn.Module, batch: Batch, loss: Loss | None = None) -> None:
    """Measures the gradient scale factors again, in one forward and backward pass of a copy.

    Each region of the model has a power of two that brings its gradients to RMS 1. It is measured
    at the first step and then fixed. Gradients change in training; the precision of products
    suffers little while they stay within a few powers of two. The function and the gradients of
    parameters do not depend on these factors, so an optimizer continues unaffected. Parameters,
    their ``.grad``, buffers and the random state are not changed. Compiled code is recompiled at
    its next call.

    Args:
        model: a model with `unit_scale`, changed in place.
        batch: a tensor, a tuple or list of arguments, or a mapping of keyword arguments.
        loss: maps the model's output to a scalar; for models that do not compute their loss.

    Raises:
        TypeError: ``model`` is not an `nn.Module`.
        ValueError: ``model`` has no `unit_scale`.

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
    scope.recalibrate(inner, arguments(batch), loss)
