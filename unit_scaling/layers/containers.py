"""Containers of residual layers, which tag their parameters with the depth of the stack.

u-muP divides learning rates in a stack of layers by the square root of its depth.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..common.calls import Function
from ..parameter import remember_tags, set_tags, tagged_parameters

__all__ = ["DepthModuleList", "DepthSequential"]


def _multiply_depth(root: nn.Module, old: int | None, new: int | None) -> None:
    """Replaces the factor ``old`` in the depth of every parameter in ``root`` by ``new``; None is
    no container."""
    for parameter, tags in tagged_parameters(root):
        depth: int | None = (tags.mup_scaling_depth or 1) // (old or 1) * (new or 1)
        if new is None and depth == 1:
            depth = None
        set_tags(parameter, tags._replace(mup_scaling_depth=depth))
    remember_tags(root)


class _DepthContainer(nn.Module):
    """Multiplies the mup_scaling_depth of every parameter inside by the number of its entries."""

    #: The factor included in the current depths.
    _factor: int | None = None
    #: Whether the branches have weights under which learning rates do not depend on the depth.
    keeps_rates = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._set_factor(max(len(self), 1))  # type: ignore[arg-type]

    def _set_factor(self, factor: int | None) -> None:
        if self.keeps_rates:
            factor = None
        _multiply_depth(self, self._factor, factor)
        self._factor = factor

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)  # type: ignore[misc]
        entries: list[Any] = list(self._modules.items())[index]
        if isinstance(self, nn.Sequential):
            return nn.Sequential(OrderedDict(entries))
        return nn.ModuleList(dict(entries).values())

    def __iadd__(self, modules: Iterable[nn.Module]) -> Any:
        return self.extend(modules)  # type: ignore[operator]


def _resizing(name: str) -> Function:
    """A method of torch's container that changes its size."""

    def method(self: Any, *args: object, **kwargs: object) -> object:
        self._set_factor(None)
        result = getattr(super(_DepthContainer, self), name)(*args, **kwargs)
        self._set_factor(max(len(self), 1))
        return result

    return method


for _name in ("__setitem__", "__delitem__", "append", "insert", "extend"):
    setattr(_DepthContainer, _name, _resizing(_name))


class DepthSequential(_DepthContainer, nn.Sequential):
    """`torch.nn.Sequential` of residual layers: sets the depth of the parameters inside.

    The mup_scaling_depth of every parameter is multiplied by the number of layers, also when that
    changes. Containers may be nested: 3 stages of 4 layers have depth 12. A slice is a plain
    `torch.nn.Sequential` of the same layers, which keep their depth. Raises ValueError for a
    parameter without tags.

    >>> from unit_scaling import DepthSequential, Linear
    >>> stack = DepthSequential(Linear(8, 8), Linear(8, 8))
    >>> stack[0].weight.mup_scaling_depth
    2
    """


class DepthModuleList(_DepthContainer, nn.ModuleList):
    """`torch.nn.ModuleList` of residual layers: sets depths as `DepthSequential` does."""

    def __init__(self, modules: Iterable[nn.Module] | None = None) -> None:
        super().__init__(modules)
