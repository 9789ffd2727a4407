"""The static scales of the gradients that the products of a planned model cast.

Gradients are cast as in recipe "static", whatever the recipe casts other operands with, unless it
has a rule for the scale of gradients.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fp8.common.compiler import taken_as_constant

from ..record.place import Place


class Values:
    """Values as attributes: a graph reads an item of a dict as it was when the trace first read the
    dict, and an attribute as it is."""


class GradientScales:
    """The scale of each product: float32, 0-dim, or (groups,) for a grouped product; 0 where it is
    not set."""

    def __init__(self, exponents: Mapping[Place, int | tuple[int, ...]] | None = None) -> None:
        self._names: dict[Place, str] = {}
        self._values, self._known = Values(), Values()
        self._agreed: set[str] = set()
        for place, exponent in (exponents or {}).items():
            setattr(self._values, self._name(place), _scale(exponent))

    def _name(self, place: Place) -> str:
        return self._names.setdefault(place, f"scale_{len(self._names)}")

    def of(self, place: Place) -> GradientScale:
        return GradientScale(self, self._name(place))

    def tensors(self) -> dict[Place, Tensor]:
        known = vars(self._values)
        return {place: known[name] for place, name in self._names.items() if name in known}

    def named(self) -> dict[str, Tensor]:
        """The scales by path and kind, 0-dim; those of further products are numbered."""
        found: dict[str, Tensor] = {}
        counts: Counter[str] = Counter()
        for (path, kind, _), scale in self.tensors().items():
            name = ".".join(filter(None, [path, kind, "grad"]))
            for part in scale.unbind() if scale.dim() else [scale]:
                counts[name] += 1
                found[f"{name}.{counts[name]}" if counts[name] > 1 else name] = part
        return found

    def exponents(self) -> dict[Place, int | tuple[int, ...]]:
        return _exponents(self.tensors())

    def agree(self, agreed: Callable[[Mapping[Place, Any]], dict[Place, Any]]) -> None:
        """Sets the scales that were measured since the last time to those that ``agreed`` returns
        for them: those of the first process that has measured them."""
        new = {
            place: scale
            for place, scale in self.tensors().items()
            if scale._version and self._name(place) not in self._agreed
        }
        for place, exponent in agreed(_exponents(new)).items() if new else ():
            new[place].copy_(_scale(exponent))
            self._agreed.add(self._name(place))

    @taken_as_constant
    def exists(self, name: str, groups: int, device: str) -> bool:
        """Whether there is a scale; creates it, and notes whether it is set."""
        values, known = vars(self._values), vars(self._known)
        scale = values.get(name)
        if scale is not None and scale.device != torch.device(device):
            scale = values[name] = scale.to(device)
        if scale is None:
            with torch.inference_mode(False):
                scale = values[name] = torch.zeros((groups,) if groups else (), device=device)
        if not known.get(name):
            written = scale._version > 0 or bool(scale.any())
            known[name] = written and not scale.dim() and bool(scale > 0)
        return True


class GradientScale:
    """The scale of the gradient of one product, in the form of `fp8.recipes.history.LayerState`."""

    def __init__(self, scales: GradientScales, name: str) -> None:
        self._scales, self._name = scales, name

    def buffer(self, groups: int, device: torch.device) -> Tensor:
        """The scale; of the shape (1,) if it is to be measured."""
        scales = self._scales
        scales.exists(self._name, groups, str(device))
        scale: Tensor = getattr(scales._values, self._name)
        known: Any = getattr(scales._known, self._name)
        return scale if known or groups else scale.view(1)


def _scale(exponent: int | tuple[int, ...]) -> Tensor:
    return torch.ldexp(torch.ones(()), torch.tensor(exponent))


def _exponents(scales: Mapping[Place, Tensor]) -> dict[Place, int | tuple[int, ...]]:
    """Those of the scales that are set."""
    exponents = {p: s.log2().round().int().tolist() for p, s in scales.items() if s.all()}
    return {p: tuple(e) if isinstance(e, list) else e for p, e in exponents.items()}
