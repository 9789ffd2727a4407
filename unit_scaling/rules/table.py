"""The table of unit-scaled operations.

An op is a rule and a body. The rule reads shapes and settings and returns scale factors by name:
``"output"`` for the output, the name of an argument for its gradient. The body is the torch
operation with these factors applied. `row` adds a row to `OPS` (an example is in CONTRIBUTING.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ..common.calls import Args, Fn, Function, Kwargs
from ..common.watched import watched
from ..constraints import apply_constraint

#: Scale factors by name: "output", or the argument whose gradient is multiplied. Numbers, but for
#: attention with a mask: a 0-dim tensor.
Scales = dict[str, float]

#: A function with torch's signature that returns the keyword arguments of the unit-scaled op.
Adapter = Callable[..., Kwargs]


@dataclass(frozen=True, kw_only=True)
class Op:
    """A row: a unit-scaled operation, its rule, and the torch functions it replaces."""

    name: str
    #: The unit-scaled operation, ``unit_scaling.functional.<name>``.
    fn: Function
    #: (arguments of ``fn`` by name) -> `Scales`. Reads shapes only, and the mask of attention.
    rule: Callable[..., Scales]
    #: Every torch callable that ``fn`` replaces, the plainest first; none if torch has none.
    forms: Mapping[Function, Adapter]
    #: The arguments of ``fn``, and the arguments of ``rule``.
    takes: tuple[str, ...]
    reads: tuple[str, ...]

    @property
    def replaces(self) -> tuple[Function, ...]:
        """The keys of ``forms``."""
        return tuple(self.forms)

    def bind(
        self,
        args: Args,
        kwargs: Kwargs,
        func: Function | None = None,
    ) -> Kwargs:
        """Returns the keyword arguments of ``fn`` for a call of the torch function ``func``.

        func: one of ``replaces``, by default the first. Raises TypeError for arguments that do not
        fit, as torch does.
        """
        if kwargs.get("out") is not None:
            raise TypeError(f"unit-scaled {self.name} has no out= argument")
        named = {name: value for name, value in kwargs.items() if name != "out"}
        return self.forms[func or self.replaces[0]](*args, **named)

    def call(
        self,
        args: Args,
        kwargs: Kwargs,
        *,
        func: Function | None = None,
        **settings: object,
    ) -> Tensor:
        """Returns the unit-scaled result of the call ``func(*args, **kwargs)`` of a torch function.

        settings: further arguments of ``fn`` (``constraint=None``, ``mult=2.0``). Settings that the
        op does not have are ignored, so that one caller can set the constraint of every op.
        """
        arguments = self.bind(args, kwargs, func)
        arguments |= {n: value for n, value in settings.items() if n in self.takes}
        return self.fn(**arguments)

    def scales(
        self,
        args: Args,
        kwargs: Kwargs,
        *,
        func: Function | None = None,
        **settings: object,
    ) -> Scales:
        """Returns the factors that `call` applies, without computing the op."""
        arguments = {**self.bind(args, kwargs, func), **settings}
        return self.rule(**{n: arguments[n] for n in self.reads if n in arguments})


#: All unit-scaled operations by name.
OPS: dict[str, Op] = {}

_BY_FUNCTION: dict[Function, Op] = {}


def find_op(func: Function | None) -> Op | None:
    """Returns the row that replaces a torch function, or None."""
    return _BY_FUNCTION.get(func)  # type: ignore[arg-type]


def tie(constraint: str | None, **scales: float) -> Scales:
    """Returns the named scales ("output" first) after `apply_constraint`. The default reads no
    globals: compiled functions guard on everything they read."""
    if constraint == "to_output_scale":
        return dict.fromkeys(scales, scales["output"])
    return dict(
        zip(scales, apply_constraint(constraint, *scales.values()), strict=True)
    )


def positional(
    names: str,
    defaults: Kwargs | None = None,
    **renamed: str,
) -> Adapter:
    """Returns the adapter of a torch function.

    names: the arguments that it takes by position, separated by spaces. defaults: values that the
    op needs where the call gives none. renamed: torch's name -> the op's, or "" to leave it out.
    """
    order = names.split()

    def adapter(*args: object, **kwargs: object) -> Kwargs:
        if len(args) > len(order):
            raise TypeError(
                f"it takes {len(order)} arguments but {len(args)} were given: "
                f"{', '.join(order)}"
            )
        arguments = {**(defaults or {})}
        for name, value in {**dict(zip(order, args, strict=False)), **kwargs}.items():
            arguments[renamed.get(name, name)] = value
        arguments.pop("", None)
        return arguments

    return adapter


def row(
    rule: Callable[..., Scales],
    *,
    replaces: Sequence[Function] = (),
    adapters: Mapping[Function, Adapter] | None = None,
) -> Callable[[Fn], Fn]:
    """Adds the decorated function, `watched`, to `OPS` under its own name.

    rule: its arguments are some of the function's, with the same names and defaults. replaces:
    torch's functions with the same arguments. adapters: others.
    """

    def add(body: Fn) -> Fn:
        fn = watched(body)
        takes, reads = (tuple(inspect.signature(f).parameters) for f in (fn, rule))
        forms = dict.fromkeys(replaces, positional(" ".join(takes)))
        forms |= adapters or {}
        op = Op(
            name=fn.__name__, fn=fn, rule=rule, forms=forms, takes=takes, reads=reads
        )
        _BY_FUNCTION.update(dict.fromkeys(forms, op))
        OPS[op.name] = op
        return fn

    return add
