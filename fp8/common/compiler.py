"""Calling a function at the price of what it does: in eager code, and in a compiled graph.

Whatever a compiled function has read while its graph was made, from the body of a function to the
builtins that it calls, is compared at each of its calls, at some 0.3 microseconds apiece.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import TorchFunctionMode

from .threads import Stack

__all__ = [
    "FIRST_LOOK",
    "IN_GRAPH",
    "FirstLook",
    "apply",
    "apply_eagerly",
    "called",
    "in_graph",
    "is_inference_graph",
    "is_plain",
    "own",
    "taken_as_constant",
]

if TYPE_CHECKING:
    from typing_extensions import Self

Fn = TypeVar("Fn", bound=Callable[..., Any])

# Modes that must see each call before any autocast does (the plan of a unit-scaled model), in the
# order they were entered in this thread. An autocast that starts inside them puts them back on top.
FIRST_LOOK = Stack()


class FirstLook(TorchFunctionMode):
    """A mode that sees each call before any autocast does, while it is entered."""

    def __enter__(self) -> Self:
        FIRST_LOOK.items.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        FIRST_LOOK.items.pop()
        super().__exit__(*error)


#: The functions of `in_graph` by module and name, which cross into a graph where a class cannot.
IN_GRAPH: dict[str, Callable[..., Any]] = {}


def taken_as_constant(fn: Fn) -> Fn:
    """``fn``, which a compiler calls with constants while it makes a graph: in it is the result.

    A graph does not look at the result again, nor at what ``fn`` has read: this is for functions
    that depend on their arguments alone. The result is a number, a string or a tuple of such.
    `torch.compiler.assume_constant_result` leaves this mark too, and imports the compiler for it.
    """
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def in_graph(function: Fn) -> Fn:
    """Decorator for what `fp8.common.traced.apply` leaves in a graph as the one call that it is.

    function: an autograd function, or a function. That is for those that do the same whether they
    are compiled or not, and look at nothing but what every compiled call compares (autocast, the
    gradient mode) and their arguments: tensors, numbers and strings.
    """
    name = f"{function.__module__}.{function.__qualname__}"
    IN_GRAPH[name] = getattr(function, "apply", function)
    return function


def apply(function: type[Function], *args: Any, written: Tensor | None = None) -> Any:
    """``function.apply(*args)``, for a function with ``forward(*args)`` and ``setup_context``.

    That form is what torch.func and the compiler need, but its ``apply`` binds the arguments to
    the signature of ``forward`` at every call: 30 to 40 microseconds, more than a small product.
    Eager code calls an equal function in the older form ``forward(ctx, *args)``, which torch
    refuses with a RuntimeError, before anything is computed, under a torch.func transform. A
    RuntimeError of ``forward`` itself is raised a second time by the same arguments.
    written: that one of ``args`` into which ``backward`` writes.
    Where a graph is compiled that records no gradient, ``forward`` is all there is: what only
    ``backward`` needs is not looked at, so that the graph does not depend on it.
    """
    if not torch.compiler.is_compiling():
        return apply_eagerly(function, *args)
    if not torch.is_grad_enabled():
        return function.forward(*args)
    return function.apply(*[arg if arg is written else _seen(arg) for arg in args])


def apply_eagerly(function: type[Function], *args: Any) -> Any:
    """`apply` where nothing is being compiled."""
    try:
        return _without_binding(function, torch.is_grad_enabled()).apply(*args)
    except RuntimeError:
        return function.apply(*args)


def _seen(arg: Any) -> Any:
    """What the compiler knows to require a gradient, where it is what `torch.func.grad` is of.

    It takes that argument itself for one that needs none (torch 2.13), and would differentiate
    ``forward`` instead of calling ``backward``: a view of it is seen to need one.
    """
    if not isinstance(arg, Tensor) or arg.requires_grad or not arg.is_floating_point():
        return arg
    return arg.view_as(arg)


def called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` as a torch-function mode makes a call that it was asked about.

    `Tensor.unflatten` is Python, calls C++ by ``super()``, and is not compiled from within a mode.
    """
    if function is Tensor.unflatten:
        return torch.unflatten(*args, **kwargs)
    return function(*args, **kwargs)


def is_inference_graph() -> bool:
    """Whether what runs now is being compiled or exported, without a backward pass."""
    return torch.compiler.is_compiling() and not torch.is_grad_enabled()


_LOSES_GRADIENTS = torch.__version__ < "2.12"


def own(output: Tensor) -> Tensor:
    """``output``, which an autograd function's forward has changed in place, as it can be returned.

    Itself, or in a graph of torch 2.11 a copy: that version compiles such a function to one whose
    gradient is zero.
    """
    return output.clone() if _LOSES_GRADIENTS and torch.compiler.is_compiling() else output


def is_plain(ctx: Any) -> bool:
    """Whether this is the context of a call by `apply` that autograd records, neither compiled nor
    under a torch.func transform."""
    return getattr(ctx, "is_plain", False)


@cache
def _without_binding(function: type[Function], records: bool) -> type[Function]:
    def forward(ctx: Any, *args: Any) -> Any:
        ctx.is_plain = records and any(ctx.needs_input_grad)
        output = function.forward(*args)
        function.setup_context(ctx, args, output)
        return output

    methods = {"forward": forward, "backward": function.backward}
    if function.jvp is not Function.jvp:
        methods["jvp"] = function.jvp
    static = {name: staticmethod(method) for name, method in methods.items()}
    return type(function.__name__, (Function,), static)
