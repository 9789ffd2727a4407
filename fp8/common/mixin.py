"""Adds mixins to a module in place: the class of the instance becomes a subclass whose ``forward``
runs through the mixin. The module keeps its type, parameters, hooks, signature and identity."""

from __future__ import annotations

import copy
import copyreg
import functools
import types
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from ..torch_internals import Arguments, Keywords, Layer, Memo, TorchFunction

Forward = TorchFunction
Args = Arguments
"""What ``around`` gets of a call: the bound forward, and its positional arguments."""


class Mixin:
    """Base class of all mixins, which precede the module's class in the MRO. A mixin that wraps the
    forward defines ``around``."""

    #: The module's original class, and the mixins added to it, in order. Set by `add_mixin`.
    _original: ClassVar[type[nn.Module]]
    _mixins: ClassVar[Mixins]
    #: The mixins that define ``around``.
    _active: ClassVar[Mixins]
    #: Instance attributes that copies have, also those that a class's own copy method makes.
    _attributes: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Skips the method of the module's class, which may need arguments or register
        subclasses."""

    def around(
        self,
        forward: Forward,
        args: Args,
        kwargs: Keywords,
    ) -> Any:
        """Computes the module's forward. ``forward`` is the bound inner forward to call."""
        raise NotImplementedError

    def __prepare_scriptable__(self) -> nn.Module:  # called by torch.jit.script
        raise TypeError(_NO_TORCHSCRIPT.format(self._original.__name__, "scripted"))

    def _slow_forward(
        self,
        *args: object,
        **kwargs: object,
    ) -> Any:  # called by torch.jit.trace
        raise TypeError(_NO_TORCHSCRIPT.format(self._original.__name__, "traced"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the original class, which can be imported, with the mixins to add."""
        if self._original.__reduce__ is not object.__reduce__:
            make, args, *state = _bare(self).__reduce_ex__(protocol)
            attributes = self._missing_from(())
        else:
            make, args = copyreg.__newobj__, (self._original,)  # type: ignore[attr-defined]
            reduced: Any = super().__reduce_ex__(protocol)
            state = reduced[2:]
            attributes = self._missing_from(state[0])
        return (_restore, (make, args, self._mixins, attributes), *state)

    def _missing_from(self, state: Any) -> Keywords:
        own = vars(self)
        names = [n for n in self._attributes if n in own and n not in state]
        return {name: own[name] for name in names}


Mixins = tuple[type[Mixin], ...]

_NO_TORCHSCRIPT = (
    "a {} that was transformed or converted cannot be {}: take torch.export, or "
    "fp8.revert before"
)


def _restore(
    make: Any,
    args: Any,
    mixins: Any,
    attributes: Keywords,
) -> nn.Module:
    module = make(*args)
    vars(module).update(attributes)
    _become(module, mixins)
    return module


def _deepcopy(self: Layer, memo: Memo) -> Any:
    bare = _bare(self)
    # The memo refers to it by id, so it has to stay alive.
    memo.setdefault(id(memo), []).append(bare)
    result = bare.__deepcopy__(memo)
    vars(result).update(copy.deepcopy(self._missing_from(()), memo))
    _become(result, self._mixins)
    return result


def _bare(module: Any) -> Any:
    """An object of the original class that shares the module's attributes; another thread may run
    the module."""
    bare = object.__new__(module._original)
    object.__setattr__(bare, "__dict__", vars(module))
    return bare


_SUBCLASSES: dict[Arguments, type[nn.Module]] = {}


def _subclass(original: type[nn.Module], mixins: Mixins) -> type[nn.Module]:
    """The subclass for a class and its mixins; one for each combination."""
    if not mixins:
        return original
    key = (original, mixins)
    if key not in _SUBCLASSES:  # if two threads both make one, the first is kept
        _SUBCLASSES.setdefault(key, _make_subclass(original, mixins))
    return _SUBCLASSES[key]


def _make_subclass(original: type[nn.Module], mixins: Mixins) -> type[nn.Module]:
    base = _subclass(original, mixins[:-1])
    mixin = mixins[-1]

    @functools.wraps(base.forward)
    def forward(
        self: Layer,
        *args: object,
        **kwargs: object,
    ) -> Any:
        inner = base.forward  # looked up per call: it may have been replaced
        # Removed since; a wrapper still holds this forward.
        if not isinstance(self, mixin):
            return inner(self, *args, **kwargs)
        return mixin.around(self, functools.partial(inner, self), args, kwargs)

    active = tuple(b for b in mixins if b.around is not Mixin.around)
    names: Keywords = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_original": original,
        "_mixins": mixins,
        "_active": active,
        "_attributes": tuple(name for m in mixins for name in m._attributes),
    }
    if mixin in active:
        names["forward"] = forward
    if hasattr(original, "__deepcopy__"):
        names["__deepcopy__"] = _deepcopy
    return type(base.__name__, (*_layout(base), mixin, base), names)


def _layout(cls: type) -> tuple[type, ...]:
    """The first base of a subclass whose objects have the layout of ``cls``, which is not the
    layout of `nn.Module` if the first base of ``cls`` is abstract or generic."""
    root = cls
    while (above := root.__base__) is not None and above.__dictoffset__:
        root = above
    if root.__base__ in (object, None):
        return ()
    first: Any = root.__base__
    if issubclass(first, Generic):
        first = first[TypeVar("T")]
    return (types.new_class(root.__name__, (first,)),)


def check_not_scripted(path: str, module: nn.Module) -> None:
    """Raises TypeError for a TorchScript module: it has no Python forward."""
    if isinstance(module, torch.jit.ScriptModule):
        name = path or type(module).__name__
        raise TypeError(
            f"{name!r} is a TorchScript module, which cannot be transformed"
        )


def bare_class(module: nn.Module) -> type[nn.Module]:
    """The class of ``module`` without the mixins added by `add_mixin`."""
    if isinstance(module, Mixin):
        return module._original
    return type(module)


#: The attributes that every module has: its parameters, buffers, submodules, hooks.
_OF_MODULES = frozenset(vars(nn.Module()))


def own_attributes(module: nn.Module) -> Keywords:
    """The attributes that the class of a module and its users have set. Attributes of every module,
    and of mixins, are left out."""
    others = _OF_MODULES
    if isinstance(module, Mixin):
        others = others.union(module._attributes)
    return {name: value for name, value in vars(module).items() if name not in others}


def _become(module: nn.Module, mixins: Mixins) -> None:
    module.__class__ = _below(type(module), _subclass(bare_class(module), mixins))


def _below(cls: Any, base: type[nn.Module]) -> Any:
    """``base`` below the classes that parametrizations and FSDP2 have derived from a subclass with
    mixins."""
    if not issubclass(cls, Mixin) or "_original" in vars(cls):
        return base
    parts = cls.__bases__
    bases = [_below(each, base) if issubclass(each, Mixin) else each for each in parts]
    namespace = dict(vars(cls))
    # Descriptors of one class, which each class gets anew.
    for name in ("__dict__", "__weakref__"):
        namespace.pop(name, None)
    return type(cls)(cls.__name__, tuple(bases), namespace)


def add_mixin(
    module: nn.Module,
    mixin: type[Mixin],
    *,
    inside: bool = False,
) -> None:
    """Adds a mixin to ``module`` unless it has it: outside of the others, or ``inside`` if it
    replaces the forward."""
    has = module._mixins if isinstance(module, Mixin) else ()
    if mixin not in has:
        _become(module, (mixin, *has) if inside else (*has, mixin))


def remove_mixin(module: nn.Module, mixin: type[Mixin]) -> None:
    """Removes a mixin from ``module``; does nothing if it does not have it."""
    if isinstance(module, mixin):
        _become(module, tuple(b for b in module._mixins if b is not mixin))
