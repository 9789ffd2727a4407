"""The table of unit-scaled operations.

An op is a rule and a body. The rule reads shapes and settings and returns scale factors by name:
``"output"`` for the output, the name of an argument for its gradient. The body is the torch
operation with these factors applied. `row` adds a row to `OPS` (an example is in CONTRIBUTING.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
    #: Every torch callable that ``fn`` replaces, the plainest first; () if torch has none.
    replaces: tuple[Function, ...]
    #: For members of ``replaces`` whose arguments differ from those of ``fn``, of products and
    #: norms: what a model calls of other ops is not scaled.
    adapters: Mapping[Function, Adapter] = field(default_factory=dict)

    @property
    def constrainable(self) -> bool:
        """Whether the op has a ``constraint`` argument."""
        return "constraint" in inspect.signature(self.fn).parameters

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
        if func is None:
            func = self.replaces[0]
        names = _SIGNATURES[self.fn]
        named = {name: value for name, value in kwargs.items() if name != "out"}
        adapter = self.adapters.get(func)
        if adapter is not None:
            arguments = adapter(*args, **named)
        elif len(args) > len(names):
            raise TypeError(
                f"{self.name} takes {len(names)} arguments but {len(args)} were given"
            )
        else:
            arguments = {**dict(zip(names, args, strict=False)), **named}
        if kwargs.get("out") is not None:
            raise TypeError(f"unit-scaled {self.name} has no out= argument")
        return arguments

    def call(
        self,
        args: Args,
        kwargs: Kwargs,
        *,
        func: Function | None = None,
        **settings: Any,
    ) -> Tensor:
        """Returns the unit-scaled result of the call ``func(*args, **kwargs)`` of a torch function.

        settings: further arguments of ``fn`` (``constraint=None``, ``mult=2.0``). Settings that the
        op does not have are ignored, so that one caller can set the constraint of every op.
        """
        names = _SIGNATURES[self.fn]
        extra = {name: value for name, value in settings.items() if name in names}
        return self.fn(**{**self.bind(args, kwargs, func), **extra})

    def scales(
        self,
        args: Args,
        kwargs: Kwargs,
        *,
        func: Function | None = None,
        **settings: Any,
    ) -> Scales:
        """Returns the factors that `call` applies, without computing the op."""
        arguments = {**self.bind(args, kwargs, func), **settings}
        read = _SIGNATURES[self.rule]
        return self.rule(
            **{name: arguments[name] for name in read if name in arguments}
        )


#: All unit-scaled operations by name.
OPS: dict[str, Op] = {}

_SIGNATURES: dict[Function, tuple[str, ...]] = {}
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
    names: str, defaults: Kwargs | None = None, **renamed: str | None
) -> Adapter:
    """Returns an adapter of a torch function that differs from the op in its arguments.

    names: those that it takes by position, separated by spaces. defaults: values that the op needs
    where the call gives none. renamed: torch's name -> that of the op, or None to leave it out.
    """
    order = names.split()

    def adapter(*args: Any, **kwargs: Any) -> Kwargs:
        if len(args) > len(order):
            raise TypeError(
                f"at most {len(order)} arguments are allowed, {len(args)} were given"
            )
        arguments = {**dict(zip(order, args, strict=False)), **kwargs}
        ours = {renamed.get(name, name): value for name, value in arguments.items()}
        return {
            **(defaults or {}),
            **{n: value for n, value in ours.items() if n is not None},
        }

    return adapter


def row(
    rule: Callable[..., Scales],
    *,
    replaces: Sequence[Function] = (),
    adapters: Mapping[Function, Adapter] | None = None,
) -> Callable[[Fn], Fn]:
    """Adds the decorated function, `watched`, to `OPS` under its own name.

    rule: its arguments are some of the function's, with the same names and defaults. replaces,
    adapters: as in `Op`; functions with an adapter may be omitted from replaces.
    """

    def add(body: Fn) -> Fn:
        fn = watched(body)
        forms = dict(adapters or {})
        functions = tuple(dict.fromkeys((*replaces, *forms)))
        op = Op(name=fn.__name__, fn=fn, rule=rule, replaces=functions, adapters=forms)
        for key in (fn, rule):
            _SIGNATURES[key] = tuple(inspect.signature(key).parameters)
        _BY_FUNCTION.update(dict.fromkeys(functions, op))
        OPS[op.name] = op
        return fn

    return add
