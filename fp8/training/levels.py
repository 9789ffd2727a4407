"""`initialize`: sets a model and its optimizer to one of MS-AMP's levels, in place.

The levels are those of FP8-LM (arXiv:2310.18313, section 2) and of its library MS-AMP 0.4: the
formats of the tensors of each covered weight. Scales are powers of two.
"""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer

from ..casts.scaled_tensor import ScaledTensor
from ..common.dtensor import is_dtensor
from ..common.libraries import explains_arguments
from ..common.ranks import is_started
from ..common.report import CHANGES, LEFT_ALONE, Change, Row, note
from ..common.validation import check_module, check_name
from ..formats.format import dtype_name
from ..layers.convert import check_ready, convert
from ..layers.select import LAYERS, check_values_set, why_quantized
from ..optim import Adam, AdamW
from ..optim.adam import LowPrecision, check_group
from ..optim.encodings import WIDE
from ..optim.state import Group
from ..optim.state import convert as convert_state
from ..recipes.policy import Policy
from ..recipes.recipe import AUTO, Recipe
from .stored_weights import SHARDED, scale_weights, storable

M = TypeVar("M", bound=nn.Module)
Opt = TypeVar("Opt", bound=Optimizer)


@dataclass(frozen=True, kw_only=True)
class Level:
    """A row of LEVELS: the formats of the tensors of a weight. None: the tensor does not exist."""

    name: str
    weight: str
    master: str | None = None
    """The format of the copy that the optimizer updates, if the weight itself is too coarse."""
    grad: str = "e4m3"
    first_moment: str
    second_moment: str

    @property
    def formats(self) -> dict[str, str | None]:
        """The arguments for the optimizers of `fp8.optim`."""
        moments = {
            "first_moment": self.first_moment,
            "second_moment": self.second_moment,
        }
        return moments | {"master_weights": self.master}


LEVELS: dict[str, Level] = {
    level.name: level
    for level in (
        Level(
            name="O1", weight="fp16", first_moment="float32", second_moment="float32"
        ),
        Level(name="O2", weight="fp16", first_moment="e4m3", second_moment="float16"),
        Level(
            name="O3",
            weight="e4m3",
            master="float16",
            first_moment="e4m3",
            second_moment="float16",
        ),
    )
}
"""Name -> formats of a level."""

Choice = str | Recipe | Policy | None


@overload
def initialize(
    model: M, optimizer: None = None, opt_level: str = "O2", recipe: Choice = AUTO
) -> tuple[M, AdamW]: ...
@overload
def initialize(
    model: M, optimizer: Opt, opt_level: str = "O2", recipe: Choice = AUTO
) -> tuple[M, Opt]: ...
@explains_arguments
def initialize(
    model: M,
    optimizer: Optimizer | None = None,
    opt_level: str = "O2",
    recipe: Choice = AUTO,
) -> tuple[M, Optimizer]:
    """Sets ``model`` and ``optimizer`` to a level in place; equivalent to MS-AMP's function.

    The weights of linear layers and convolutions that the optimizer trains become ScaledTensors,
    and so do their gradients. Names, ties, hooks, tags, gradients, parameter groups, schedulers and
    existing states stay. The weights are new objects: whatever else refers to the old ones (a list
    of parameters, averaged weights) must be updated. `fp8.report` names the level, and the float64
    and complex parameters, which stay as they are and are stepped as `torch.optim` does.

    Wrap the model in DistributedDataParallel and compile it afterwards. At O3, weights are rounded
    in the first step of the optimizer and not before it.

    Args:
        model: changed in place.
        optimizer: `torch.optim.Adam` or `AdamW`, or one of `unit_scaling.optim` or `fp8.optim`. It
            becomes an instance of the class of `fp8.optim` with the same arithmetic, which computes
            in float32, and skips and counts (``skipped_steps``) steps with a gradient that is not
            finite. None: an `fp8.optim.AdamW` with defaults.
        opt_level: a name in `LEVELS`.
        recipe: the recipe of the products, or a `fp8.Policy`, for `fp8.convert`, which documents
            "auto". None leaves the products unchanged.

    Returns:
        (``model``, optimizer).

    Raises:
        ValueError: for an unknown level or recipe; for a model that has a level, is wrapped or is
            on the meta device; for an optimizer of other parameters or with an unsupported option.
        TypeError: for another optimizer, and for one of parameters that it cannot step. If an error
            is raised, nothing has changed.

    >>> import torch, fp8
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model, optimizer = fp8.initialize(model, optimizer, opt_level="O3")
    >>> model[0].weight.format, model[0].bias.dtype
    ('e4m3', torch.float32)
    """
    check_name("opt_level", opt_level, LEVELS)
    level = LEVELS[opt_level]
    _check_model(model)
    made = optimizer is None
    if optimizer is None:
        optimizer = AdamW(model.parameters())
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"initialize needs a torch optimizer, got {type(optimizer).__name__}"
        )
    trained = _trained(model, optimizer)
    layers = [
        m for m in model.modules() if isinstance(m, LAYERS) and not why_quantized(m)
    ]
    weights = [p for layer in layers for p in storable(layer) if p in trained]
    kind, defaults = _settings_of(optimizer, level.formats)
    if recipe is not None:
        convert(model, recipe)  # raises before anything changes
    replaced = scale_weights(model, weights, level.weight, level.grad)
    _take_over(optimizer, kind, defaults, level.formats, replaced)
    note(model, _note(level, optimizer, len(replaced), made))
    vars(model)[_LEVEL] = level.name
    return model, optimizer


_LEVEL = "fp8_level"
"""The attribute of a model that has a level: its name."""


def _rows_of_wide(model: nn.Module) -> list[Row]:
    """A row for each trained parameter of a dtype that no level stores."""
    if _LEVEL not in vars(model):
        return []
    return [
        Row(name, "Parameter", LEFT_ALONE, _WIDE.format(dtype_name(p.dtype)))
        for name, p in model.named_parameters()
        if p.requires_grad and p.dtype in WIDE
    ]


_WIDE = (
    "{0}: no level stores it; it is stepped as by torch.optim, with its state in {0}"
)

CHANGES.append(Change(_rows_of_wide, lambda model: None))


def _note(level: Level, optimizer: Optimizer, count: int, made: bool) -> str:
    trained = sum(len(group["params"]) for group in optimizer.param_groups)
    maker = f", made here with lr={optimizer.defaults['lr']}" if made else ""
    return (
        f"level {level.name}: {count} weights of linear layers and convolutions in {level.weight}, "
        f"of {trained} parameters that {type(optimizer).__name__} trains{maker}"
    )


_FIRST = "initialize the model that it wraps, then wrap it"

#: Class name of a wrapper, whose library may not be installed -> what to do instead.
_WRAPPERS = {
    "DistributedDataParallel": _FIRST,
    "DataParallel": _FIRST,
    "OptimizedModule": "initialize the model, then compile it",
    "FSDPModule": SHARDED,
    "FullyShardedDataParallel": f"use torch's fully_shard (FSDP2); {SHARDED}",
    "DeepSpeedEngine": f"use torch's fully_shard (FSDP2) in the place of ZeRO; {SHARDED}",
}


def _check_model(model: nn.Module) -> None:
    check_module("initialize", model)
    check_ready(model)
    check_values_set("initialize", model)
    for name, module in model.named_modules():
        for kind in (cls.__name__ for cls in type(module).__mro__):
            if kind in _WRAPPERS:
                where = f" ({name})" if name else ""
                raise ValueError(f"a {kind}{where} has no level: {_WRAPPERS[kind]}")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, ScaledTensor):
            raise ValueError(f"the model has a level already: {name} is a ScaledTensor")
        if is_dtensor(parameter):
            raise ValueError(
                f"{name} has no level, because processes divide it: step it with fp8.optim.AdamW, "
                "which keeps states in FP8"
            )
        if parameter.is_meta:
            raise ValueError(
                f"{name} is on the meta device: give the model memory and weights, and then a "
                "level and an optimizer, which would go on to hold what is there now"
            )
    if is_started():
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if any(map(_in_use, trained.values())):
            gc.collect()  # a discarded wrapper may not be collected yet
        if held := [name for name, p in trained.items() if _in_use(p)]:
            raise ValueError(
                f"the gradient of the present {held[0]} is still in use: a "
                f"DistributedDataParallel goes on to average it ({_FIRST}), or the result of "
                "an earlier forward pass is kept (delete it)"
            )


def _in_use(parameter: Tensor) -> bool:
    """Whether a wrapper or the graph of a forward pass holds the node that accumulates the
    gradient."""

    def marks() -> Any:  # torch declares this property as a method
        return get_gradient_edge(parameter).node.metadata

    # A node that nothing holds is made anew, without the mark.
    marks()["fp8.levels"] = True
    return "fp8.levels" in marks()


def _trained(model: nn.Module, optimizer: Optimizer) -> set[Tensor]:
    """The parameters of the optimizer. Raises ValueError for one that is not the model's."""
    parameters, trained = set(model.parameters()), set()
    for i, group in enumerate(optimizer.param_groups):
        trained.update(group["params"])
        for foreign in set(group["params"]) - parameters:
            raise ValueError(
                f"the optimizer's group {i} has a parameter of shape {tuple(foreign.shape)} that "
                "is not the model's: make the optimizer from this model's parameters"
            )
    return trained


TORCH = (torch.optim.Adam, torch.optim.AdamW)
"""The supported classes of torch."""

REMOVED = (
    "foreach fused capturable differentiable amsgrad decoupled_weight_decay".split()
)
"""Options of torch's classes that are removed from the groups."""


def _kind_of(optimizer: Optimizer) -> type[LowPrecision]:
    """The class of `fp8.optim` with the arithmetic of ``optimizer``. Raises if there is none."""
    cls = type(optimizer)
    if issubclass(cls, LowPrecision):
        return cls
    if not any(_step_of(cls) is _step_of(kind) for kind in TORCH):
        raise TypeError(
            f"{cls.__name__} is not supported: initialize takes Adam and AdamW of torch.optim, "
            "unit_scaling.optim and fp8.optim"
        )
    derived = [vars(c) for c in cls.__mro__ if issubclass(c, TORCH) and c not in TORCH]
    methods = [
        name for names in derived for name, x in names.items() if inspect.isroutine(x)
    ]
    if lost := [name for name in methods if name not in ("__init__", "step")]:
        raise TypeError(
            f"{cls.__name__} has methods that would be lost: {', '.join(lost)}"
        )
    for name in ("amsgrad", "differentiable"):
        if any(group.get(name) for group in optimizer.param_groups):
            raise ValueError(f"{name}=True is not supported by fp8.initialize")
    decoupled = {
        bool(group.get("decoupled_weight_decay")) for group in optimizer.param_groups
    }
    if len(decoupled) > 1:
        raise ValueError("the groups of the optimizer differ in decoupled_weight_decay")
    if decoupled == {True}:
        return AdamW
    return Adam


def _step_of(cls: type[Optimizer]) -> Callable[..., object]:
    """The step that updates parameters, behind the steps of mixins, which call the next class's."""
    steps = [inspect.unwrap(vars(c)["step"]) for c in cls.__mro__ if "step" in vars(c)]
    return next(step for step in steps if not hasattr(step, "calls_the_next"))


def _class_for(cls: type[Optimizer], kind: type[LowPrecision]) -> type[Optimizer]:
    """``kind`` with the mixins of ``cls`` (the learning-rate rules of unit_scaling.optim)."""
    if issubclass(cls, kind):
        return cls
    classes = [
        c for c in cls.__mro__ if issubclass(c, Optimizer) and c is not Optimizer
    ]
    mixed_in = tuple(c for c in classes if not issubclass(c, TORCH))
    if mixed_in:
        return _mixed(cls.__name__, (*mixed_in, kind))
    return kind


@functools.cache
def _mixed(name: str, bases: tuple[type, ...]) -> Any:
    def reduce(self: Optimizer) -> tuple[object, ...]:
        return _blank, (name, bases), self.__getstate__()

    return type(name, bases, {"__doc__": bases[-1].__doc__, "__reduce__": reduce})


def _blank(name: str, bases: tuple[type, ...]) -> object:
    return object.__new__(_mixed(name, bases))


def _settings_of(
    optimizer: Optimizer, formats: Mapping[str, str | None]
) -> tuple[type[LowPrecision], Group]:
    """The class of `fp8.optim` and its defaults. Raises as `initialize`."""
    kind = _kind_of(optimizer)
    defaults = kind([torch.zeros(1, 1)], lr=0.0).defaults
    for name in defaults.keys() & optimizer.defaults.keys():
        defaults[name] = optimizer.defaults[name]
    for group in optimizer.param_groups:
        check_group({**defaults, **group, **formats})
    return kind, defaults


def _take_over(
    optimizer: Optimizer,
    kind: type[LowPrecision],
    defaults: Group,
    formats: Mapping[str, str | None],
    replaced: Mapping[nn.Parameter, nn.Parameter],
) -> None:
    """Converts ``optimizer``, which keeps its groups, hooks and states. replaced: parameter -> the
    one that takes its place."""
    optimizer.defaults = {**defaults, **formats}
    step = vars(optimizer).pop("step", None)
    optimizer.__class__ = _class_for(type(optimizer), kind)
    optimizer.__setstate__({})  # torch adds the calls of hooks to the new class's step
    if step is not None:
        vars(optimizer)["step"] = _scheduled(optimizer, step)
    state = dict(optimizer.state)
    optimizer.state.clear()
    for group in optimizer.param_groups:
        old = group["params"]
        group["params"] = [replaced.get(p, p) for p in old]
        for name in REMOVED:
            group.pop(name, None)
        group.update({**defaults, **group, **formats})
        for before, parameter in zip(old, group["params"], strict=True):
            if state.get(before):
                optimizer.state[parameter] = convert_state(
                    parameter, state[before], group
                )


def _scheduled(optimizer: Any, old: object) -> Callable[..., object]:
    """A ``step`` as a scheduler has wrapped it, which warns of calls in the wrong order."""

    def step(*args: object, **kwargs: object) -> object:
        optimizer._opt_called = True
        return type(optimizer).step(optimizer, *args, **kwargs)

    vars(step).update(vars(old))
    return step
