"""Every example in a docstring is run."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import fp8
import unit_scaling

MODULES = sorted(
    module.name
    for package in (fp8, unit_scaling)
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
)


def examples(name):
    module = importlib.import_module(name)
    globs = {**vars(module), "torch": torch}
    found = doctest.DocTestFinder().find(module, globs=globs)
    return [test for test in found if test.examples]


WITH_EXAMPLES = [name for name in MODULES if examples(name)]


def test_there_are_examples():
    assert "unit_scaling.scale" in WITH_EXAMPLES


@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples(name):
    torch.manual_seed(0)
    output = []
    runner = doctest.DocTestRunner(verbose=False)
    for test in examples(name):
        runner.run(test, out=output.append)
    assert runner.failures == 0, "".join(output)
