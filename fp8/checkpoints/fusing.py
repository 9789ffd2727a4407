"""Which layers of a model an engine has as one parameter, by the rules of a `Layout`."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from .layouts import Fused, Layout


class Target(NamedTuple):
    """A parameter of an engine.

    Attributes:
        path: of its module.
        stem: its name: "weight", or that of a parameter of all experts.
        layers: the names of the layers that it consists of: of each expert its parts.
        of_experts: whether the experts are its first dimension.
    """

    path: str
    stem: str
    layers: list[list[str]]
    of_experts: bool = False

    @property
    def all(self) -> list[str]:
        """The names of all layers, in order."""
        return [name for parts in self.layers for name in parts]


def targets(names: Collection[str], layout: Layout) -> dict[str, Target]:
    """Name of a layer -> the parameter that has its weight, for layers that a layout fuses. A layer
    whose other parts are not there is not fused."""
    found: dict[str, Target] = {}
    experts: dict[tuple[str, str], dict[int, list[str]]] = {}
    for parts, name in _complete(names, layout.experts):
        if is_of_expert(parts[0]):
            owner, index, _ = parts[0].rsplit(".", 2)
            experts.setdefault((owner, f"{name}_weight"), {})[int(index)] = parts
    # Experts in the order of their numbers, which is not that of their names: 10 is before 2.
    for (owner, stem), by_index in experts.items():
        target = Target(owner, stem, [by_index[i] for i in sorted(by_index)], True)
        found |= dict.fromkeys(target.all, target)
    for parts, name in _complete(names, layout.fused):
        if parts[0] not in found:
            path, dot, _ = parts[0].rpartition(".")
            target = Target(f"{path}{dot}{name}", "weight", [parts])
            found |= dict.fromkeys(parts, target)
    return found


def is_of_expert(name: str) -> bool:
    """Whether a layer is in a list within a list. That of layers has modules of such names too."""
    *path, index, _ = ("", *name.split("."))
    return index.isdigit() and any(part.isdigit() for part in path)


def sharing(names: Collection[str], layout: Layout) -> dict[str, list[str]]:
    """Name of a layer -> the layers whose scales have one unit."""
    found: dict[str, list[str]] = {}
    for parts, _ in _complete(names, layout.shared):
        found |= dict.fromkeys(parts, parts)
    return found


def of_stack(stack: str, parts: list[str]) -> Target:
    """The parameter that a stack of experts stays. parts: the names of its experts."""
    path, _, stem = stack.rpartition(".")
    return Target(path, stem, [[part] for part in parts], True)


def of_one_expert(parts: Iterable[str]) -> dict[str, list[str]]:
    """Name of an expert's part of a stack -> all parts of that expert, which are cast as one."""
    experts: dict[str, list[str]] = {}
    for part in parts:
        experts.setdefault(part.rpartition(".")[0], []).append(part)
    return {part: each for each in experts.values() for part in each}


def _complete(
    names: Collection[str], rules: Iterable[Fused]
) -> list[tuple[list[str], str]]:
    """Layers that a rule fuses, all there, and the name of the rule."""
    found = []
    for rule in rules:
        for name in names:
            path, dot, last = name.rpartition(".")
            parts = [f"{path}{dot}{part}" for part in rule.parts]
            if last == rule.parts[0] and all(part in names for part in parts):
                found.append((parts, rule.name))
    return found
