"""Names that torch has and `unit_scaling` lacks: the error says what to use, which is there."""

import inspect
import operator
import re
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp8
import unit_scaling as uu
import unit_scaling.functional as U
from tests.shared import parametrize, pickled, refuses, rms
from unit_scaling import modules
from unit_scaling.common.missing import MISSING, OTHERWISE, advice, names

SPACES = {"uu": uu, "U": U, "nn": nn, "F": F, "torch": torch, "fp8": fp8}
TABLE = {name: what for what, row in MISSING.items() for name in names(row)}

#: Helpers of torch.nn.functional that its documentation does not have.
HELPERS = {"assert_int_or_pair", "boolean_dispatch", "handle_torch_function"}
HELPERS |= {
    "has_torch_function",
    "has_torch_function_unary",
    "has_torch_function_variadic",
}
#: The last version of torch whose names the table has.
KNOWN = torch.__version__ < "2.14"


def is_module(name):
    value = getattr(nn, name, None)
    return isinstance(value, type) and issubclass(value, nn.Module)


PUBLIC_MODULES = [name for name in dir(nn) if is_module(name)]
PUBLIC_FUNCTIONS = [
    name
    for name in dir(F)
    if not name.startswith("_") and inspect.isroutine(getattr(F, name))
]


def message(space, name):
    with pytest.raises(AttributeError) as caught:
        getattr(space, name)
    assert not hasattr(space, name)
    return str(caught.value)


@parametrize(
    "space, torchs, public",
    [
        (uu, "nn", PUBLIC_MODULES),
        (modules, "nn", PUBLIC_MODULES),
        (U, "F", PUBLIC_FUNCTIONS),
    ],
)
def test_every_name_of_torch_is_there_or_says_what_to_use(space, torchs, public):
    absent = [name for name in public if not hasattr(space, name)]
    assert len(absent) > 50
    for name in absent:
        start, _, what = message(space, name).partition(": ")
        assert start == f"module {space.__name__!r} has no attribute {name!r}"
        assert what == advice(name)
        if what == OTHERWISE.format(torch=f"{torchs}.{name}"):
            assert name in HELPERS or not KNOWN, f"{name} needs a row in MISSING"


def test_what_is_advised_is_there():
    """Every name in an advice can be read."""
    for name in [*PUBLIC_MODULES, *PUBLIC_FUNCTIONS, *TABLE]:
        what = advice(name)
        assert "{" not in what
        for space, path in re.findall(
            r"\b(uu|U|nn|F|torch|fp8)\.([a-zA-Z_][\w.]*)", what
        ):
            operator.attrgetter(path)(SPACES[space])


def test_a_row_has_names_of_torch_that_are_absent():
    assert len(TABLE) == sum(len(names(row)) for row in MISSING.values())
    for name, what in TABLE.items():
        assert not hasattr(uu, name)
        assert not hasattr(U, name)
        # an older torch lacks the newest of them, and a newer one the oldest
        if torch.__version__.startswith("2.13") and not what.startswith("gone"):
            assert name in PUBLIC_MODULES or name in PUBLIC_FUNCTIONS


@parametrize(
    "space, name, what",
    [
        (uu, "Flatten", "use nn.Flatten: it only moves numbers"),
        (uu, "LazyConv2d", "use uu.Conv2d, with the size of its input"),
        (uu, "MODULES", "use uu.modules.MODULES"),
        (U, "Linear", "use uu.Linear"),
        (U, "relu_", "use U.relu with inplace=True"),
        (U, "reglu", "gone: use U.mul(x, U.relu(gate))"),
        (U, "max_pool2d_with_indices", "use U.max_pool2d with return_indices=True"),
    ],
)
def test_examples(space, name, what):
    assert (
        message(space, name)
        == f"module {space.__name__!r} has no attribute {name!r}: {what}"
    )


@parametrize("space", [uu, U, modules])
def test_other_names_keep_pythons_error(space):
    for name in "nothing __wrapped__ _pad Tensor".split():
        with pytest.raises(AttributeError) as caught:
            getattr(space, name)
        plain = ModuleType(space.__name__)
        with pytest.raises(AttributeError) as pythons:
            getattr(plain, name)
        assert str(caught.value) == str(pythons.value)
        assert (caught.value.name, caught.value.obj) == (name, space)
    for name in ("nothing", "Flatten", "pad"):
        with refuses(f"cannot import name '{name}'", ImportError):
            exec(f"from {space.__name__} import {name}")
        assert not hasattr(space, name)
        assert name not in dir(space)
        assert getattr(space, name, 3) == 3


def test_what_looks_at_modules_finds_what_it_found():
    assert dict(inspect.getmembers(U, inspect.isroutine)).keys() >= {"relu", "linear"}
    assert pickled(U.linear) is U.linear
    star = {}
    exec("from unit_scaling.functional import *", star)
    assert star.keys() - {"__builtins__"} == set(U.__all__)


def test_forms_that_are_advised_have_rms_1():
    """To 5 %: of 2 * 10^5 numbers or more."""
    left, weight, right = (
        torch.randn(4000, 64),
        torch.randn(64, 64, 64),
        torch.randn(4000, 64),
    )
    bags = uu.Embedding(1000, 64)(torch.randint(1000, (4000, 9)))
    for y in (
        U.einsum("bi,oij,bj->bo", left, weight, (right,)),
        bags.mean(1) * 9**0.5,
        U.mul(left, U.relu(right)),
    ):
        assert rms(y) == pytest.approx(1, rel=0.05)
