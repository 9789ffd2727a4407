"""Dispatch tables: the torch functions that compute matrix products, and their handlers.

`fp8.autocast` reads PRODUCTS, LEFT and `expansion`. Every handler calls functions of
`fp8.products`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..formats.quantize import refuse_nested
from ..frame import FRAMES
from ..products import matmul
from ..products.attention import attention, flex_attention, multi_head_attention_forward
from ..products.convolution import conv, conv_transpose
from ..products.einsum import as_equation, as_matmul, in_pairs, sums_products
from ..products.grouped import grouped_mm
from ..recipes.recipe import Recipe
from ..torch_internals import Arguments, Keywords, TorchFunction
from ..torch_internals.decorators import in_graph
from ..warnings import RecipeWarning, warn_once
from .control_flow import RUNS, in_python

T = TypeVar("T")

SPELLINGS: dict[str, tuple[TorchFunction, ...]] = {
    "matmul": (
        torch.matmul,
        torch.linalg.matmul,
        Tensor.matmul,
        Tensor.__matmul__,
        operator.matmul,
    ),
    "rmatmul": (Tensor.__rmatmul__,),
    "mm": (torch.mm, Tensor.mm),
    "bmm": (torch.bmm, Tensor.bmm),
    "mv": (torch.mv, Tensor.mv),
    "dot": (torch.dot, Tensor.dot),
    "vdot": (torch.vdot, Tensor.vdot),
    "addmm": (torch.addmm, Tensor.addmm),
    "addmv": (torch.addmv, Tensor.addmv),
    "addbmm": (torch.addbmm, Tensor.addbmm),
    "baddbmm": (torch.baddbmm, Tensor.baddbmm),
    "grouped_mm": (
        F.grouped_mm,
        torch._grouped_mm,
    ),  # a mode receives the second for both
}
"""Product -> its spellings, which take the same arguments."""


def by_function(table: Mapping[str, T]) -> dict[TorchFunction, T]:
    """Maps each spelling of the products of ``table`` to its value."""
    return {
        function: value for name, value in table.items() for function in SPELLINGS[name]
    }


Handler = TorchFunction
"""(recipe, *args, **kwargs) -> the result; NotImplemented, if torch should compute the call; or, if
the recipe cannot be applied to its products, a string with the reason."""


def _floating(*values: object) -> bool:
    """Whether all are tensors that are cast: not integer, sparse or, with a warning, complex."""
    for value in values:
        if not isinstance(value, Tensor):
            return False
        if value.is_nested:
            refuse_nested(value)
        if value.dtype.is_complex:
            message = (
                "a product of complex numbers is not cast, as no format has them: multiply the "
                "real and imaginary parts to have them cast"
            )
            warn_once(RecipeWarning, message, key="complex")
        if not value.dtype.is_floating_point or value.layout != torch.strided:
            return False
    return True


def _linear(
    recipe: Recipe, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> object:
    if not _floating(input, weight):
        return NotImplemented
    return matmul.linear(
        input, weight, bias, recipe=recipe, backend=FRAMES.items[-1].block.backend
    )


def _layer(function: TorchFunction) -> Handler:
    """Handler of a function with torch's own signature that finds the open block itself."""

    def handler(recipe: Recipe, *args: Any, **kwargs: Keywords) -> object:
        tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
        if not _floating(*tensors[:2]):
            return NotImplemented
        return function(*args, **kwargs)

    return handler


def _is_product(left: Any, right: Any, ranks: tuple[int, int] | None) -> bool:
    """Whether torch accepts these operands (else it raises) and they sum over several terms."""
    if not _floating(left, right):
        return False
    if ranks is not None:
        equal_batch = ranks[0] < 3 or left.shape[:1] == right.shape[:1]
        if (left.ndim, right.ndim) != ranks or not equal_batch:
            return False
    # A cast would round the result of an outer product, and save no work.
    return left.ndim > 0 and left.shape[-1] != 1


def _two(ranks: tuple[int, int] | None = None) -> Handler:
    """Handler of ``left @ right`` for operands of these ranks; None: any that broadcast."""

    def handler(
        recipe: Recipe,
        input: Tensor,
        other: Tensor | None = None,
        *,
        mat2: Tensor | None = None,
        vec: Tensor | None = None,
    ) -> object:
        right: Any = next((t for t in (other, mat2, vec) if t is not None), None)
        if not _is_product(input, right, ranks):
            return NotImplemented
        return matmul.matmul(
            input, right, recipe=recipe, backend=FRAMES.items[-1].block.backend
        )

    return handler


def _added(first: str, second: str, rank: int) -> Handler:
    """Handler of ``beta * input + alpha * first @ second``."""

    def handler(
        recipe: Recipe,
        input: Tensor,
        *args: Any,
        beta: float = 1,
        alpha: float = 1,
        **named: Any,
    ) -> object:
        factors = list(args)
        for name in (first, second)[len(args) :]:
            factors.append(named.pop(name, None))
        if len(factors) > 2 or not isinstance(input, Tensor):
            raise TypeError("beta and alpha are keywords under fp8.autocast")
        left, right = factors
        if named or not _floating(input) or not _is_product(left, right, (rank, rank)):
            return NotImplemented
        product = matmul.matmul(left, right, scales=(alpha, alpha, alpha))
        # `input` is not read then, as in torch: it may hold NaN.
        if beta == 0:
            return product
        (input,) = matmul.to_autocast_dtype(input)
        if input.dtype != product.dtype:
            raise TypeError(
                f"input is {input.dtype}, the product {product.dtype}; make them equal"
            )
        # Raises if the sum would be larger than the product.
        input = input.expand(product.shape)
        if beta != 1:
            input = input * beta
        return product + input

    return handler


def _einsum(recipe: Recipe, *args: Any) -> object:
    equation, operands = as_equation(args)
    if not _floating(*operands) or not sums_products(equation, operands):
        return NotImplemented
    y = as_matmul(equation, operands)
    if y is None:
        return "it is not one product of two matrices; write it as such"
    return y


def _grouped(
    recipe: Recipe,
    input: Tensor,
    mat2: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> object:
    if (
        not _floating(input, mat2)
        or bias is not None
        or out_dtype not in (None, input.dtype)
    ):
        return NotImplemented  # torch 2.13 supports neither
    return grouped_mm(input, mat2, offs)


_HANDLERS: dict[str, Handler] = {
    "matmul": _two(),
    "rmatmul": lambda recipe, right, left: _two()(recipe, left, right),
    "mm": _two((2, 2)),
    "bmm": _two((3, 3)),
    "mv": _two((2, 1)),
    "addmm": _added("mat1", "mat2", 2),
    "baddbmm": _added("batch1", "batch2", 3),
    "grouped_mm": _grouped,
}

PRODUCTS: dict[TorchFunction, Handler] = {
    **by_function(_HANDLERS),
    F.linear: _linear,
    torch.einsum: _einsum,
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _layer(conv)),
    **dict.fromkeys(
        (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        _layer(conv_transpose),
    ),
    F.scaled_dot_product_attention: _layer(attention),
    torch.ops.higher_order.flex_attention: _layer(flex_attention),
}
"""Torch function -> its handler."""

PLACES = {function: place for place, function in enumerate(PRODUCTS)}


@in_graph
def outside_of_modes(place: int, args: Arguments, kwargs: Keywords) -> object:
    """A call of PRODUCTS as one call of a graph, inside of which no mode sees a call."""
    with torch.DisableTorchFunction():
        return list(PRODUCTS)[place](*args, **kwargs)


#: The types of operators of torch.ops: of one, and of one of its overloads.
OPERATORS = (type(torch.ops.aten.mm), type(torch.ops.aten.mm.default))


_OPERATORS: dict[str, Handler] = {
    # transformers' grouped_mm where torch has none: compiled, in other dtypes than bfloat16.
    "transformers.grouped_mm_fallback": _grouped,
}
"""Operator that another library registers -> its handler."""


def handler_of(function: TorchFunction) -> Handler | None:
    """The handler of a torch function, or of an operator of another library; None for others."""
    if isinstance(function, OPERATORS):
        return _OPERATORS.get(str(function))
    return PRODUCTS.get(function)


def _linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    ignore_index: int | None = None,
    options: object = None,
    **kwargs: Any,
) -> Tensor:
    """The two calls that torch states as the definition. options: how torch would save memory."""
    shape = linear_weight.shape[:-1]
    if len(shape) > 1:  # of one loss for each position
        linear_weight = linear_weight.flatten(0, -2)
        if linear_bias is not None:
            linear_bias = linear_bias.flatten()
    logits = F.linear(input, linear_weight, linear_bias)
    if len(shape) > 1:
        logits = logits.unflatten(-1, shape)
    if ignore_index is not None:
        kwargs["ignore_index"] = ignore_index
    return F.cross_entropy(logits, target, **kwargs)


COMPOSED: dict[TorchFunction, TorchFunction] = {
    F.multi_head_attention_forward: multi_head_attention_forward,
}
"""Torch function -> an equivalent function that makes the calls of which it is composed."""
if hasattr(F, "linear_cross_entropy"):  # torch 2.13
    COMPOSED[F.linear_cross_entropy] = _linear_cross_entropy


def expansion(
    function: TorchFunction, args: Arguments, kwargs: Keywords
) -> Callable[[], Any] | None:
    """Returns a function that makes the calls of which this call is composed, so that a mode sees
    them; None for other calls."""
    if function is torch.einsum:
        equation, operands = as_equation(args)
        commas = equation.partition("->")[0].count(",")
        if commas > 1 and commas + 1 == len(operands):
            return partial(in_pairs, equation, operands)
        return None
    composed = COMPOSED.get(function)
    if composed is None:
        return in_python(function, args)
    return partial(composed, *args, **kwargs)


_RARE = [
    function
    for name in ("dot", "vdot", "addmv", "addbmm")
    for function in SPELLINGS[name]
]

_WHY_LEFT: dict[str, tuple[TorchFunction, ...]] = {
    "one kernel computes all its products; write it out step by step": (
        torch.lstm,
        torch.gru,
        torch.rnn_tanh,
        torch.rnn_relu,
        torch.lstm_cell,
        torch.gru_cell,
        torch.rnn_tanh_cell,
        torch.rnn_relu_cell,
    ),
    "it chooses the order of its products itself; write them with @": (
        torch.chain_matmul,
        torch.linalg.multi_dot,
    ),
    "call conv1d": (torch.conv_tbc,),
    "sparse operands have no cast": (
        torch.sparse.mm,
        torch.sparse.addmm,
        torch.smm,
        torch.hspmm,
        torch.sspaddmm,
    ),
    "write it with @, F.linear or torch.einsum to have it cast": (
        torch.tensordot,
        torch.inner,
        Tensor.inner,
        torch.linalg.vecdot,
        F.bilinear,
        *_RARE,
        Tensor.addmm_,
        torch.addmv_,
        Tensor.addmv_,
        Tensor.addbmm_,
        Tensor.baddbmm_,
    ),
    "the distance is a difference of its products, in which errors of casts grow": (
        torch.cdist,
    ),
    "it computes coordinates, which a cast would move": (
        F.affine_grid,
        torch.affine_grid_generator,
    ),
    "covariances of rounded values are not those of the values": (
        torch.cov,
        Tensor.cov,
        torch.corrcoef,
        Tensor.corrcoef,
    ),
    "a cast in each of its products would add up errors; write them with @": (
        torch.matrix_power,
        Tensor.matrix_power,
        torch.linalg.matrix_power,
    ),
    "the gradient of the matrix is a product, in which errors of casts grow with its condition": (
        torch.linalg.solve,
        torch.linalg.solve_ex,
        torch.linalg.solve_triangular,
        torch.linalg.lu_solve,
        torch.linalg.lstsq,
        torch.linalg.tensorsolve,
        torch.triangular_solve,
        Tensor.triangular_solve,
        torch.lu_solve,
        Tensor.lu_solve,
        torch.cholesky_solve,
        Tensor.cholesky_solve,
    ),
    "a mode does not see what its distance_function calls": (
        F.triplet_margin_with_distance_loss,
    ),
}

#: Torch function whose products stay in high precision, with a warning -> why.
LEFT = {function: why for why, functions in _WHY_LEFT.items() for function in functions}

EXPANDED = dict.fromkeys((torch.einsum, *COMPOSED, *RUNS))
"""Functions whose calls may be composed of others: see `expansion`."""

SPECIAL = dict.fromkeys((*PRODUCTS, *COMPOSED, *RUNS, *LEFT))
"""Every function that `fp8.autocast` treats in its own way."""
