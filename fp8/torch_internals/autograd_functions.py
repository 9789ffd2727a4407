"""Calls of autograd functions, and results that share memory with an argument.

Works around: torch binds the arguments of a function with ``setup_context`` to a signature, which
takes longer than a small product (`apply_eagerly`). torch.compile omits the backward pass of
arguments that `torch.func.grad` differentiates (2.13, `apply`), derives results that share memory
from each other (2.13, `same`), and loses the gradient of a result that a forward pass changed in
place (2.11, `unaliased`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import Parameter

from . import Arguments, Context
from .pipelining import refuse_split_graphs


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
            from .compiling_flag import marked  # imports the compiler

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
        if (
            isinstance(arg, Tensor)
            and type(arg) is not Tensor
            and type(arg) is not Parameter
        ):
            # The class of an argument decides the class of the results, as in any call of torch.
            kind: Any = type(arg)
            return kind.__torch_function__(function.apply, (kind,), args)
    with torch.DisableTorchFunction():
        try:
            return _without_binding(function, torch.is_grad_enabled()).apply(*args)
        except RuntimeError:
            return _with_binding(function, args)


def _with_binding(function: type[Function], args: Arguments) -> Any:
    try:
        return function.apply(*args)
    except NotImplementedError as error:
        if "jvp" not in str(error):
            raise
        raise NotImplementedError(
            "products and casts have no forward mode AD (torch.func.jvp, jacfwd, hessian): use "
            "torch.func.jacrev, and for a Hessian torch.func.jacrev(torch.func.jacrev(f))"
        ) from error


def same(x: Tensor) -> Tensor:
    """``x``, for an autograd function that changes its gradient alone: a view, or a copy in a
    graph. The compiler (torch 2.13) derives results that share memory from each other, outside of
    the autograd functions between them. Inductor omits needless copies."""
    if torch.compiler.is_compiling():
        return x.clone()
    return x[...]


_LOSES_GRADIENTS = torch.__version__ < "2.12"


def unaliased(output: Tensor) -> Tensor:
    """``output``, which a forward changed in place; a copy while torch 2.11 compiles, whose
    gradient would be zero."""
    if _LOSES_GRADIENTS and torch.compiler.is_compiling():
        return output.clone()
    return output


def is_recorded(ctx: Context) -> bool:
    """Whether ``ctx`` belongs to an eager call by `apply` that autograd records, outside of
    torch.func."""
    return getattr(ctx, "is_recorded", False)


@cache
def _without_binding(function: type[Function], records: bool) -> type[Function]:
    def forward(ctx: Context, *args: Any) -> Any:
        ctx.is_recorded = records and any(ctx.needs_input_grad)
        output = function.forward(*args)
        function.setup_context(ctx, args, output)
        return output

    methods = {"forward": forward, "backward": function.backward, "jvp": function.jvp}
    static = {name: staticmethod(method) for name, method in methods.items()}
    return type(function.__name__, (Function,), static)
