"""Call signatures: the properties of arguments that may change which calls a model makes."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fp8.common.step import tensors_within

from ...scale import has_gradient


class Form(NamedTuple):
    """The signature of a call of the module at ``path``. grads: whether gradients are taken. hooks:
    the names of its submodules with hooks that may keep tensors, if they are."""

    path: str
    training: bool
    args: Any
    kwargs: Any
    grads: bool
    hooks: tuple[str, ...] = ()


def form_of(value: Any) -> Any:
    """The signature of an argument: its structure, not its sizes."""
    if isinstance(value, Tensor):
        # Dimensions, not booleans: the compiler of torch 2.14 cannot look up symbolic ones.
        ones = tuple(dim for dim, size in enumerate(value.shape) if size == 1)
        return ("tensor", value.ndim, ones, has_gradient(value))
    if isinstance(value, list | tuple):
        return tuple(form_of(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, form_of(item)) for name, item in value.items())
    if value is None or isinstance(value, bool | str):
        return value
    wanted = tuple(t.requires_grad for t in tensors_within(value))
    return (type(value).__name__, *wanted) if any(wanted) else type(value).__name__


def without_shapes(form: Form) -> Form:
    """The signature without the dimensions of its tensors, as with gradients."""
    args, kwargs = _without_shapes(form.args), _without_shapes(form.kwargs)
    return form._replace(args=args, kwargs=kwargs, grads=True)


def _without_shapes(form: Any) -> Any:
    if isinstance(form, tuple) and form[:1] == ("tensor",):
        return ("tensor", form[-1])
    return tuple(map(_without_shapes, form)) if isinstance(form, tuple) else form


def described(tensor: Tensor) -> str:
    """A tensor argument as described in errors."""
    wanted = ", requires a gradient" if has_gradient(tensor) else ""
    return f"a tensor of shape {list(tensor.shape)}{wanted}"
