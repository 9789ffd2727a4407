"""Parameters that say what they are for: two plain attributes that set their learning rate.

    mup_type: "weight", "bias", "norm" or "output"
    mup_scaling_depth: the number of residual layers the parameter is one of, or None

They survive `copy.deepcopy`, `pickle`, `torch.save`, and any move of the module that holds them.
"""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any, Literal, Protocol, TypeGuard, get_args

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

__all__ = ["MupType", "Parameter", "ParameterData", "has_parameter_data", "tag"]

#: "weight": a hidden or input matrix. "bias", "norm": a vector. "output": the readout matrix.
MupType = Literal["weight", "bias", "norm", "output"]


class ParameterData(Protocol):
    """What a tagged parameter has."""

    mup_type: MupType
    mup_scaling_depth: int | None

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
    return tag(nn.Parameter(data, requires_grad), mup_type, mup_scaling_depth)


def tag(
    parameter: nn.Parameter, mup_type: MupType, mup_scaling_depth: int | None = None
) -> nn.Parameter:
    """Tags ``parameter`` in place and returns it.

    mup_type: one of `MupType`. mup_scaling_depth: 1 or more, or None outside a residual stack.
    Raises ValueError for anything else.
    """
    if mup_type not in get_args(MupType):
        allowed = ", ".join(map(repr, get_args(MupType)))
        raise ValueError(f"unknown mup_type {mup_type!r}; choose one of {allowed}")
    if mup_scaling_depth is not None and mup_scaling_depth < 1:
        raise ValueError(f"mup_scaling_depth must be 1 or more, or None: got {mup_scaling_depth}")
    # torch copies and pickles a parameter without its attributes, or with those alone. These two
    # take their place on this instance. A weak reference, so that they keep nothing alive.
    self = TensorWeakRef(parameter)
    attributes: dict[str, Any] = {
        "mup_type": mup_type,
        "mup_scaling_depth": mup_scaling_depth,
        "__deepcopy__": partial(_deepcopy, self),
        "__reduce_ex__": partial(_reduce, self),
    }
    for name, value in attributes.items():
        setattr(parameter, name, value)
    return parameter


def has_parameter_data(parameter: nn.Parameter) -> TypeGuard[ParameterData]:  # type: ignore[type-var, unused-ignore]
    """Whether the parameter carries both tags."""
    return hasattr(parameter, "mup_type") and hasattr(parameter, "mup_scaling_depth")


def _alive(reference: TensorWeakRef) -> Any:
    parameter = reference()
    assert parameter is not None, "a parameter's own method outlived it"
    return parameter


def _deepcopy(reference: TensorWeakRef, memo: dict[int, Any]) -> nn.Parameter:
    parameter = _alive(reference)
    copy: nn.Parameter = nn.Parameter.__deepcopy__(parameter, memo)
    return tag(copy, parameter.mup_type, parameter.mup_scaling_depth)


def _reduce(reference: TensorWeakRef, protocol: Any) -> tuple[Any, ...]:
    p = _alive(reference)
    return _rebuild, (p.data, p.requires_grad, OrderedDict(), p.mup_type, p.mup_scaling_depth)


def _rebuild(
    data: Tensor, requires_grad: bool, hooks: Any, mup_type: MupType, depth: int | None
) -> nn.Parameter:
    """The tagged parameter that was pickled. Hooks are not pickled, as in torch."""
    return Parameter(data, mup_type, depth, requires_grad)


# Lets torch.load(weights_only=True) read what torch.save wrote.
torch.serialization.add_safe_globals([_rebuild])
