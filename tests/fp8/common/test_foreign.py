"""Arguments of TransformerEngine and MS-AMP are errors that say what to use instead."""

from pkgutil import resolve_name

import pytest

import fp8
from fp8.common.foreign import FOREIGN

FUNCTIONS = ("fp8.autocast", "fp8.initialize", "fp8.adapters.transformer_engine.autocast")


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_argument_of_another_library_says_what_to_use(function: str):
    for name in FOREIGN:
        with pytest.raises(TypeError, match=f"{function} has no '{name}': "):
            resolve_name(function)(**{name: None})


def test_other_names_raise_as_in_python():
    with pytest.raises(TypeError, match="unexpected keyword argument 'typo'"):
        fp8.autocast(typo=3)
    with pytest.raises(AttributeError, match="module 'fp8' has no attribute 'typo'"):
        fp8.typo  # noqa: B018
