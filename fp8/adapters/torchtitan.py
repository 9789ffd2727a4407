"""torchtitan: a converter for the configurations of its models.

    spec = model_registry("8B", converters=[FP8Converter("tensor")])

torchtitan builds a model from a tree of configurations, on the meta device. The converter changes
the root of the tree alone: its ``build`` returns the model converted by `fp8.convert`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from types import ModuleType
from typing import Any

from torch import nn

from ..common.libraries import need
from ..common.validation import check_name
from ..layers.convert import convert
from ..layers.report import report
from ..layers.select import Where
from ..products.active import BACKENDS
from ..recipes.policy import Policy, as_policy
from ..recipes.recipe import AUTO, Recipe

__all__ = ["FP8Converter"]

# A dataclass of torchtitan, which may not be installed, and a class of it.
Config = Any
Kind = Any


def FP8Converter(
    recipe: str | Recipe | Policy = AUTO,
    *,
    backend: str = "auto",
    where: Where | None = None,
) -> Config:
    """A converter for ``model_registry(flavor, converters=[...])``: the model trains in FP8.

    torchtitan logs `fp8.report` of the model when it builds it.

    Args:
        recipe, backend, where: as in `fp8.convert`, without the backends of other libraries.

    Returns:
        The configuration of the converter.

    Raises:
        ValueError: for an unknown name, and for a policy with a switch, because torchtitan does not
            call `fp8.advance`.
        ImportError: if torchtitan is not installed.
    """
    check_name("backend", backend, BACKENDS)
    if as_policy(recipe).switch:
        raise ValueError(
            "torchtitan does not call fp8.advance: give a policy without a switch"
        )
    how = {"recipe": recipe, "backend": backend, "where": where}
    return _kind(_module("protocols.model").ModelConfigConverter).Config(how=how)


@functools.cache
def _kind(base: Kind) -> Kind:
    class Converter(base):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(base.Config):
            how: dict[str, Any]

        def __init__(self, config: Config) -> None:
            self.how = config.how

        def convert(self, model_config: Config) -> Config:
            """The configuration of the model, of a class that also converts what it builds."""
            names = [f.name for f in dataclasses.fields(model_config) if f.init]
            values = {name: getattr(model_config, name) for name in names}
            return _converting(type(model_config), self.how)(**values)

    return Converter


def _converting(base: Kind, how: dict[str, Any]) -> Kind:
    class Converting(base):
        def build(self, **kwargs: object) -> nn.Module:
            model = convert(base.build(self, **kwargs), **how)
            _module("tools.logging").logger.info("%s", report(model))
            return model

    Converting.__name__ = base.__name__
    Converting.__qualname__ = base.__qualname__
    return Converting


def _module(name: str) -> ModuleType:
    need("torchtitan")
    return importlib.import_module(f"torchtitan.{name}")
