"""Parameters that say what they are for, in plain attributes: their tags.

    mup_type: "weight", "bias", "norm" or "output"
    mup_scaling_depth: the number of residual layers the parameter is one of, or None
    mup_scale: the power of two that a weight is multiplied by after a cast to FP8 and divided by
        before, about its RMS; `unit_scale(init="preserve")` sets it, elsewhere it is 1
    mup_divisor: what `unit_scale(init="unit")` divided a weight by, None for all others

The optimizers of `unit_scaling.optim` set its learning rate by the first three.

They survive `copy.deepcopy`, `pickle` and `torch.save`. What puts other parameters in their place
(``load_state_dict(assign=True)``, ``to_empty`` of a model on the meta device, FSDP2, a
parametrization) takes the tags away. A `TaggedModule`, which every module of unit_scaling and of a
transformed model is, gives them back by itself; `remember_tags` and `restore_tags` do so for any.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol, TypeGuard, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.weak import TensorWeakRef

from fp8.common.mixin import check_module
from fp8.common.validation import check_name

from .checks.first_call import check_weights_at_first_call, skip_weight_check
from .checks.optimizers import check_optimizers

__all__ = [
    "MupType",
    "Parameter",
    "ParameterData",
    "TaggedModule",
    "Tags",
    "forget_tags",
    "has_parameter_data",
    "remember_tags",
    "restore_tags",
    "set_depth",
    "tag",
    "tags_of",
]

#: "weight": a hidden or input matrix. "bias", "norm": a vector. "output": the readout matrix.
MupType = Literal["weight", "bias", "norm", "output"]


class Tags(NamedTuple):
    """The tags of a parameter, in the order of the arguments of `tag`."""

    mup_type: MupType
    mup_scaling_depth: int | None = None
    mup_scale: float = 1.0
    mup_divisor: float | None = None


class ParameterData(Protocol):
    """What a tagged parameter has."""

    mup_type: MupType
    mup_scaling_depth: int | None
    mup_scale: float
    mup_divisor: float | None

    @property
    def shape(self) -> torch.Size: ...

    def numel(self) -> int: ...


def Parameter(
    data: Tensor,
    mup_type: MupType,
    mup_scaling_depth: int | None = None,
    requires_grad: bool = True,
) -> nn.Parameter:
    """A `torch.nn.Parameter` with the tags that the optimizers of `unit_scaling.optim` read.

    data: the values, RMS about 1 for a weight. The other arguments: see `tag`.

    >>> p = Parameter(torch.randn(4, 8), mup_type="weight")
    >>> p.mup_type, p.mup_scaling_depth
    ('weight', None)
    """
    if not isinstance(data, Tensor):
        raise TypeError(f"data must be a Tensor, not {type(data).__name__}")
    return tag(nn.Parameter(data, requires_grad), mup_type, mup_scaling_depth)


def tag(
    parameter: nn.Parameter,
    mup_type: MupType,
    mup_scaling_depth: int | None = None,
    mup_scale: float | None = None,
    mup_divisor: float | None = None,
) -> nn.Parameter:
    """Tags ``parameter`` in place and returns it.

    mup_type: one of `MupType`. mup_scaling_depth: 1 or more, or None outside a residual stack.
    mup_scale: a power of two. mup_divisor: a positive number. None leaves these two as they are.
    Raises ValueError for anything else.
    """
    check_name("mup_type", mup_type, get_args(MupType))
    check_optimizers()
    if not isinstance(parameter, Tensor):
        raise TypeError(f"tag: a parameter must be a Tensor, got {type(parameter).__name__}")
    if isinstance(mup_scaling_depth, bool) or not isinstance(mup_scaling_depth, int | None):
        raise TypeError(f"mup_scaling_depth must be an int or None, got {mup_scaling_depth!r}")
    if mup_scaling_depth is not None and mup_scaling_depth < 1:
        raise ValueError(f"mup_scaling_depth must be 1 or more, or None: got {mup_scaling_depth}")
    before = tags_of(parameter)
    scale = before.mup_scale if mup_scale is None else mup_scale
    if not (scale > 0 and math.frexp(scale)[0] == 0.5):
        raise ValueError(f"mup_scale must be a power of two: got {scale}")
    divisor = before.mup_divisor if mup_divisor is None else mup_divisor
    attributes: dict[str, Any] = Tags(mup_type, mup_scaling_depth, scale, divisor)._asdict()
    if type(parameter) is nn.Parameter:
        # torch copies and pickles it without its attributes, or with those alone. These two take
        # their place on this instance. A weak reference, so that they keep nothing alive.
        self = TensorWeakRef(parameter)
        attributes |= {
            "__deepcopy__": partial(_deepcopy, self),
            "__reduce_ex__": partial(_reduce, self),
        }
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter


def tags_of(parameter: Tensor | ParameterData) -> Tags:
    """The tags of a parameter; for what it does not have, those of a weight."""
    found = {name: getattr(parameter, name) for name in Tags._fields if hasattr(parameter, name)}
    return Tags(**{"mup_type": "weight", **found})


def _untag(parameter: nn.Parameter) -> None:
    for name in (*Tags._fields, "__deepcopy__", "__reduce_ex__"):
        parameter.__dict__.pop(name, None)


def has_parameter_data(parameter: nn.Parameter) -> TypeGuard[ParameterData]:  # type: ignore[type-var, unused-ignore]
    """Whether the parameter is tagged."""
    return hasattr(parameter, "mup_type") and hasattr(parameter, "mup_scaling_depth")


class TaggedModule(nn.Module):
    """A module whose parameters get their tags back when others take their place.

    A parameter that comes without tags is tagged as the one of that name before it: one that is
    assigned (``layer.weight = nn.Parameter(...)``, ``load_state_dict(assign=True)``, FSDP2, before
    and after it gathers), and one that a conversion makes anew (``to_empty``, or any with
    `torch.__future__.set_swap_module_params_on_conversion`).
    """

    #: Name of a parameter -> its tags.
    mup_tags: dict[str, Tags]

    #: What `fp8` asks where a recipe is "auto": whether the operands and gradients of the module's
    #: products have RMS 1.
    fp8_unit_scaled: bool = True

    def tag_parameters(self, **types: MupType) -> None:
        """Tags the parameters of these names, as far as the module has them."""
        self.mup_tags = {name: Tags(mup_type) for name, mup_type in types.items()}
        self.restore_tags()
        check_weights_at_first_call(self)

    def restore_tags(self) -> None:
        """Tags every parameter of its own that has lost its tags."""
        _restore(self, getattr(self, "mup_tags", {}))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        tags = getattr(self, "mup_tags", {})
        if param is not None and name in tags and not has_parameter_data(param):
            tag(param, *tags[name])

    def __setattr__(self, name: str, value: Any) -> None:
        """As torch's: FSDP2 assigns parameters where a module has one of its own."""
        super().__setattr__(name, value)

    # The two places where torch converts and loads a module's own parameters, to be overridden as
    # torch's own modules do (RNNBase, BatchNorm).
    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        with _keeping_tags(self):
            return super()._apply(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        skip_weight_check(self)
        with _keeping_tags(self):
            super()._load_from_state_dict(*args, **kwargs)


def remember_tags(model: nn.Module) -> None:
    """Notes the tags of all parameters of ``model`` in its modules, for `restore_tags`.

    The modules of unit_scaling do so themselves. This is for parameters in modules of others,
    before something replaces them.
    """
    for module in model.modules():
        tags = _tags(module)
        if tags:
            module.mup_tags = {**getattr(module, "mup_tags", {}), **tags}  # type: ignore[assignment]


def forget_tags(module: nn.Module) -> None:
    """Takes the tags of a module's own parameters away, unless it is a `TaggedModule`."""
    if not isinstance(module, TaggedModule):
        vars(module).pop("mup_tags", None)
        for parameter in module.parameters(recurse=False):
            _untag(parameter)


def set_depth(stack: nn.Module, depth: int) -> None:
    """Sets the mup_scaling_depth of every parameter in ``stack``, and has its modules remember it.

    For a stack of residual layers that is no `DepthSequential` or `DepthModuleList`: after
    `unit_scale`, ``set_depth(model.blocks, len(model.blocks))``, before the optimizer is made.
    depth: the number of layers, 1 or more. Raises ValueError for another one, and for a parameter
    without a mup_type, before anything is changed.
    """
    check_module("set_depth", stack)
    for name, parameter in stack.named_parameters():
        if not has_parameter_data(parameter):
            raise ValueError(f"set_depth: parameter {name!r} has no mup_type; tag it first")
    for parameter in stack.parameters():
        tag(parameter, parameter.mup_type, depth)  # type: ignore[attr-defined]
    remember_tags(stack)


def restore_tags(model: nn.Module) -> None:
    """Tags the parameters of ``model`` that have replaced tagged ones, parametrizations included.

    Where a parametrization has split a weight (`torch.nn.utils.parametrizations.weight_norm`), the
    part of the weight's shape has the weight's tag, and any other that of a gain: "norm".

    >>> from unit_scaling import Linear
    >>> layer = torch.nn.utils.parametrizations.weight_norm(Linear(4, 3))
    >>> restore_tags(layer)
    >>> [(p.mup_type, tuple(p.shape)) for p in layer.parameters()]
    [('norm', (3, 1)), ('weight', (3, 4))]
    """
    for module in model.modules():
        tags: dict[str, Tags] = getattr(module, "mup_tags", {})
        _restore(module, tags)
        for name, (mup_type, depth, scale, _) in tags.items():
            if parametrize.is_parametrized(module, name):
                shape = getattr(module, name).shape
                parts = module.get_submodule(f"parametrizations.{name}")
                for part in parts.parameters(recurse=False):
                    if not has_parameter_data(part):
                        tag(part, mup_type if part.shape == shape else "norm", depth, scale)


def _tags(module: nn.Module) -> dict[str, Tags]:
    """The tags that the module's own parameters have now."""
    own = module.named_parameters(recurse=False)
    return {n: tags_of(p) for n, p in own if has_parameter_data(p)}


def _restore(module: nn.Module, tags: dict[str, Tags]) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if name in tags and not has_parameter_data(parameter):
            tag(parameter, *tags[name])


@contextmanager
def _keeping_tags(module: nn.Module) -> Iterator[None]:
    """Gives the parameters that the module has afterwards the tags of those it has now."""
    tags = _tags(module)
    if torch.__future__.get_swap_module_params_on_conversion():
        for parameter in module.parameters(recurse=False):
            _untag(parameter)  # torch refuses to swap a tensor that has a weak reference
    try:
        yield
    finally:
        _restore(module, tags)


def _alive(reference: TensorWeakRef) -> Any:
    parameter = reference()
    assert parameter is not None, "a parameter's own method outlived it"
    return parameter


def _deepcopy(reference: TensorWeakRef, memo: dict[int, Any]) -> nn.Parameter:
    parameter = _alive(reference)
    copy: nn.Parameter = nn.Parameter.__deepcopy__(parameter, memo)
    return tag(copy, *tags_of(parameter))


def _reduce(reference: TensorWeakRef, protocol: Any) -> tuple[Any, ...]:
    p = _alive(reference)
    return _rebuild, (p.data, p.requires_grad, *tags_of(p))


def _rebuild(data: Tensor, requires_grad: bool, *tags: Any) -> nn.Parameter:
    """The tagged parameter that was pickled. Hooks are not pickled, as in torch."""
    return tag(nn.Parameter(data, requires_grad), *tags)


# Lets torch.load(weights_only=True) read what torch.save wrote.
torch.serialization.add_safe_globals([_rebuild])
