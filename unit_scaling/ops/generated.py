"""Generated ops: names, docstrings and signatures, and the row of a function of one tensor."""

from __future__ import annotations

import operator as operators
from collections.abc import Callable, Sequence
from inspect import Parameter, Signature, signature
from itertools import product
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

_KIND = Parameter.POSITIONAL_OR_KEYWORD

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
    hints: Kwargs = {}
    for other in of_types:
        hints.update(get_type_hints(other))
    function.__annotations__ = {key: hints[key] for key in arguments if key in hints}
    parameters = []
    for key, default in arguments.items():
        hint = hints.get(key, Parameter.empty)
        parameter = Parameter(key, _KIND, default=default, annotation=hint)
        parameters.append(parameter)
    function.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return function


def defaults_of(function: Function) -> Kwargs:
    """Name -> default or `REQUIRED` of each argument, for `described`."""
    return {p.name: p.default for p in signature(function).parameters.values()}


def by_name(
    name: str,
    names: Sequence[str],
    args: Args,
    named: Kwargs,
) -> Kwargs:
    """The arguments of a call, after an input, by name, without their defaults."""
    if len(args) > len(names):
        raise TypeError(f"{name} takes {len(names) + 1} arguments by position")
    return {**dict(zip(names, args, strict=False)), **named}


def spellings(*names: str, operator: str = "") -> list[Function]:
    """Every torch function of these names, in place (with _) or not, and Python's operators."""
    # A model may use any of them: 0.3.5 leaves torch.relu and x.softmax() unscaled, silently.
    spaces = (functional, torch, Tensor, torch.special)
    all_names = [*names, *(f"{name}_" for name in names)]
    spelled = list(product(all_names, spaces))
    if operator:
        of_tensor = [f"__{operator}__", f"__i{operator}__"]
        spelled += product(of_tensor, [Tensor])
        spelled += product([operator, f"i{operator}"], [operators])
    return [getattr(space, name) for name, space in spelled if hasattr(space, name)]


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
    `REQUIRED`: the arguments of ``fn`` and, of ours, "mult" (fn(mult * x) / mult), "constraint" and
    "inplace" (the result is written into ``input``). replaces: by default the `spellings`.
    """
    name = name or fn.__name__
    read = tuple(signature(rule).parameters)
    reads_input = "input" in read
    names = tuple(settings)
    defaults = {key: value for key, value in settings.items() if value is not REQUIRED}

    def op(input: Tensor, *args: Any, **named: Any) -> Any:
        mult = 1.0
        inplace = False
        factors = {}
        theirs = {}
        if args or named:
            theirs = {**defaults, **by_name(name, names, args, named)}
            theirs = {key: specialised(value) for key, value in theirs.items()}
            factors = {key: theirs[key] for key in read if key in theirs}
            mult = theirs.pop("mult", 1.0)
            inplace = theirs.pop("inplace", False)
            theirs.pop("constraint", None)
        if not (input.dtype.is_floating_point or input.dtype.is_complex):
            return written_to(input if inplace else None, fn(input, **theirs))
        if reads_input:
            factors["input"] = input
        s = rule(**factors)
        scales = (s["output"] / mult, s["input"] / mult)
        x = input
        if mult != 1.0:
            x = input * mult
        elif inplace:
            x = input.clone()  # autograd may save it
        output = fn(x, **theirs)
        if isinstance(output, tuple):
            values, indices = output
            return scale_output(values, *scales), indices
        output = scale_output(output, *scales)
        if inplace:
            return input.copy_(output)
        return output

    if replaces is None:
        replaces = spellings(name)
    described(op, name, about, {"input": REQUIRED, **settings}, op, fn, rule)
    op.__module__ = rule.__module__
    return row(rule, replaces=replaces)(op)
