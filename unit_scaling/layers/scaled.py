"""Base classes that make modules of torch.nn call unit-scaled functions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, ClassVar

from torch import nn
from torch.overrides import TorchFunctionMode

from .. import functional
from ..common.calls import Args, Function, Kwargs
from ..common.missing import bare_name
from ..constraints import checked_constraint
from ..parameter import MupType, TaggedModule
from ..rules.table import find_op

MULT = Parameter("mult", Parameter.POSITIONAL_OR_KEYWORD, default=1.0, annotation=float)
CONSTRAINT = MULT.replace(
    name="constraint", default="to_output_scale", annotation=str | None
)
WEIGHT_MUP_TYPE = MULT.replace(
    name="weight_mup_type", default="weight", annotation=MupType
)

_VARIABLE = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)

_FUNCTIONS = {bare_name(name): vars(functional)[name] for name in functional.__all__}


class Scaled(nn.Module):
    """Makes torch's module call ``op``: ``class Dropout1d(Scaled, nn.Dropout1d)``.

    The constructor has torch's arguments and the ``mult`` and ``constraint`` of ``op``, which
    become attributes. Attributes that are named like an argument of ``op`` are passed to it.
    """

    #: The function in `unit_scaling.functional`.
    op: ClassVar[Function]
    #: Whether our arguments come before torch's.
    _leads: ClassVar[bool] = False
    #: Our arguments, of those that ``op`` has.
    _ours: ClassVar[tuple[Parameter, ...]] = (MULT, CONSTRAINT)
    #: Defaults that differ from the defaults of the base class.
    _defaults: ClassVar[Kwargs] = {}
    #: All arguments of the constructor.
    _arguments: ClassVar[Signature]

    def __init_subclass__(
        cls,
        op: Function | None = None,
        like: Sequence[Parameter] | None = None,
        **kwargs: Any,
    ) -> None:
        """Sets the signature of the class. op: by default the function of its name, for a class of
        torch. like: torch's arguments, by default the arguments of the last base class."""
        super().__init_subclass__(**kwargs)
        base: Any = cls.__bases__[-1]
        if base.__module__.startswith("torch."):
            name = bare_name(cls.__name__)
            op = op or _FUNCTIONS.get(name, _FUNCTIONS.get(name[:-2]))
        if op is None:
            if "__init__" in vars(cls):
                _, *parameters = signature(cls.__init__).parameters.values()
                cls.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
            return
        cls.op = staticmethod(op)
        cls.__doc__ = (
            cls.__doc__ or f"`unit_scaling.functional.{op.__name__}` as a module."
        )
        known = signature(op).parameters
        ours = [p for p in cls._ours if p.name in known or p is WEIGHT_MUP_TYPE]
        cls._ours = tuple(ours)
        names = [p.name for p in ours]
        theirs = [
            p
            for p in like or signature(base).parameters.values()
            if p.kind not in _VARIABLE and p.name not in names
        ]
        both = ours + theirs if cls._leads else theirs + ours
        cls._arguments = Signature(
            [p.replace(default=cls._defaults.get(p.name, p.default)) for p in both]
        )
        cls.__signature__ = cls._arguments  # type: ignore[attr-defined]
        if cls.forward in (Scaled.forward, Weighted.substituted):
            cls.forward = _with_signature(base.forward, cls.forward)  # type: ignore[method-assign]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = self._arguments.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        ours = {p.name: arguments.pop(p.name) for p in self._ours}
        checked_constraint(ours.get("constraint"))
        super().__init__(**arguments)
        vars(self).update(ours)
        self._places = tuple(signature(self.op).parameters)
        self._settings = tuple(name for name in self._places if hasattr(self, name))

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Returns ``op`` of the inputs; settings that follow them are given by position."""
        arguments = {**{name: getattr(self, name) for name in self._settings}, **named}
        args = [*inputs]
        for name in self._places[len(inputs) :]:
            if name not in arguments:
                break
            args.append(arguments.pop(name))
        return type(self).op(*args, **arguments)


def _with_signature(theirs: Function, ours: Function) -> Function:
    @wraps(theirs)
    def forward(self: Scaled, *inputs: object, **named: object) -> object:
        return ours(self, *inputs, **named)

    return forward


class _Substitute(TorchFunctionMode):
    """Calls a row of OPS, with these settings, in place of a torch function that it replaces.

    file: the module of the row: other calls of torch are not scaled.
    """

    def __init__(self, file: str, settings: Kwargs) -> None:
        super().__init__()
        self.file, self.settings = file, settings

    def __torch_function__(
        self,
        func: Function,
        types: object,
        args: Args = (),
        kwargs: Kwargs | None = None,
    ) -> object:
        op, kwargs = find_op(func), kwargs or {}
        if op is None or op.fn.__module__ != self.file:
            return func(*args, **kwargs)
        return op.call(args, kwargs, func=func, **self.settings)


class Activation(Scaled):
    """A `Scaled` with ``mult`` and ``constraint`` before torch's arguments, as `uu.GELU`."""

    _leads = True


class Weighted(Scaled, TaggedModule):
    """A `Scaled` with tagged parameters, initialised as in torch."""

    #: The tag of the parameters that are no biases.
    weight_mup_type: MupType = "norm"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.tag_parameters(self.weight_mup_type)

    def substituted(self, *inputs: Any, **named: Any) -> Any:
        """Returns ``forward`` of torch's module, which calls ops in place of torch's functions.

        For modules whose ``forward`` does more than call one function.
        """
        ours = {p.name: getattr(self, p.name) for p in self._ours}
        with _Substitute(type(self).op.__module__, ours):
            return super(TaggedModule, self).forward(*inputs, **named)

    def reset_parameters(self) -> None:
        """Initialises the parameters, and running statistics, as torch does."""
        super().reset_parameters()  # type: ignore[misc]
        self.restore_tags()


class Normal(Weighted):
    """A `Weighted` whose weights are initialised with a standard normal and biases with zero."""

    weight_mup_type = "weight"

    def reset_parameters(self) -> None:
        """Initialises weights with a standard normal and biases with zero."""
        for p in self.parameters(recurse=False):
            nn.init.normal_(p) if p.dim() > 1 else nn.init.zeros_(p)
        self.restore_tags()


class Product(Normal):
    """A `Normal`, by default without a bias; ``constraint`` and ``weight_mup_type`` come last."""

    _ours = (CONSTRAINT, WEIGHT_MUP_TYPE)
    _defaults: ClassVar = {"bias": False}
