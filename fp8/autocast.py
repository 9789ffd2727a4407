"""`fp8.autocast`: every matrix product inside the block runs under a recipe.

A torch-function mode over the calls in PRODUCTS, in whatever form they are written: positional,
keyword, method or operator.
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from . import matmul
from .attention import attention
from .convolution import conv
from .multi_head import multi_head_attention_forward
from .recipe import Recipe, get_recipe

__all__ = ["EXPANDED", "OPAQUE", "PRODUCTS", "autocast"]

Handler = Callable[..., Tensor]

# Modes that must see each call before any autocast does (the plan of a unit-scaled model), in the
# order they were entered. An autocast that starts inside one puts it back on top.
FIRST_LOOK: list[TorchFunctionMode] = []


def _refuse_out(out: Tensor | None) -> None:
    if out is not None:
        raise ValueError("a product under fp8.autocast cannot write to out=; assign its result")


def _matmul(
    input: Tensor,
    other: Tensor | None = None,
    *,
    mat2: Tensor | None = None,
    vec: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    _refuse_out(out)
    right = next(t for t in (other, mat2, vec) if t is not None)
    return matmul.matmul(input, right)


def _rmatmul(input: Tensor, other: Tensor) -> Tensor:
    return matmul.matmul(other, input)


def _addmm(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    _refuse_out(out)
    product = matmul.matmul(mat1, mat2, scales=(alpha, alpha, alpha))
    if beta == 0:  # torch ignores the input then, NaN and Inf included
        return product
    return product + (input if beta == 1 else input * beta)


def _baddbmm(
    input: Tensor,
    batch1: Tensor,
    batch2: Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor | None = None,
) -> Tensor:
    return _addmm(input, batch1, batch2, beta=beta, alpha=alpha, out=out)


def _in_place(function: Handler) -> Handler:
    def write(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return input.copy_(function(input, *args, **kwargs))

    return write


def _multilinear(function: Callable[..., Tensor]) -> Handler:
    """Any product that is linear in each operand: cast the operands, and the gradient coming in."""

    def product(*args: Any, **kwargs: Any) -> Tensor:
        recipe = matmul.active_recipe()
        assert recipe is not None
        cast = recipe.input

        def operand(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return type(value)(operand(v) for v in value)
            floating = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1
            return matmul.cast_forward(value, cast) if floating else value

        args = tuple(operand(a) for a in args)
        kwargs = {k: operand(v) for k, v in kwargs.items()}
        return matmul.cast_backward(function(*args, **kwargs), recipe.grad)

    return product


PRODUCTS: dict[Callable[..., Any], Handler] = {
    F.linear: matmul.linear,
    torch.matmul: _matmul,
    torch.mm: _matmul,
    torch.bmm: _matmul,
    torch.mv: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.mm: _matmul,
    torch.Tensor.bmm: _matmul,
    torch.Tensor.mv: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.Tensor.__rmatmul__: _rmatmul,
    operator.matmul: _matmul,
    torch.addmm: _addmm,
    torch.Tensor.addmm: _addmm,
    torch.Tensor.addmm_: _in_place(_addmm),
    torch.baddbmm: _baddbmm,
    torch.Tensor.baddbmm: _baddbmm,
    torch.Tensor.baddbmm_: _in_place(_baddbmm),
    torch.einsum: _multilinear(torch.einsum),
    torch.tensordot: _multilinear(torch.tensordot),
    F.bilinear: _multilinear(F.bilinear),
    F.conv1d: conv,
    F.conv2d: conv,
    F.conv3d: conv,
    F.conv_transpose1d: _multilinear(F.conv_transpose1d),
    F.conv_transpose2d: _multilinear(F.conv_transpose2d),
    F.conv_transpose3d: _multilinear(F.conv_transpose3d),
    F.scaled_dot_product_attention: attention,
}
"""Torch function -> what computes it under the active recipe."""

EXPANDED: dict[Callable[..., Any], Callable[..., Any]] = {
    F.multi_head_attention_forward: multi_head_attention_forward,
}
"""Torch function -> the same computation in calls that the mode sees."""

OPAQUE: dict[Callable[..., Any], str] = {
    getattr(torch, name): "one kernel computes all its products; write it out step by step"
    for name in (
        "lstm",
        "gru",
        "rnn_tanh",
        "rnn_relu",
        "lstm_cell",
        "gru_cell",
        "rnn_tanh_cell",
        "rnn_relu_cell",
        "chain_matmul",
    )
} | {torch.linalg.multi_dot: "it chooses the order of its products itself; write them with @"}
"""Torch function whose products a mode cannot reach -> why."""


def _is_product(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """False for integers and complex numbers, and for outer products, which sum nothing up."""
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    if not all(t.is_floating_point() for t in tensors[:2]):
        return False
    if len(tensors) < 2:
        return True
    left, right = tensors[:2]
    outer = left.dim() > 1 and right.dim() > 1 and left.shape[-1] == 1 == right.shape[-2]
    return not outer


def _forced_eager(call: Callable[[], Any]) -> Any:
    with torch.compiler.set_stance("force_eager"):
        return call()


def outside_compiler(call: Callable[[], Any]) -> Any:
    """``call()`` with nothing in it compiled, from the frame up or by itself.

    The code that a compiler makes of a call under a mode has the mode in it already. Run while
    the mode is active it would meet it again, so while a mode is active in eager code, all is.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled yet, and importing it is slow
        return call()
    return torch.compiler.disable(_forced_eager)(call)


class autocast(TorchFunctionMode):
    """Within the block, every matrix product runs under ``recipe``.

    recipe: a name in `fp8.RECIPES` or a `Recipe`.
    opaque: what to do at a call whose products cannot be reached (OPAQUE): "raise" a
    NotImplementedError that names it, or "warn" once and leave it in high precision.

    To compile, compile the function that contains the block: what is compiled and called within
    it runs in eager mode, so that no product is cast twice.
    An outer product (inner size 1) and integer products are left as they are: they round nothing.

    >>> import torch, fp8
    >>> x, w = torch.tensor([[1.06, 2.0]]), torch.tensor([[1.0, 1.0]])
    >>> with fp8.autocast("unit"):
    ...     y = torch.nn.functional.linear(x, w)
    >>> y  # 1.06 is rounded to 1.0
    tensor([[3.]])
    """

    def __init__(self, recipe: str | Recipe = "unit", *, opaque: str = "raise") -> None:
        super().__init__()
        if opaque not in ("raise", "warn"):
            raise ValueError(f"opaque must be 'raise' or 'warn', not {opaque!r}")
        self.recipe = get_recipe(recipe)
        self.opaque = opaque
        self._above: list[TorchFunctionMode | None] = []
        self._stances: list[Any] = []

    def __enter__(self) -> autocast:
        if not torch.compiler.is_compiling():
            self._force_eager()
        matmul._ACTIVE.append(self.recipe)
        super().__enter__()
        above = FIRST_LOOK[-1] if FIRST_LOOK else None
        self._above.append(above)
        if above is not None:
            TorchFunctionMode.__enter__(above)
        return self

    def __exit__(self, *error: Any) -> None:
        above = self._above.pop()
        if above is not None:
            TorchFunctionMode.__exit__(above, *error)
        matmul._ACTIVE.pop()
        super().__exit__(*error)
        if not torch.compiler.is_compiling():
            stance = self._stances.pop()
            if stance is not None:
                stance.__exit__(*error)

    def _force_eager(self) -> None:
        if "torch._dynamo" not in sys.modules:
            self._stances.append(None)
            return
        try:
            self._stances.append(torch.compiler.set_stance("force_eager"))
        except RuntimeError as error:
            raise RuntimeError(
                "fp8.autocast was entered by a function that torch.compile could not compile in "
                "one piece (a graph break): compile it with fullgraph=True to see where"
            ) from error

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        handler = PRODUCTS.get(function)
        if handler is not None:
            return (handler if _is_product(args, kwargs) else function)(*args, **kwargs)
        if function in EXPANDED:
            with self:
                return EXPANDED[function](*args, **kwargs)
        if function in OPAQUE:
            self._leave(function)
        return function(*args, **kwargs)

    def _leave(self, function: Callable[..., Any]) -> None:
        message = f"torch.{function.__name__} cannot run under fp8.autocast: {OPAQUE[function]}"
        if self.opaque == "raise":
            raise NotImplementedError(message)
        warnings.warn(f"{message}; left in high precision", stacklevel=3)
