"""Names, arguments and choices that were removed are errors that say what to use instead."""

import importlib
from contextlib import suppress
from typing import Any

import pytest

from fp8.common.removed import INSTEAD, check_not_removed, refuses_removed


def attribute(path: str) -> Any:
    """The object at a dotted path; None if ``path`` is the name of an argument, as "recipe"."""
    module, _, name = path.rpartition(".")
    if not module:
        with suppress(ImportError):
            return importlib.import_module(path)
        return None
    with suppress(AttributeError):
        return getattr(importlib.import_module(module), name)
    return importlib.import_module(path)


CASES = [(owner, name) for owner, names in INSTEAD.items() for name in names]


@pytest.mark.parametrize(("owner", "name"), CASES)
def test_a_removed_name_is_an_error_that_says_what_to_use(owner: str, name: str):
    place = attribute(owner)
    pattern = f"no '{name}': "
    if place is None:
        with pytest.raises(ValueError, match=pattern):
            check_not_removed(owner, name, ValueError)
    elif type(place).__name__ == "module":
        with pytest.raises(AttributeError, match=pattern):
            getattr(place, name)
    else:
        with pytest.raises(TypeError, match=pattern):
            place(**{name: None})


def test_other_names_raise_as_in_python():
    @refuses_removed("fp8.optim")
    def function(size: int) -> int:
        return size

    assert function(size=3) == 3
    with pytest.raises(TypeError, match="unexpected keyword argument 'typo'"):
        function(typo=3)
    with pytest.raises(AttributeError, match="module 'fp8' has no attribute 'typo'"):
        importlib.import_module("fp8").typo  # noqa: B018
