"""Containers of residual layers, which tag their parameters with the depth of the stack.

u-muP divides learning rates in a stack of layers by the square root of its depth.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any, cast

from torch import nn

from ..parameter import TaggedModule, Tags, has_parameter_data, tag, tags_of

__all__ = ["DepthModuleList", "DepthSequential"]


def _multiply_depth(root: nn.Module, old: int | None, new: int | None) -> None:
    """Replaces the factor ``old`` in the depth of every parameter in ``root`` by ``new``; None is
    no container. Raises ValueError for an untagged parameter, before anything is changed."""
    tags: dict[nn.Parameter, Tags] = {}
    for name, parameter in root.named_parameters():
        if not has_parameter_data(parameter):
            raise ValueError(
                f"parameter {name!r} has no mup_type, so its learning rate is not known: use a "
                "module of unit_scaling, or unit_scaling.Parameter"
            )
        depth = (parameter.mup_scaling_depth or 1) // (old or 1) * (new or 1)
        inside = None if new is None and depth == 1 else depth
        multiplied = tags_of(parameter)._replace(mup_scaling_depth=inside)
        tags[cast("nn.Parameter", parameter)] = multiplied
    for parameter, multiplied in tags.items():
        tag(parameter, *multiplied)
    for module in root.modules():
        if isinstance(module, TaggedModule):
            for name, parameter in module.named_parameters(recurse=False):
                module.mup_tags[name] = tags[parameter]


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
        factor = None if self.keeps_rates else factor
        _multiply_depth(self, self._factor, factor)
        self._factor = factor

    def __iadd__(self, modules: Iterable[nn.Module]) -> Any:
        return self.extend(modules)  # type: ignore[operator]


def _resizing(name: str) -> Callable[..., Any]:
    """A method of torch's container that changes its size."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._set_factor(None)
        result = getattr(super(_DepthContainer, self), name)(*args, **kwargs)
        self._set_factor(max(len(self), 1))
        return result

    return method


for _name in ("__setitem__", "__delitem__", "append", "insert", "extend"):
    setattr(_DepthContainer, _name, _resizing(_name))


class DepthSequential(_DepthContainer, nn.Sequential):
    """`torch.nn.Sequential` of residual layers: sets the depth of the parameters inside.

    The mup_scaling_depth of every parameter is multiplied by the number of layers. Containers may
    be nested: 3 stages of 4 layers have depth 12. The depth is updated by `append`, `extend`,
    `insert`, `pop`, and assignment and deletion of layers. A slice is a plain `torch.nn.Sequential`
    of the same layers, which keep their depth.

    Raises:
        ValueError: a parameter has no tags.

    >>> from unit_scaling import DepthSequential, Linear
    >>> stack = DepthSequential(Linear(8, 8), Linear(8, 8))
    >>> stack[0].weight.mup_scaling_depth
    2
    """

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        entries = list(self.named_children())[index]
        return nn.Sequential(OrderedDict(entries))


class DepthModuleList(_DepthContainer, nn.ModuleList):
    """`torch.nn.ModuleList` of residual layers: sets depths as `DepthSequential` does."""

    def __init__(self, modules: Iterable[nn.Module] | None = None) -> None:
        super().__init__(modules)

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return super().__getitem__(index)
        return nn.ModuleList(list(self)[index])
