"""Copies of models: every copy that the library makes is made here.

`copy.deepcopy` alone is wrong for three kinds of models. It returns functions as they are, so
that ``self.f = lambda x: mlp.act(x)`` calls the original's submodules. It fails for a non-leaf
tensor that a module keeps from its last call (an attention map), of which the copy here has the
values. It drops the hooks of parameters.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from inspect import getattr_static
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.optim import Optimizer

from ..torch_internals import Keywords, Memo
from .mixin import check_not_scripted, own_attributes
from .step import Loss, parameters_of, tensors_within

M = TypeVar("M", bound=nn.Module)

_CACHED = type(lru_cache(lambda: None))
_KEPT = (FunctionType, MethodType, partial, _CACHED, weakref.ref, tuple)
"""What deepcopy returns as it is, or with the functions that it has."""

FORWARD_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
HOOKS = (
    *FORWARD_HOOKS,
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_backward_hooks",
    "_backward_pre_hooks",
)
"""The attributes of a module that hold hooks."""


def deep_copy(
    module: M,
    memo: Memo | None = None,
    parameter_hooks: bool = False,
) -> M:
    """Returns a deep copy of ``module``, whose functions refer to the parts of the copy.

    Functions are found in its attributes and in its own hooks: closures, lambdas, partials, bound
    methods and cached functions, also in lists, tuples, dicts and objects, that refer to a part of
    the model in their closure, defaults or globals.

    Args:
        module: the model.
        memo: id -> object to use instead of a copy. It maps ids to copies afterwards.
        parameter_hooks: whether parameters keep their hooks.

    Raises:
        TypeError: for a TorchScript module, an object that has no copy, and an attribute of a class
            that the forward pass reads and that holds a part of the model.
    """
    return _Copier(module, {} if memo is None else memo, parameter_hooks).module()


def sharing_copy(module: M) -> M:
    """Returns a copy that shares the parameters and has its own buffers and Python attributes."""
    return deep_copy(module, {id(p): p for p in module.parameters()})


def training_copy(
    model: M,
    optimizer: Optimizer | None,
    loss: Loss | None,
) -> tuple[M, Optimizer | None, Loss | None]:
    """Copies of what trains together. The optimizer steps the parameters of the copy; the loss, a
    module or a function that refers to the model, reads them."""
    copier = _Copier(model, {}, True, optimizer, loss)
    return copier.module(), copier.optimizer(optimizer), copier.own(loss)


class _Copier:
    """Copies a module, and the functions and objects that refer to its parts. others: an optimizer,
    whose parameters are parts too, and a loss."""

    def __init__(
        self,
        module: nn.Module,
        memo: Memo,
        parameter_hooks: bool,
        *others: object,
    ) -> None:
        for path, part in module.named_modules():
            check_not_scripted(path, part)
        self._memo = memo
        self._roots = nn.ModuleList([module])
        self._roots.extend(other for other in others if isinstance(other, nn.Module))
        modules = self._roots.modules()
        parts = {*modules, *self._roots.parameters(), *self._roots.buffers()}
        for other in others:
            if isinstance(other, Optimizer):
                parts.update(parameters_of(other))
        self._attributes = [
            (part, name, value)
            for part in self._roots.modules()
            for name, value in own_attributes(part).items()
        ]
        self._hooks = [*_own_hooks(self._roots)]
        self._parameter_hooks = []
        if parameter_hooks:
            self._parameter_hooks = [*_hooks_of_parameters(self._roots)]
        self._leading = _Leading({id(part) for part in parts})
        held = (*self._attributes, *self._hooks, *self._parameter_hooks)
        values = [value for *_, value in held]
        self._leading.add([*others, *values])
        self._refuse_registries()
        self._made: Memo = {}
        self._rebounds: set[int] = set()  # ids of what has been completed
        self._globals: dict[int, Keywords] = {}  # id of a file's globals -> the copy
        for function in self._leading.functions:
            self._declare(function)

    def _refuse_registries(self) -> None:
        """Raises TypeError for attributes of classes that lead to parts: a copy has the class of
        the original, and would run its parts."""
        for kind in {type(part): None for part in self._roots.modules()}:
            found = _read_of_class(kind)
            self._leading.add(found.values())
            for name, value in found.items():
                if self._leading.includes(value):
                    raise TypeError(
                        f"{kind.__name__}.{name} is an attribute of the class and holds a part of "
                        "the model, so that a copy would run the original's: set it in __init__, "
                        "as an attribute of the module"
                    )

    def module(self) -> Any:
        """The copy of the module."""
        for tensor in tensors_within([value for *_, value in self._attributes]):
            if tensor.grad_fn is not None and id(tensor) not in self._memo:
                self._memo[id(tensor)] = tensor.detach().clone()
        result = copy.deepcopy(self._roots, self._memo)[0]
        for part, name, value in self._attributes:
            made: Any = self._memo.get(id(part), part)
            if made is not part and name in vars(made):
                self._rebind_item(vars(made), name, value)
        self._rebind()
        for part, name, key, hook in self._hooks:
            vars(self._memo[id(part)])[name][key] = self.own(hook)
        self._register_parameter_hooks()
        self._fill()
        # A class may have copied submodules without memo, by pickling in its __getstate__
        # (generated code), and so their parameters and transforms.
        for path, original in self._roots[0].named_modules():
            owner, _, name = path.rpartition(".")
            if id(original) in self._memo:
                continue
            siblings = result.get_submodule(owner)._modules
            if name in siblings:
                siblings[name] = copy.deepcopy(original, self._memo)
        return result

    def optimizer(self, optimizer: Optimizer | None) -> Optimizer | None:
        """The copy of an optimizer, with the attributes that its class adds (an optimizer that it
        wraps), which torch leaves out of pickles and copies."""
        made = copy.deepcopy(optimizer, self._memo)
        if optimizer is None:
            return None
        for name, value in vars(optimizer).items():
            if not hasattr(made, name):
                setattr(made, name, copy.deepcopy(value, self._memo))
        return made

    def own(self, value: Any) -> Any:
        """A value for the copy: itself if it leads to no part."""
        if not self._leading.includes(value):
            return value
        if isinstance(value, FunctionType):
            return self._memo[id(value)]
        if id(value) not in self._made:
            self._made[id(value)] = self._copied(value)
        return self._made[id(value)]

    def _copied(self, value: Any) -> Any:
        if isinstance(value, partial):
            named = {name: self.own(item) for name, item in value.keywords.items()}
            return partial(self.own(value.func), *map(self.own, value.args), **named)
        if isinstance(value, MethodType):
            return MethodType(self.own(value.__func__), self.own(value.__self__))
        if isinstance(value, _CACHED):
            function = self.own(value.__wrapped__)
            return lru_cache(**value.cache_parameters())(function)
        if isinstance(value, weakref.ref):
            return weakref.ref(self.own(value()))
        if type(value) in (list, tuple):
            return type(value)(map(self.own, value))
        if type(value) is dict:
            return {self.own(key): self.own(item) for key, item in value.items()}
        try:
            made = copy.deepcopy(value, self._memo)
        except (TypeError, RuntimeError, NotImplementedError) as error:
            raise TypeError(
                f"the copy of {type(self._roots[0]).__name__} needs a copy of the "
                f"{type(value).__name__} that a function of it refers to, as that holds a part of "
                f"the model; copy.deepcopy says: {error}"
            ) from error
        self._rebind()
        return made

    def _rebind(self) -> None:
        """Completes the copies of lists, dicts and objects, from what deepcopy made of them. From
        Python 3.14 on, deepcopy returns functions as they are even if memo has a copy."""
        for value in self._leading.holders:
            made = self._memo.get(id(value), value)
            if made is value or id(value) in self._rebounds:
                continue
            self._rebounds.add(id(value))
            if type(value) is list and len(made) == len(value):
                for place, item in enumerate(value):
                    self._rebind_item(made, place, item)
            elif type(value) is dict and len(made) == len(value):
                for key, item in value.items():
                    self._rebind_item(made, key, item)
            elif not isinstance(value, FunctionType):
                own = getattr(made, "__dict__", {})
                for name, item in getattr(value, "__dict__", {}).items():
                    if name in own:
                        self._rebind_item(own, name, item)

    def _rebind_item(self, made: Any, key: Any, value: Any) -> None:
        if isinstance(value, _KEPT) and self._leading.includes(value):
            made[key] = self.own(value)

    def _declare(self, function: FunctionType) -> None:
        """Makes the copy of a function, which `_fill` completes: it may refer to itself."""
        cells = tuple(CellType() for _ in function.__closure__ or ())
        code = function.__code__
        names = function.__globals__
        if any(map(self._leading.includes, _globals(function).values())):
            names = self._globals.setdefault(id(names), dict(names))
            # torch.compile reads the globals of the module of that name instead of these, and adds
            # what the code needs to the globals of the function that it compiled.
            names.pop("__name__", None)
            code = code.replace()
        made = FunctionType(code, names, function.__name__, closure=cells)
        made.__module__ = function.__module__
        self._memo[id(function)] = made

    def _fill(self) -> None:
        """Gives the copies of functions their closures, defaults, globals and attributes."""
        for function in self._leading.functions:
            made = self._memo[id(function)]
            cells = zip(function.__closure__ or (), made.__closure__ or (), strict=True)
            for cell, mine in cells:
                mine.cell_contents = self.own(_contents(cell))
            made.__defaults__ = self.own(function.__defaults__)
            made.__kwdefaults__ = self.own(function.__kwdefaults__)
            made.__dict__.update({n: self.own(v) for n, v in vars(function).items()})
            if made.__globals__ is not function.__globals__:
                named = _globals(function)
                made.__globals__.update({n: self.own(v) for n, v in named.items()})

    def _register_parameter_hooks(self) -> None:
        for parameter, register, hook in self._parameter_hooks:
            copied = self._memo.get(id(parameter), parameter)
            if copied is not parameter:
                trained = copied.requires_grad
                copied.requires_grad_()  # torch refuses hooks of others
                getattr(copied, register)(self.own(hook))
                copied.requires_grad_(trained)


class _Leading:
    """The objects that lead to a part of a model, through the references of functions, methods,
    partials, containers and objects. parts: ids."""

    def __init__(self, parts: set[int]) -> None:
        self._parts = parts
        self._leading: set[int] = set()
        self._visited: Memo = {}  # alive, so that no id is used again
        self._holders: dict[int, list[int]] = {}

    @property
    def holders(self) -> list[Any]:
        """The objects that lead to a part."""
        return [self._visited[key] for key in self._leading]

    @property
    def functions(self) -> list[FunctionType]:
        """The functions that lead to a part."""
        return [value for value in self.holders if isinstance(value, FunctionType)]

    def includes(self, value: object) -> bool:
        """Whether a value is a part or leads to one."""
        return id(value) in self._parts or id(value) in self._leading

    def add(self, values: Iterable[object]) -> None:
        """Visits values and what they refer to."""
        todo = [*values]
        found = list[int]()
        for value in todo:
            self._visited.setdefault(id(value), value)
        while todo:
            value = todo.pop()
            for each in _references(value):
                self._holders.setdefault(id(each), []).append(id(value))
                if self.includes(each):
                    found.append(id(each))
                elif id(each) not in self._visited:
                    self._visited[id(each)] = each
                    todo.append(each)
        while found:
            for holder in self._holders.get(found.pop(), ()):
                if holder not in self._leading:
                    self._leading.add(holder)
                    found.append(holder)


def _references(value: object) -> list[object]:
    """What a value refers to that a copy may have to replace."""
    if isinstance(value, FunctionType):
        cells = [_contents(cell) for cell in value.__closure__ or ()]
        defaults = [value.__defaults__, value.__kwdefaults__]
        return [*cells, *defaults, *vars(value).values(), *_globals(value).values()]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, weakref.ref):
        return [each for each in (value(),) if isinstance(each, nn.Module | Tensor)]
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        # The length of a subclass (e3nn's Irreps) may be undefined, which list() asks for.
        return list(iter(value))
    if isinstance(value, Tensor | type | ModuleType):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _read_of_class(kind: type) -> Keywords:
    """The containers, modules and tensors among the attributes of a module's class that its forward
    names."""
    forward = getattr(kind, "forward", None)
    if not isinstance(forward, FunctionType):
        return {}
    values = {name: getattr_static(kind, name, None) for name in _names(forward)}
    kinds = (dict, list, tuple, set, nn.Module, Tensor)
    return {name: value for name, value in values.items() if isinstance(value, kinds)}


def _names(function: FunctionType) -> set[str]:
    """The names of globals and attributes in a function and its inner functions."""
    names = set[str]()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes.extend(each for each in code.co_consts if isinstance(each, CodeType))
    return names


def _globals(function: FunctionType) -> Keywords:
    """The globals that a function names, with those of its inner functions: modules, tensors,
    objects, and functions of the same file. Others belong to libraries, which know no model."""
    values = function.__globals__
    found = {}
    for name in _names(function) & values.keys():
        value = values[name]
        if getattr(value, "__globals__", values) is values:
            found[name] = value
    return found


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _own_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, str, int, object]]:
    """(module, dictionary, key, value) of the hooks that belong to the model."""
    parts = {id(part) for part in model.modules()}
    for module in model.modules():
        keys = set()
        for name in FORWARD_HOOKS:
            for key, hook in vars(module)[name].items():
                if _belongs(hook, parts):
                    keys.add(key)
        for name in HOOKS:
            for key, hook in vars(module).get(name, {}).items():
                if key in keys:
                    yield module, name, key, hook


def _hooks_of_parameters(model: nn.Module) -> Iterator[tuple[Tensor, str, object]]:
    """(parameter, the method that registers, hook)."""
    kinds = {
        "_backward_hooks": "register_hook",
        "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
    }
    for parameter in model.parameters():
        for name, register in kinds.items():
            for hook in (getattr(parameter, name, None) or {}).values():
                yield parameter, register, hook


def _belongs(hook: object, parts: set[int]) -> bool:
    """Whether a hook of the forward pass refers to a part, and may store what the forward reads
    later."""
    if isinstance(hook, MethodType):
        return id(hook.__self__) in parts
    if isinstance(hook, FunctionType):
        # Not what is in lists: those may hold results of calls.
        held = [*map(_contents, hook.__closure__ or ()), *(hook.__defaults__ or ())]
        held += (hook.__kwdefaults__ or {}).values()
        return any(id(value) in parts for value in held)
    return isinstance(hook, BasePruningMethod)
