"""The functions that `unit_scale` replaces: a torch-function mode of the model."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from fp8.common.step import is_in_place
from fp8.torch_internals.hidden_functions import called

from ..common.calls import Args, Function, Kwargs
from .install import Scope
from .record.calls import Calls
from .record.kinds import name_of, names_of

Replacements = Mapping[Function, Function]


class Replace(Scope):
    """Runs the model with other functions in place of some."""

    order = 0
    title = "replace"

    def __init__(self, functions: Replacements) -> None:
        super().__init__()
        self.rows: list[_Replaced] = []
        for function, other in functions.items():
            names = names_of(function)
            writes = is_in_place(name_of(function), {})
            place = names.index("inplace") if "inplace" in names else -1
            row = _Replaced(function, other, writes, place, _takes_inplace(other))
            self.rows.append(row)

    def mode(self) -> _Replacing:
        return _Replacing(self.rows)


@dataclass(frozen=True)
class _Replaced:
    """A function and the one to call instead. What is known of the function is here, as
    torch.compile asks neither dictionaries nor functions for it.

    writes: whether all of its calls write into the first argument. place: the position of its
    argument ``inplace``, -1 for none. passes: whether the other function takes that.
    """

    function: Function
    other: Function
    writes: bool
    place: int
    passes: bool


class _Replacing(Calls):
    """Calls the replacement of a function; what that calls is not replaced."""

    def __init__(self, rows: list[_Replaced]) -> None:
        super().__init__()
        self._rows = rows

    def observe(self, function: Function, args: Args, kwargs: Kwargs) -> Any:
        for row in self._rows:
            if function is row.function:
                return self._replaced(row, args, kwargs)
        return called(function, args, kwargs)

    def _replaced(self, row: _Replaced, args: Args, kwargs: Kwargs) -> Any:
        given = dict(kwargs)
        at = row.place
        is_inplace = bool(given.get("inplace", False))
        if not row.passes:
            given.pop("inplace", None)
        if 0 <= at < len(args):
            is_inplace = bool(args[at])
            if not row.passes:
                args = (*args[:at], *args[at + 1 :])
        output = row.other(*args, **given)
        if not (row.writes or is_inplace):
            return output
        written = args[0] if args else given["input"]
        return written.copy_(output)


OPERATORS: dict[Function, Function] = {operator.matmul: torch.Tensor.matmul}
"""An operator -> what a mode sees of it."""

for _name in "add sub mul truediv".split():
    _method = _name.removeprefix("true")
    OPERATORS[getattr(operator, _name)] = getattr(torch.Tensor, _method)
    OPERATORS[getattr(operator, f"i{_name}")] = getattr(torch.Tensor, f"{_method}_")

UNLISTED = (F.hardsigmoid, F.hardswish)
"""Functions that a mode sees, though torch does not list them."""

SPELLED_BY_METHOD: dict[Function, Function] = {
    F.sigmoid: torch.Tensor.sigmoid,
    F.tanh: torch.Tensor.tanh,
}
"""A function that calls a method of its argument -> what a mode sees of it, but for graphs, where
it sees the function."""


def checked(replace: Replacements | None) -> dict[Function, Function]:
    """The replacements. Raises TypeError for what is not callable, and ValueError for what is not a
    function of torch."""
    if not isinstance(replace, Mapping | None):
        raise TypeError(
            f"replace: a dict of torch function -> function, got {replace!r}"
        )
    given = dict(replace or {})
    functions = {OPERATORS.get(each, each): other for each, other in given.items()}
    if not all(map(callable, functions.values())):
        raise TypeError(f"replace: a replacement must be callable, got {replace!r}")
    for function in functions:
        if not _is_seen(function):
            raise ValueError(
                f"replace: calls of {function!r} are not intercepted, as it is not a torch "
                "function that torch.overrides lists; replace the method of torch.Tensor that it "
                "calls, or call the replacement in the model itself"
            )
    for function, method in SPELLED_BY_METHOD.items():
        if method in functions:
            functions[function] = functions[method]
    return functions


def _is_seen(function: Function) -> bool:
    listed = torch.overrides.get_overridable_functions().values()
    is_listed = any(function in each for each in (UNLISTED, *listed))
    return is_listed and function not in SPELLED_BY_METHOD


def _takes_inplace(function: Function) -> bool:
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # C functions such as torch.relu have no signature
        return False
    return any(p.name == "inplace" or p.kind is p.VAR_KEYWORD for p in parameters)
