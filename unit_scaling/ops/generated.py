"""Generated ops: names, docstrings and signatures, and the row of a function of one tensor."""

from __future__ import annotations

import operator as operators
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints

import torch
from torch import Tensor
from torch.nn import functional

from ..common.calls import Args, Fn, Function, Kwargs
from ..common.constant import specialised
from ..rules.table import Scales, row
from ..scale import scale_output, written_to

#: Stands for the default of an argument without a default.
REQUIRED: Any = Parameter.empty

#: The arguments of every op with a constraint, after torch's.
CONSTRAINT = {"constraint": "to_output_scale"}


def described(
    function: Fn,
    name: str,
    documentation: str | None,
    arguments: Kwargs,
    *of_types: Function,
) -> Fn:
    """Returns ``function`` with this name, docstring and signature.

    arguments: name -> default or `REQUIRED`, in order. of_types: functions whose annotations it
    has, the last first.
    """
    function.__name__ = function.__qualname__ = name
    function.__doc__ = documentation
    hints = {
        key: hint for other in of_types for key, hint in get_type_hints(other).items()
    }
    function.__annotations__ = {key: hints[key] for key in arguments if key in hints}
    kind = Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        Parameter(
            key, kind, default=default, annotation=hints.get(key, Parameter.empty)
        )
        for key, default in arguments.items()
    ]
    function.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return function


def defaults_of(function: Function) -> Kwargs:
    """Name -> default or `REQUIRED` of each argument, for `described`."""
    return {p.name: p.default for p in signature(function).parameters.values()}


def by_name(name: str, names: Sequence[str], args: Args, named: Kwargs) -> Kwargs:
    """The arguments of a call, after an input, by name, without their defaults."""
    if len(args) > len(names):
        raise TypeError(f"{name} takes {len(names) + 1} arguments by position")
    return {**dict(zip(names, args, strict=False)), **named}


def spellings(*names: str, operator: str = "") -> list[Function]:
    """Every torch function of these names, in place (with _) or not, and Python's operators."""
    spaces = (functional, torch, Tensor, torch.special)
    spelled = [
        (space, name + mark) for mark in ("", "_") for name in names for space in spaces
    ]
    if operator:
        spelled += [(Tensor, f"__{mark}{operator}__") for mark in ("", "i")]
        spelled += [(operators, mark + operator) for mark in ("", "i")]
    return [getattr(space, name) for space, name in spelled if hasattr(space, name)]


def unary(
    fn: Function,
    rule: Callable[..., Scales],
    about: str,
    settings: Kwargs,
    *,
    name: str = "",
    replaces: Sequence[Function] | None = None,
) -> Callable[..., Tensor]:
    """Adds the row of a torch function of one tensor, and returns the unit-scaled function.

    Its output, or the first item of that, has the factors of ``rule``, unless it is of integers.

    about: the docstring. settings: the arguments after ``input``, with their defaults or
    `REQUIRED`: those of ``fn`` and, of ours, "mult" (fn(mult * x) / mult), "constraint" and
    "inplace" (the result is written into ``input``). replaces: by default the `spellings`.
    """
    name = name or fn.__name__
    first, *others = signature(rule).parameters
    reads_input, read = first == "input", (first, *others)
    names = tuple(settings)
    defaults = {key: value for key, value in settings.items() if value is not REQUIRED}

    def op(input: Tensor, *args: Any, **named: Any) -> Any:
        mult, inplace, factors, theirs = 1.0, False, {}, {}
        if args or named:
            theirs = {**defaults, **by_name(name, names, args, named)}
            theirs = {key: specialised(value) for key, value in theirs.items()}
            factors = {key: theirs[key] for key in read if key in theirs}
            mult, inplace = theirs.pop("mult", 1.0), theirs.pop("inplace", False)
            theirs.pop("constraint", None)
        if not (input.dtype.is_floating_point or input.dtype.is_complex):
            return written_to(input if inplace else None, fn(input, **theirs))
        s = rule(input, **factors) if reads_input else rule(**factors)
        x = input.clone() if inplace and mult == 1.0 else input  # autograd may save it
        output = fn(x if mult == 1.0 else x * mult, **theirs)
        values = output[0] if isinstance(output, tuple) else output
        scaled = scale_output(values, s["output"] / mult, s["input"] / mult)
        if isinstance(output, tuple):
            return (scaled, *output[1:])
        if inplace:
            return input.copy_(scaled)
        return scaled

    described(op, name, about, {"input": REQUIRED, **settings}, op, fn, rule)
    op.__module__ = rule.__module__
    return row(rule, replaces=spellings(name) if replaces is None else replaces)(op)
