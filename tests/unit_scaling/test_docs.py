"""Every example in a docstring is run."""

import doctest
import importlib

import pytest

MODULES = [
    "unit_scaling._functional.residuals",
    "unit_scaling._modules.containers",
    "unit_scaling.constraints",
    "unit_scaling.core.functional",
    "unit_scaling.formats",
    "unit_scaling.ops",
    "unit_scaling.optim",
    "unit_scaling.parameter",
    "unit_scaling.scale",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str):
    module = importlib.import_module(name)
    globs = {**vars(module), "torch": importlib.import_module("torch")}
    result = doctest.testmod(module, extraglobs=globs)
    assert result.attempted > 0
    assert result.failed == 0
