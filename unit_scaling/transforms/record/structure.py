"""The structure of a model: its modules, their parameters and what else they hold.

A plan identifies calls by module path, so it is valid for one structure. It no longer applies once
modules are added, removed, moved or replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from fp8.common.mixin import gained_attributes
from fp8.common.pitfalls import ScaleWarning, warn_once
from fp8.common.step import unfolded

from ...parameter import has_parameter_data
from .record import tensors_in
from .values import rms_of

Structure = dict[str, tuple[Any, ...]]
"""Path -> names of the class and its forward, name in the scope, parameters, children.

Parameters are numbered; shared parameters have equal numbers.
"""


def structure_of(model: nn.Module, scope: object, path: str = "") -> Structure:
    """The structure of ``model``, whose own path is ``path``. Classes are the original ones: those
    that `fp8.convert`, FSDP2 and others derive change no call."""
    found: Structure = {}
    numbers: dict[int, int] = {}
    todo = [(path, model)]
    while todo:
        path, module = todo.pop()
        own = vars(module)
        parameters = []
        for name, parameter in own["_parameters"].items():
            if parameter is not None:
                parameters.append((name, numbers.setdefault(id(parameter), len(numbers))))
        place = {id(other): name for other, name in own.get("_scopes", ())}.get(id(scope))
        children = [(name, child) for name, child in own["_modules"].items() if child is not None]
        kind = type(module)
        kind = getattr(kind, "_original", kind)
        forward = getattr(own.get("forward", kind.forward), "__qualname__", "other")
        names = tuple([name for name, _ in children])
        found[path] = (kind.__qualname__, forward, place, tuple(parameters), names)
        prefix = f"{path}." if path else ""
        todo += [(prefix + name, child) for name, child in children]
    return found


def part(structure: Structure, path: str) -> Structure:
    """The structure of the module at ``path``, with its parameters renumbered."""
    if not path:
        return structure
    numbers: dict[int, int] = {}
    found: Structure = {}
    for name, (kind, forward, place, parameters, children) in structure.items():
        if name == path or name.startswith(f"{path}."):
            own = tuple((n, numbers.setdefault(i, len(numbers))) for n, i in parameters)
            found[name] = (kind, forward, place, own, children)
    return found


def check_kept(model: nn.Module, before: Structure, path: str) -> None:
    """Raises RuntimeError where plain tensors stand for all parameters of a module: its weights
    have lost their tags. before: the structure when the scope was installed."""
    for name, module in model.named_modules(prefix=path):
        own = vars(module)
        known = [parameter for parameter, _ in before[name][3]] if name in before else []
        left = any(parameter is not None for parameter in own["_parameters"].values())
        if known and not left and all(isinstance(own.get(p), Tensor) for p in known):
            raise RuntimeError(
                f"the parameters of {name or type(module).__name__!r} have become plain tensors, "
                "as under FullyShardedDataParallel and DataParallel, and a unit-scaled model knows "
                "its weights as parameters: use fully_shard, use_orig_params=True, or "
                "DistributedDataParallel"
            )


def survivors(before: Structure, after: Structure) -> dict[str, str]:
    """Path -> new path of the modules of ``before`` that are in ``after`` and run the same code."""
    places = {place: path for path, (_, _, place, _, _) in after.items() if place in before}
    return {place: path for place, path in places.items() if before[place][:2] == after[path][:2]}


def warn_of_new_weights(model: nn.Module, scope: object) -> None:
    """Warns of weights that were added after ``scope`` was installed and are far from RMS 1."""
    found: dict[str, float] = {}
    for path, module in model.named_modules():
        if isinstance(module, ParametrizationList):
            continue  # its weight is scaled where it is used
        known = any(other is scope for other, _ in getattr(module, "_scopes", ()))
        for name, p in module.named_parameters(path, recurse=False):
            if not (known and has_parameter_data(p)) and p.dtype.is_floating_point:
                found[name] = rms_of(p) if p.numel() > max(p.shape, default=1) else 1.0
    found = {name: rms for name, rms in found.items() if not 0.5 <= rms <= 2}
    if found:
        name, rms = next(iter(found.items()))
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        warn_once(
            ScaleWarning,
            f"{name}{more} came into the model after unit_scale and has RMS {rms:.3g}, where its "
            "operation expects about 1: put in unit_scale(layer) in place of the layer, or a "
            "module of unit_scaling",
            about=model,
            key=" ".join(found),
        )


# Tensors among the attributes of modules

HELD = " held"
"""Suffix of a module's name in the first part of the `Slot` of a tensor among its attributes."""

_OF_MODULES = frozenset(vars(nn.Module()))
"""The attributes that every module has: its parameters, buffers, submodules, hooks."""


def own_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The attributes of a module beside those of every module and those of transforms."""
    others = _OF_MODULES.union(gained_attributes(module))
    return ((name, value) for name, value in vars(module).items() if name not in others)


def held_by(model: nn.Module, path: str) -> dict[str, dict[str, Any]]:
    """The attributes of the modules of ``model``, which is at ``path``, that hold tensors with a
    gradient function: by the module's name with the suffix `HELD`."""
    found: dict[str, dict[str, Any]] = {}
    seen: set[int] = set()  # modules share configurations
    for name, module in model.named_modules(prefix=path):
        for attribute, value in own_attributes(module):
            value = unfolded(value, seen)
            if any(t.grad_fn is not None for _, t in tensors_in(value)):
                found.setdefault(name + HELD, {})[attribute] = value
    return found
