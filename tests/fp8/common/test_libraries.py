"""Objects and arguments of other libraries: the error names the adapter that takes them."""

import importlib

import pytest

import fp8
from fp8.common.libraries import ARGUMENTS, LIBRARIES, TAKES
from fp8.recipes.policy import LayerRule
from tests.fp8.adapters.te_library import te  # noqa: F401
from tests.shared import filterwarnings, linears, parametrize, quietly, refuses


def of_torchao():
    with quietly():
        pytest.importorskip("torchao")
        return importlib.import_module("torchao.float8").Float8LinearConfig()


def of_a_subclass():
    kind = type(of_torchao())
    return type("Mine", (kind,), {"__module__": "mine"})()


def of_accelerate():
    pytest.importorskip("accelerate")
    return importlib.import_module("accelerate.utils").AORecipeKwargs(
        config=of_torchao()
    )


def linear():
    return linears(16, 16)


TAKERS = {
    of_torchao: r"; fp8.adapters.torchao.convert\(model, config\) takes it",
    of_a_subclass: r"; fp8.adapters.torchao.convert\(model, config\) takes it",
    of_accelerate: r"; fp8.adapters.accelerate.prepare\(accelerator, model, recipe=...\) takes it",
    object: "object$",
    dict: "dict$",
}

USES = {
    "convert": lambda recipe: fp8.convert(linear(), recipe),
    "backend": lambda recipe: fp8.convert(linear(), recipe, backend="torchao"),
    "autocast": fp8.autocast,
    "initialize": lambda recipe: fp8.initialize(linear(), None, "O2", recipe),
    "policy": fp8.Policy,
    "rule": lambda recipe: LayerRule("0", recipe),
    "switch": lambda recipe: fp8.Policy(switch=[(0.5, recipe)]),
}


@filterwarnings("ignore:.*:FutureWarning")  # Accelerate's own
@parametrize("make", TAKERS)
@parametrize("use", USES)
def test_a_recipe_object_of_a_library_names_its_adapter(use, make):
    name = type(make()).__name__
    with refuses(f"must be a name or a Recipe, not {name}", TypeError) as raised:
        USES[use](make())
    assert raised.match(TAKERS[make])


def test_so_do_those_of_transformer_engine(te):  # noqa: F811
    recipe = importlib.import_module(
        "transformer_engine.common.recipe"
    ).DelayedScaling()
    with refuses(r"fp8.adapters.transformer_engine.convert\(model, recipe", TypeError):
        fp8.convert(linear(), recipe)


def test_an_adapter_that_is_named_is_there():
    said = [
        *ARGUMENTS.values(),
        *(f"{name}.{function}" for name, function in TAKES.items()),
    ]
    for call in said:
        module, _, name = call.partition("(")[0].rpartition(".")
        assert callable(
            getattr(importlib.import_module(f"fp8.adapters.{module}"), name)
        )
    assert TAKES.keys() <= LIBRARIES.keys()


@parametrize("name", ARGUMENTS)
@parametrize("function", [fp8.convert, fp8.initialize])
def test_an_argument_of_a_library_names_its_adapter(function, name):
    called = f"fp8.{function.__name__} has no {name}=; use "
    with refuses(called + r"fp8\.adapters\.", TypeError) as raised:
        function(linear(), **{name: None})
    assert ARGUMENTS[name] in str(raised.value)


@parametrize("function", [fp8.convert, fp8.initialize])
def test_another_argument_is_refused_as_in_python(function):
    with refuses("got an unexpected keyword argument 'typo'", TypeError):
        function(linear(), typo=1)
