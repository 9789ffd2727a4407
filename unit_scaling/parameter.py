"""Tagged parameters: plain attributes that say what a parameter is for.

    mup_type: "weight" (a hidden or input matrix), "bias", "norm" (a vector) or "output" (the
        readout matrix)
    mup_scaling_depth: the number of layers in the parameter's residual stack, or None
    mup_scale: the size that `unit_scale` leaves in a parameter's values, for a weight that keeps
        them the power of two next to its RMS; otherwise 1. Learning rates are in proportion to it
    mup_divisor: the RMS that a weight had before `unit_scale` set it, otherwise None
    mup_stacked: whether the first dimension counts parameters of one shape (the weights of several
        experts), so that a learning rate depends on the others alone
    mup_fan_in: the number of terms that a product with the weight sums, where that is not the
        number of elements of a row (``x @ w``, einsum, transposed convolutions); otherwise None
    mup_matrix: whether other products than convolutions read a weight of more than two dimensions,
        so that it is no kernel
    mup_pending: whether the first call of the model of `unit_scale` decides on mup_scale

Learning rates depend on all. Tags survive `copy.deepcopy`, `pickle` and `torch.save`, but not the
replacement of a parameter (``load_state_dict(assign=True)``, ``to_empty`` of a model on the meta
device, FSDP2, a parametrization). A `TaggedModule`, such as every module of unit_scaling, restores
them; `restore_tags` does so for a model of `unit_scale`, and for others after `remember_tags`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeGuard, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.weak import TensorWeakRef

from fp8.common.validation import check_module, check_name, check_whole

from .checks.first_call import check_weights_at_first_call, skip_weight_check
from .checks.optimizers import check_optimizers
from .common.calls import Args, Function, Kwargs
from .rules.rates import MupType, ParameterData

__all__ = [
    "MupType",
    "Parameter",
    "ParameterData",
    "TaggedModule",
    "Tags",
    "has_parameter_data",
    "remember_tags",
    "restore_tags",
    "set_depth",
    "tag",
    "tags_of",
]


class Tags(NamedTuple):
    """The tags of a parameter, in the order of the arguments of `tag`."""

    mup_type: MupType
    mup_scaling_depth: int | None = None
    mup_scale: float = 1.0
    mup_divisor: float | None = None
    mup_stacked: bool = False
    mup_fan_in: int | None = None
    mup_pending: bool = False
    mup_matrix: bool = False


def Parameter(
    data: Tensor,
    mup_type: MupType,
    mup_scaling_depth: int | None = None,
    requires_grad: bool = True,
    mup_stacked: bool = False,
) -> nn.Parameter:
    """Returns a `torch.nn.Parameter` with the tags that `unit_scaling.optim` reads; see `tag`.

    data: the values; a weight should have RMS 1. mup_stacked: for the weights (experts, ., .) of
    `U.grouped_mm`.

    >>> p = Parameter(torch.randn(4, 8), mup_type="weight")
    >>> p.mup_type, p.mup_scaling_depth
    ('weight', None)
    """
    parameter = nn.Parameter(data, requires_grad)
    return tag(parameter, mup_type, mup_scaling_depth, mup_stacked=mup_stacked)


def tag(
    parameter: nn.Parameter,
    mup_type: MupType,
    mup_scaling_depth: int | None = None,
    **others: Any,
) -> nn.Parameter:
    """Tags ``parameter`` in place and returns it; the module's docstring lists the tags.

    others: mup_scale, mup_divisor, mup_stacked, mup_fan_in, mup_matrix and mup_pending; by default
    those that the parameter has.

    Raises:
        TypeError: ``parameter`` is not a tensor, or ``mup_scaling_depth`` not an int or None.
        ValueError: any other value, or the name of a tag, is invalid.
    """
    if not isinstance(parameter, Tensor):
        raise TypeError(
            f"tag: a parameter must be a Tensor, got {type(parameter).__name__}"
        )
    others |= {"mup_type": mup_type, "mup_scaling_depth": mup_scaling_depth}
    set_tags(parameter, tags_of(parameter)._replace(**others))
    return parameter


def tags_of(parameter: Tensor | ParameterData) -> Tags:
    """The tags of a parameter; missing ones have the values of a weight."""
    tags = Tags("weight")
    known: Kwargs = {
        name: getattr(parameter, name, old) for name, old in tags._asdict().items()
    }
    return tags._replace(**known)


def set_tags(parameter: nn.Parameter, tags: Tags) -> None:
    """Sets all tags of a parameter. Raises as `tag`."""
    check_name("mup_type", tags.mup_type, get_args(MupType))
    if tags.mup_scaling_depth is not None:
        check_whole("mup_scaling_depth", tags.mup_scaling_depth)
    if not (0 < tags.mup_scale < math.inf):
        raise ValueError(f"mup_scale must be positive and finite: got {tags.mup_scale}")
    check_optimizers()
    vars(parameter).update(tags._asdict())
    if type(parameter) is nn.Parameter:
        # torch copies and pickles a plain Parameter without its attributes. These methods replace
        # its own on this instance. The reference is weak, so that they keep nothing alive.
        self = TensorWeakRef(parameter)
        for name, method in _METHODS.items():
            setattr(parameter, name, partial(method, self))


def retag(parameter: nn.Parameter, tags: Tags) -> None:
    """Sets all tags of a parameter of a module of torch. Its copies have none if torch is set to
    swap parameters: it cannot swap a tensor that has a weak reference."""
    set_tags(parameter, tags)
    if torch.__future__.get_swap_module_params_on_conversion():
        _remove(parameter, _METHODS)


def _remove(parameter: nn.Parameter, names: Iterable[str]) -> None:
    for name in names:
        vars(parameter).pop(name, None)


def has_parameter_data(parameter: nn.Parameter) -> TypeGuard[ParameterData]:  # type: ignore[type-var, unused-ignore]
    """Returns whether the parameter is tagged."""
    return hasattr(parameter, "mup_type") and hasattr(parameter, "mup_scaling_depth")


class TaggedModule(nn.Module):
    """A module whose parameters get the tags of the previous ones of their names when they are
    assigned, or recreated by a conversion."""

    #: Name of a parameter -> its tags.
    mup_tags: dict[str, Tags]

    #: Read by `fp8` for recipe "auto": whether the operands and gradients of the module's products
    #: have RMS 1.
    fp8_unit_scaled: bool = True

    def tag_parameters(self, kind: MupType) -> None:
        """Tags the module's own parameters, biases as "bias" and others as ``kind``."""
        self.mup_tags = {}
        for name, _ in self.named_parameters(recurse=False):
            self.mup_tags[name] = Tags("bias" if "bias" in name else kind)
        self.restore_tags()
        check_weights_at_first_call(self)

    def restore_tags(self) -> None:
        """Tags the module's own parameters that have lost their tags."""
        _restore(self, getattr(self, "mup_tags", {}))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        self.restore_tags()

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute."""
        # FSDP2 writes past `register_parameter` unless a class has this method of its own.
        super().__setattr__(name, value)

    # torch converts and loads a module's own parameters in these two methods. Its own modules
    # (RNNBase, BatchNorm) override them too.
    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        with _keeping_tags(self):
            return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        skip_weight_check(self)
        with _keeping_tags(self):
            super()._load_from_state_dict(*args, **kwargs)


def remember_tags(model: nn.Module, recurse: bool = True) -> None:
    """Stores the tags of all parameters of ``model`` in its modules, for `restore_tags`: for
    modules that are not of unit_scaling, before their parameters are replaced. recurse: also those
    of submodules."""
    for module in model.modules() if recurse else (model,):
        # Parameters of the whole model, too: a submodule may be replaced, as by transformers'
        # resize_token_embeddings.
        tags = _tags(module, recurse=recurse and module is model)
        if tags:
            module.mup_tags = {**getattr(module, "mup_tags", {}), **tags}  # type: ignore[assignment]


def tagged_parameters(model: nn.Module) -> list[tuple[nn.Parameter, Tags]]:
    """The parameters of ``model`` with their tags. Raises ValueError for one without."""
    for name, parameter in model.named_parameters():
        if not has_parameter_data(parameter):
            raise ValueError(
                f"parameter {name!r} has no mup_type, so its learning rate is not known: use a "
                "module of unit_scaling, or unit_scaling.Parameter"
            )
    return [(parameter, tags_of(parameter)) for parameter in model.parameters()]


def set_depth(stack: nn.Module, depth: int) -> None:
    """Sets the mup_scaling_depth of every parameter in ``stack``, and stores it in the modules.

    For stacks of residual layers that are no `DepthSequential` or `DepthModuleList`: call
    ``set_depth(model.blocks, len(model.blocks))`` after `unit_scale`, before making the optimizer.
    Raises ValueError for a depth below 1 and a parameter without mup_type.
    """
    check_module("set_depth", stack)
    for parameter, tags in tagged_parameters(stack):
        set_tags(parameter, tags._replace(mup_scaling_depth=depth))
    remember_tags(stack)


def restore_tags(model: nn.Module) -> None:
    """Tags the parameters of ``model`` that have replaced tagged ones, including parametrized ones.

    A parameter of a submodule that has replaced another gets the tags of that one.

    If a parametrization has split a weight (`torch.nn.utils.parametrizations.weight_norm`), the
    part with the weight's shape gets the weight's tags; other parts are tagged as gains ("norm").

    >>> from unit_scaling import Linear
    >>> layer = torch.nn.utils.parametrizations.weight_norm(Linear(4, 3))
    >>> restore_tags(layer)
    >>> [(p.mup_type, tuple(p.shape)) for p in layer.parameters()]
    [('norm', (3, 1)), ('weight', (3, 4))]
    """
    # From the parts up: what a part remembers counts before what the whole does.
    for module in reversed([*model.modules()]):
        tags: dict[str, Tags] = getattr(module, "mup_tags", {})
        _restore(module, tags)
        for name, before in tags.items():
            if not parametrize.is_parametrized(module, name):
                continue
            shape = getattr(module, name).shape
            owner = module.get_submodule(f"parametrizations.{name}")
            for part in owner.parameters(recurse=False):
                if not has_parameter_data(part):
                    kind = before.mup_type if part.shape == shape else "norm"
                    retag(part, before._replace(mup_type=kind, mup_divisor=None))


def _tags(module: nn.Module, recurse: bool = False) -> dict[str, Tags]:
    parameters = module.named_parameters(recurse=recurse)
    return {n: tags_of(p) for n, p in parameters if has_parameter_data(p)}


def _restore(module: nn.Module, tags: dict[str, Tags]) -> None:
    is_root = any("." in name for name in tags)
    for name, parameter in module.named_parameters(recurse=is_root):
        if name in tags and not has_parameter_data(parameter):
            set_tags(parameter, tags[name])


@contextmanager
def _keeping_tags(module: nn.Module) -> Iterator[None]:
    tags = _tags(module)
    if torch.__future__.get_swap_module_params_on_conversion():
        for parameter in module.parameters(recurse=False):
            _remove(parameter, (*Tags._fields, *_METHODS))  # see `retag`
    try:
        yield
    finally:
        _restore(module, tags)


def _deepcopy(reference: TensorWeakRef, memo: dict[int, Any]) -> nn.Parameter:
    parameter: Any = reference()
    copy: nn.Parameter = nn.Parameter.__deepcopy__(parameter, memo)
    set_tags(copy, tags_of(parameter))
    return copy


def _reduce(reference: TensorWeakRef, protocol: object) -> Args:
    p: Any = reference()
    return _rebuild, (p.data, p.requires_grad, *tags_of(p))


def _rebuild(data: Tensor, requires_grad: bool, *tags: Any) -> nn.Parameter:
    """Unpickles a tagged parameter. Hooks are not pickled, as in torch."""
    parameter = nn.Parameter(data, requires_grad)
    set_tags(parameter, Tags(*tags))
    return parameter


#: Methods of a tagged parameter; the first argument is a weak reference to it.
_METHODS: dict[str, Function] = {
    "__deepcopy__": _deepcopy,
    "__reduce_ex__": _reduce,
}

# Allows torch.load(weights_only=True) to read what torch.save wrote.
torch.serialization.add_safe_globals([_rebuild])
