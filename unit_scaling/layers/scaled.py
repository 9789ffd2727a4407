"""Base classes that make modules of torch.nn call unit-scaled functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from ..constraints import checked_constraint

__all__ = ["Activation", "Constrained", "Scaled"]


class Scaled(nn.Module):
    """Makes torch's module call ``op`` with its settings: ``class ReLU(Scaled, nn.ReLU)``.

    Settings are attributes of the module that are named like an argument of ``op``.
    """

    #: The function in `unit_scaling.functional`.
    op: ClassVar[Callable[..., Any]]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Sets the signature of the class: torch's arguments before or after ours."""
        super().__init_subclass__(**kwargs)
        torch_class = cls.__bases__[-1]
        if issubclass(torch_class, Scaled) or torch_class is nn.Module:
            return
        own = [inspect.signature(c).parameters.values() for c in (cls.__bases__[0], torch_class)]
        named = [
            p for p in own[0] if p.kind is not p.VAR_POSITIONAL and p.kind is not p.VAR_KEYWORD
        ]
        first = [p for p in named if p.kind is p.POSITIONAL_OR_KEYWORD]
        last = [p for p in named if p.kind is p.KEYWORD_ONLY]
        parameters = [*first, *own[1], *last]
        cls.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._find_settings()

    def _find_settings(self) -> None:
        names = inspect.signature(self.op).parameters
        self._settings = tuple(name for name in names if hasattr(self, name))

    def forward(self, *inputs: Any) -> Any:
        """Returns ``op`` of the inputs."""
        return type(self).op(*inputs, **{name: getattr(self, name) for name in self._settings})


class Activation(Scaled):
    """A `Scaled` with ``mult`` and ``constraint`` before torch's arguments, as `uu.GELU`."""

    def __init__(
        self,
        mult: float = 1.0,
        constraint: str | None = "to_output_scale",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.mult = mult
        self.constraint = checked_constraint(constraint)
        self._find_settings()


class Constrained(Scaled):
    """A `Scaled` with the keyword ``constraint`` after torch's arguments."""

    def __init__(
        self, *args: Any, constraint: str | None = "to_output_scale", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.constraint = checked_constraint(constraint)
        self._find_settings()
