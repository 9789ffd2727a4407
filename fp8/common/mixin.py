"""Adds behaviours to a module in place.

The instance's class becomes a subclass whose ``forward`` runs through the added behaviour. The
module keeps its type, name, parameters, hooks, signature and identity, so an optimizer that holds
its parameters stays valid.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn


class Mixin:
    """Base class of all behaviours: a mixin placed before the module's own class in the MRO. A
    behaviour that wraps the forward defines ``around``."""

    #: The module's original class, and the behaviours added to it, in order. Set by `add_mixin`.
    _original: ClassVar[type[nn.Module]]
    _gained: ClassVar[tuple[type[Mixin], ...]]
    #: The behaviours that define ``around``.
    _active: ClassVar[tuple[type[Mixin], ...]]
    #: Instance attributes that a class's own copy method (einops layers, GraphModule) would drop.
    _attributes: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Skips the ``__init_subclass__`` of the module's class, which may need arguments or
        register subclasses."""

    def around(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Computes the module's forward. ``forward`` is the bound inner forward to call."""
        raise NotImplementedError

    def __prepare_scriptable__(self) -> nn.Module:
        """Raises TypeError. `torch.jit.script` calls this first."""
        raise TypeError(_NO_TORCHSCRIPT.format(self._original.__name__, "scripted"))

    def _slow_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raises TypeError. `torch.jit.trace`, whose graph lacks backward passes, calls this."""
        raise TypeError(_NO_TORCHSCRIPT.format(self._original.__name__, "traced"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles as the original class, which can be imported, with the behaviours to add."""
        if self._original.__reduce__ is not object.__reduce__:
            make, args, *rest = _bare(self).__reduce_ex__(protocol)
            return (_regain, (make, args, self._gained, self._kept(())), *rest)
        reduced = super().__reduce_ex__(protocol)
        kept = self._kept(reduced[2])
        return (_restore, (self._original, self._gained, kept), *reduced[2:])

    def _kept(self, state: Any) -> dict[str, Any]:
        """The attributes of ``_attributes`` that ``state`` does not contain."""
        return {n: vars(self)[n] for n in self._attributes if n in vars(self) and n not in state}


_NO_TORCHSCRIPT = (
    "a {} that was transformed or converted cannot be {}: take torch.export, or fp8.revert before"
)


def _restore(
    original: type[nn.Module], gained: tuple[type[Mixin], ...], kept: dict[str, Any]
) -> nn.Module:
    cls = _subclass(original, gained)
    module = cls.__new__(cls)
    vars(module).update(kept)
    return module


def _regain(
    make: Callable[..., Any],
    args: tuple[Any, ...],
    gained: tuple[type[Mixin], ...],
    kept: dict[str, Any],
) -> nn.Module:
    module: nn.Module = make(*args)
    vars(module).update(kept)
    _become(module, gained)
    return module


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    """For a class with its own ``__deepcopy__``: that runs, and the copy gets the behaviours."""
    bare = _bare(self)
    memo.setdefault(id(memo), []).append(bare)  # keep it alive: the memo refers to it by id
    result = bare.__deepcopy__(memo)
    vars(result).update(copy.deepcopy(self._kept(()), memo))
    _become(result, self._gained)
    return result


def _bare(module: Any) -> Any:
    """An object of the original class that shares the module's attributes. The module itself is not
    changed, because another thread may be running it."""
    bare = object.__new__(module._original)
    object.__setattr__(bare, "__dict__", vars(module))
    return bare


_SUBCLASSES: dict[tuple[Any, ...], type[nn.Module]] = {}


def _subclass(original: type[nn.Module], gained: tuple[type[Mixin], ...]) -> type[nn.Module]:
    """The subclass for a class and its behaviours; one for each combination."""
    if not gained:
        return original
    key = (original, gained)
    if key not in _SUBCLASSES:  # if two threads both make one, the first is kept
        _SUBCLASSES.setdefault(key, _make_subclass(original, gained))
    return _SUBCLASSES[key]


def _make_subclass(original: type[nn.Module], gained: tuple[type[Mixin], ...]) -> type[nn.Module]:
    base, behaviour = _subclass(original, gained[:-1]), gained[-1]

    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = base.forward  # looked up per call: it may have been replaced
        if not isinstance(self, behaviour):  # removed since; a wrapper still holds this forward
            return inner(self, *args, **kwargs)
        return behaviour.around(self, functools.partial(inner, self), args, kwargs)

    active = tuple(b for b in gained if b.around is not Mixin.around)
    names = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_original": original,
        "_gained": gained,
        "_active": active,
        **({"forward": forward} if behaviour in active else {}),
        **({"__deepcopy__": _deepcopy} if hasattr(original, "__deepcopy__") else {}),
    }
    return type(base.__name__, (*_layout(base), behaviour, base), names)


def _layout(cls: type) -> tuple[type, ...]:
    """The first base of a subclass whose objects have the layout of ``cls``: not that of
    `nn.Module` if the first base of ``cls`` is abstract or generic.
    """
    root = cls
    while (above := root.__base__) is not None and above.__dictoffset__:
        root = above
    if root.__base__ in (object, None):
        return ()
    first: Any = root.__base__
    first = first[TypeVar("T")] if issubclass(first, Generic) else first
    return (types.new_class(root.__name__, (first,)),)


def check_module(what: str, model: object) -> None:
    """Raises TypeError unless ``model`` is an nn.Module. what: the name of the calling function."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"{what} needs an nn.Module, got {type(model).__name__}")


def check_not_scripted(path: str, module: nn.Module) -> None:
    """Raises TypeError for a TorchScript module: it has no Python forward."""
    if isinstance(module, torch.jit.ScriptModule):
        name = path or type(module).__name__
        raise TypeError(f"{name!r} is a TorchScript module, which cannot be transformed")


def bare_class(module: nn.Module) -> type[nn.Module]:
    """The class of ``module`` without the behaviours added by `add_mixin`."""
    return module._original if isinstance(module, Mixin) else type(module)


def gained_attributes(module: nn.Module) -> tuple[str, ...]:
    """The names of the attributes that belong to behaviours added by `add_mixin`."""
    return module._attributes if isinstance(module, Mixin) else ()


def _become(module: nn.Module, gained: tuple[type[Mixin], ...]) -> None:
    module.__class__ = _below(type(module), _subclass(bare_class(module), gained))


def _below(cls: Any, base: type[nn.Module]) -> Any:
    """``base``, with the classes that others (parametrizations, FSDP2) derived from ours applied on
    top. Those classes are created at run time and their methods do not refer to a class."""
    if not issubclass(cls, Mixin) or "_original" in vars(cls):
        return base
    bases = tuple(_below(b, base) if issubclass(b, Mixin) else b for b in cls.__bases__)
    own = {key: value for key, value in vars(cls).items() if key not in ("__dict__", "__weakref__")}
    return type(cls)(cls.__name__, bases, own)


def add_mixin(module: nn.Module, behaviour: type[Mixin], *, inside: bool = False) -> None:
    """Adds a behaviour to ``module`` unless it has it, outside of the others or, as one that
    computes the forward itself must be, inside."""
    has = module._gained if isinstance(module, Mixin) else ()
    if behaviour not in has:
        _become(module, (behaviour, *has) if inside else (*has, behaviour))


def remove_mixin(module: nn.Module, behaviour: type[Mixin]) -> None:
    """Removes a behaviour from ``module``; does nothing if it does not have it."""
    if isinstance(module, behaviour):
        _become(module, tuple(b for b in module._gained if b is not behaviour))
