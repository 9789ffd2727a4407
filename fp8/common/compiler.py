"""What differs between eager code and compiled graphs. torch.compile guards every object that is
read during tracing, and rechecks it on each call, in about 0.3 microseconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .threads import GRAPH_FUNCTIONS, Stack, frames, refuse_split_graphs

Fn = TypeVar("Fn", bound=Callable[..., Any])

# Modes that must see each call before any autocast (those that record a model or replace its
# functions), in the order this thread entered them. An autocast inside puts them back on top.
FIRST_LOOK = Stack()


class FirstLook(TorchFunctionMode):
    """A torch-function mode that sees each call before any autocast while it is entered."""

    def __enter__(self) -> Any:
        if torch.compiler.is_dynamo_compiling():
            reveal()
        FIRST_LOOK.items.append(self)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        FIRST_LOOK.items.pop()
        super().__exit__(*error)


def taken_as_constant(fn: Fn) -> Fn:
    """Decorator: torch.compile stores the result for constant arguments as a constant, without
    guards. `torch.compiler.assume_constant_result` does so too, but imports the compiler."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


def compiled_as(graph: Callable[..., Any]) -> Callable[[Fn], Fn]:
    """Decorator: compiled code calls ``graph`` instead of the function."""

    def decorate(function: Fn) -> Fn:
        @wraps(function)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return graph(*args, **kwargs)
            return function(*args, **kwargs)

        return cast("Fn", chosen)

    return decorate


@compiled_as(lambda x: x.as_strided(x.shape, x.stride()))
def in_memory(x: Tensor) -> Tensor:
    """``x``. In a graph inductor computes what several kernels read once in each of them, or stores
    it once for each, unless it is stored before; `torch.as_strided` needs a stored tensor."""
    return x


def eager_only(otherwise: Any = None) -> Callable[[Fn], Fn]:
    """Decorator: compiled code skips the function, whose result is ``otherwise`` there."""
    return compiled_as(lambda *args, **kwargs: otherwise)


def untraced(function: Fn, reason: str | None = None) -> Fn:
    """Decorator: a graph breaks at the function, which runs in eager mode. `torch.compiler.disable`
    does so too, but imports the compiler when it decorates, and not at the first call. reason: what
    fullgraph=True shows."""
    made: list[Any] = []

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        if not made:
            made.append(torch.compiler.disable(function, reason=reason))
        return made[0](*args, **kwargs)

    return cast("Fn", called)


#: Functions that torch does not list as overridable: torch.compile hides them from modes, and a
#: compiled model would silently compute them without a recipe or replacement.
HIDDEN: list[Callable[..., Any]] = [F.hardsigmoid, F.hardswish, F.sigmoid, F.tanh]


@taken_as_constant
def reveal() -> bool:
    """Moves `HIDDEN` to torch's list, for the whole process; torch has no public way to extend it.
    The tracer executes it, because it is a constant."""
    if HIDDEN:
        torch.overrides.get_overridable_functions()[F].extend(HIDDEN)
        HIDDEN.clear()
        compiler = sys.modules.get("torch._dynamo.variables.torch")
        if compiler is not None:  # which has cached the list
            compiler.get_overridable_functions.cache_clear()
    return True


def in_graph(function: Fn, graph: Callable[..., Any] | None = None) -> Fn:
    """Decorator: in a graph the function, or ``graph``, is a single call by name. It may read only
    its arguments, and state that every graph guards (autocast, the gradient mode)."""
    name = f"{function.__module__}.{function.__qualname__}"
    GRAPH_FUNCTIONS[name] = graph or function

    @wraps(function)
    def called_by_name(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            from .traced import apply  # imports the compiler

            return apply(name, args, kwargs)
        return function(*args, **kwargs)

    return cast("Fn", called_by_name)


def is_inductors() -> bool:
    """Whether the graph that calls this, from an `in_graph` function, becomes kernels of inductor:
    not one that is exported, nor one that torch.compile makes for "eager" or "aot_eager", which
    run the functions of torch. False before torch 2.13, where running code may count as compiled.
    """
    old = torch.__version__ < "2.13"
    if old or not torch.compiler.is_compiling() or torch.compiler.is_exporting():
        return False
    files = [frame.f_code.co_filename for frame in frames()]
    by_dynamo = any(file.endswith("convert_frame.py") for file in files)
    return not by_dynamo or any("_inductor" in file for file in files)


def reads_values(x: Tensor) -> bool:
    """Whether control flow may depend on ``x``: eager code, and no synchronization."""
    return not torch.compiler.is_compiling() and x.device.type == "cpu"


def updates_states() -> bool:
    """Whether a pass updates the state of a recipe: if it records gradients; an exported program
    has fixed scales."""
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        return False  # in torch 2.11, every graph that the compiler traces counts as exported
    return torch.is_grad_enabled()


def is_differentiated_again() -> bool:
    """Whether the running backward pass records its own (``create_graph=True``); never compiled."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def apply(function: type[Function], *args: Any, written: Tensor | None = None) -> Any:
    """``function.apply(*args)`` outside of torch-function modes, which have seen the product as a
    whole. A graph without gradients contains only ``forward``, without guards on what ``backward``
    needs. written: the argument that ``backward`` writes into."""
    if not torch.compiler.is_compiling():
        return apply_eagerly(function, *args)
    if torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling():
        refuse_split_graphs()
    if not torch.is_grad_enabled():
        call, inputs = function.forward, list(args)
    else:
        # The compiler (torch 2.13) assumes that an argument which `torch.func.grad` differentiates
        # needs no gradient, and would not call ``backward``; of a view it sees that.
        if not torch.compiler.is_dynamo_compiling():  # which traces the backward itself
            from .traced import marked  # imports the compiler

            function = marked(function)
        call, inputs = function.apply, []
        for arg in args:
            as_is = not isinstance(arg, Tensor) or arg is written or arg.requires_grad
            inputs.append(arg if as_is or not arg.is_floating_point() else arg[...])
    if any(isinstance(a, Tensor) and type(a) not in (Tensor, Parameter) for a in args):
        return call(*inputs)
    with torch.DisableTorchFunction():
        return call(*inputs)


def apply_eagerly(function: type[Function], *args: Any) -> Any:
    """`apply` in eager mode. torch's ``apply`` of a function with ``setup_context`` binds arguments
    to a signature, which takes longer than a small product; the older form ``forward(ctx, *args)``
    does not. torch rejects that form under a torch.func transform, before it computes."""
    for arg in args:  # as in `apply`, without a call: a small product has time for 18
        if isinstance(arg, Tensor) and type(arg) is not Tensor and type(arg) is not Parameter:
            # As in any call of torch, its class decides what class the results have.
            kind: Any = type(arg)
            return kind.__torch_function__(function.apply, (kind,), args)
    with torch.DisableTorchFunction():
        try:
            return _without_binding(function, torch.is_grad_enabled()).apply(*args)
        except RuntimeError:
            return _with_binding(function, args)


def _with_binding(function: type[Function], args: tuple[Any, ...]) -> Any:
    try:
        return function.apply(*args)
    except NotImplementedError as error:
        if "jvp" not in str(error):
            raise
        raise NotImplementedError(
            "products and casts have no forward mode AD (torch.func.jvp, jacfwd, hessian): use "
            "torch.func.jacrev, and for a Hessian torch.func.jacrev(torch.func.jacrev(f))"
        ) from error


def called(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function(*args, **kwargs)`` inside a torch-function mode, where torch.compile cannot trace
    `Tensor.unflatten`."""
    if function is Tensor.unflatten:
        return torch.unflatten(*args, **kwargs)
    return function(*args, **kwargs)


def same(x: Tensor) -> Tensor:
    """``x``, for an autograd function that changes its gradient alone: a view, or a copy in a
    graph. The compiler (torch 2.13) derives results that share memory from each other, outside of
    the autograd functions between them. Inductor omits needless copies."""
    return x.clone() if torch.compiler.is_compiling() else x[...]


_LOSES_GRADIENTS = torch.__version__ < "2.12"


def unaliased(output: Tensor) -> Tensor:
    """``output``, which a forward changed in place; a copy while torch 2.11 compiles, whose
    gradient would be zero."""
    return output.clone() if _LOSES_GRADIENTS and torch.compiler.is_compiling() else output


def is_recorded(ctx: Any) -> bool:
    """Whether ``ctx`` belongs to an eager call by `apply` that autograd records, outside of
    torch.func."""
    return getattr(ctx, "is_recorded", False)


@cache
def _without_binding(function: type[Function], records: bool) -> type[Function]:
    def forward(ctx: Any, *args: Any) -> Any:
        ctx.is_recorded = records and any(ctx.needs_input_grad)
        output = function.forward(*args)
        function.setup_context(ctx, args, output)
        return output

    methods = {"forward": forward, "backward": function.backward, "jvp": function.jvp}
    static = {name: staticmethod(method) for name, method in methods.items()}
    return type(function.__name__, (Function,), static)
