"""Linear layers, matrix products and contractions; the product kernels apply all scales.

The products are computed by the fp8 package, so the recipe of an enclosing `fp8.autocast` applies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fp8.modes.dispatch import by_function
from fp8.products.einsum import as_equation, as_matmul, in_pairs, letters, sums_products
from fp8.products.grouped import grouped_mm as grouped_product
from fp8.products.matmul import linear as linear_product
from fp8.products.matmul import matmul as matrix_product
from fp8.products.matmul import to_autocast_dtype

from ..common.calls import Kwargs
from ..rules.batch import row_scale
from ..rules.table import Scales, positional, row, tie
from ..scale import scale_each

#: Exponents of 1/fan-in (output), 1/fan-out (input gradient) and 1/batch (weight gradient).
ScalePower = tuple[float, float, float]

SQRT: ScalePower = (0.5, 0.5, 0.5)


def linear_scales(
    input: Tensor,
    weight: Tensor,
    constraint: str | None = "to_output_scale",
    scale_power: ScalePower = SQRT,
    weight_grad_mult: float = 1.0,
) -> Scales:
    """1/sqrt of the number of terms of each sum: fan-in, fan-out, and the rows of the input."""
    if weight.ndim != 2:
        raise ValueError(
            f"linear needs a weight of shape (out, in), got {tuple(weight.shape)}"
        )
    fan_out, fan_in = weight.shape
    output, backward, batch = scale_power
    grad = row_scale(math.prod(input.shape[:-1]), batch) * weight_grad_mult
    # Without calls of `inverse`: a small product has time for 18.
    sums = {"output": (fan_in or 1) ** -output, "input": (fan_out or 1) ** -backward}
    # A weight ends the graph: its gradient needs no constraint (arXiv 2303.11257, section 4.3).
    return {"weight": grad, "bias": grad, **tie(constraint, **sums)}


def inverse(size: int, power: float = 0.5) -> float:
    """``size ** -power``; 1 for an empty dimension."""
    return (size or 1) ** -power


@row(linear_scales, replaces=(F.linear,))
def linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    constraint: str | None = "to_output_scale",
    scale_power: ScalePower = SQRT,
    weight_grad_mult: float = 1.0,
) -> Tensor:
    """Computes ``s * (input @ weight.T + bias)``, (..., out).

    Args:
        input: (..., in).
        weight: (out, in).
        bias: (out,) or None.
        scale_power: exponents of 1/fan-in (output), 1/fan-out (input gradient) and 1/batch (weight
            gradient). With 0.5, an output of uncorrelated terms has RMS 1.
        weight_grad_mult: an additional factor of the gradients of weight and bias, for a layer
            whose output gradient has a known RMS other than 1.
    """
    s = linear_scales(input, weight, constraint, scale_power, weight_grad_mult)
    return _linear(input, weight, bias, s)


def _linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    s: Scales,
) -> Tensor:
    # The gradient of the bias has the weight's.
    scales = (s["output"], s["input"], s["weight"])
    return linear_product(
        input, weight, bias, scales=scales, bias_scale=s["output"], unit=True
    )


# u-muP (arXiv 2407.17465), table 2: 1/fan-in in the forward pass alone.
READOUT: ScalePower = (1.0, 0.5, 0.5)


def linear_readout_scales(
    input: Tensor, weight: Tensor, constraint: str | None = None
) -> Scales:
    """Returns the scales of `linear_scales` with 1/fan-in for the output (muP's output layer)."""
    return linear_scales(input, weight, constraint, READOUT)


@row(linear_readout_scales)
def linear_readout(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    constraint: str | None = None,
) -> Tensor:
    """The last linear layer of a model: 1/fan-in for the output, and no constraint by default.

    Logits are small at initialisation. Arguments are as in `linear`.

    Source: u-muP, arXiv 2407.17465, table 2.
    """
    s = linear_readout_scales(input, weight, constraint)
    return _linear(input, weight, bias, s)


def matmul_scales(
    left: Tensor, right: Tensor, constraint: str | None = "to_output_scale"
) -> Scales:
    """1/sqrt of the number of terms of each of the three products, including broadcast batches."""
    rows = math.prod(left.shape[-2:-1])  # 1 for a vector
    columns = _columns(right)
    left_batch = left.shape[:-2]
    right_batch = right.shape[:-2]
    left_copies = right_copies = 1
    if left_batch != right_batch:
        total = math.prod(torch.broadcast_shapes(left_batch, right_batch))
        left_copies = total // (math.prod(left_batch) or 1)
        right_copies = total // (math.prod(right_batch) or 1)
    return tie(
        constraint,
        output=inverse(left.shape[-1]),
        left=inverse(columns * left_copies),
        right=inverse(rows * right_copies),
    )


def _columns(right: Tensor) -> int:
    """1 for a vector."""
    return math.prod(right.shape[1:][-1:])


#: torch's names of the second operand are "other", "mat2", "vec" or "tensor".
_TWO = positional(
    "left right", input="left", other="right", mat2="right", vec="right", tensor="right"
)


@row(
    matmul_scales,
    adapters=by_function(
        {
            **dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), _TWO),
            "rmatmul": positional("right left", other="left"),
        }
    ),
)
def matmul(
    left: Tensor, right: Tensor, constraint: str | None = "to_output_scale"
) -> Tensor:
    """Computes ``s * left @ right``, with the shapes and broadcasting of `torch.matmul`."""
    s = matmul_scales(left, right, constraint)
    return matrix_product(
        left, right, scales=(s["output"], s["left"], s["right"]), unit=True
    )


def grouped_mm_scales(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    constraint: str | None = "to_output_scale",
) -> Scales:
    """Returns the scales of `linear_scales` for each group.

    The output has 1/sqrt(k) and the gradient of the tokens 1/sqrt(n), tied. The stack of weights
    has 1/sqrt of the mean number of rows in a group, because shapes do not tell the sizes of
    groups. Two matrices have no weight: all three scales are tied.
    """
    k = left.shape[-1]
    m = left.shape[-2]
    n = right.shape[-1]
    groups = 1
    if offs is not None:
        groups = offs.shape[0] or 1
    if left.ndim == right.ndim == 2:
        terms = k / groups or 1
        sums = {"output": terms**-0.5, "left": inverse(n), "right": inverse(m)}
        return tie(constraint, **sums)
    if right.ndim == 3:
        tied = tie(constraint, output=inverse(k), left=inverse(n))
        return {"right": row_scale(m / groups), **tied}
    tied = tie(constraint, output=inverse(k), right=inverse(m))
    return {"left": row_scale(n / groups), **tied}


def _torch_grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Kwargs:
    if bias is not None or (out_dtype is not None and out_dtype != mat_a.dtype):
        raise TypeError(
            "unit-scaled grouped_mm has no bias and no other out_dtype, as torch's"
        )
    return {"left": mat_a, "right": mat_b, "offs": offs}


@row(grouped_mm_scales, adapters=by_function({"grouped_mm": _torch_grouped_mm}))
def grouped_mm(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """Computes ``s * left @ right`` by groups, with the shapes of `torch.nn.functional.grouped_mm`.

    Args:
        left: (tokens, k), (groups, m, k), (m, tokens) or (groups, m, k).
        right: (groups, k, n), (groups, k, n), (tokens, n) or (k, tokens), respectively.
        offs: (groups,), int32: the ends of the groups along the tokens. None for two stacks.
        constraint: see `unit_scaling.constraints`. As for `linear`, the gradient of a weight (a
            stack that is multiplied by tokens) has none.

    Returns:
        (tokens, n), (groups, m, n), (groups, m, n) or (m, tokens).
    """
    s = grouped_mm_scales(left, right, offs, constraint)
    scales = (s["output"], s["left"], s["right"])
    return grouped_product(left, right, offs, scales=scales, unit=True)


def addmm_scales(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    beta: float = 1,
    alpha: float = 1,
    constraint: str | None = "to_output_scale",
) -> Scales:
    """The product as in `matmul_scales` or, with a bias (one dimension), as in `linear_scales`.

    The sum of two unit-scaled terms with weights alpha and beta has RMS sqrt(alpha**2 + beta**2).
    "output" is the factor of the product, "input" the factor of the gradient of the added term.
    """
    a = abs(alpha) or 1.0
    b = abs(beta) or 1.0
    if is_bias(input, mat2):
        grad = row_scale(math.prod(mat1.shape[:-1]))
        fan_in, fan_out = mat2.shape
        tied = tie(constraint, output=inverse(fan_in) / a, mat1=inverse(fan_out) / a)
        return {"mat2": grad / a, "input": grad / b, **tied}
    product = matmul_scales(mat1, mat2, None)
    norm = math.hypot(alpha, beta) or 1.0
    tied = tie(
        constraint,
        output=product["output"] / norm,
        mat1=product["left"] / a,
        mat2=product["right"] / a,
    )
    # Each element of input receives product elements / input elements gradients.
    size = mat1.numel() // (mat1.shape[-1] or 1) * _columns(mat2)
    share = ((input.numel() or 1) / (size or 1)) ** 0.5 / b
    if constraint:
        share = 1 / norm
    return {"input": share, **tied}


def is_bias(input: Tensor, mat2: Tensor) -> bool:
    """Whether the added term of `addmm` is the bias of a layer with the weight ``mat2``."""
    return input.ndim == 1 and mat2.ndim == 2


#: `torch.baddbmm` has the names "batch1" and "batch2".
_ADDED = positional("input mat1 mat2", batch1="mat1", batch2="mat2")


@row(addmm_scales, adapters=by_function(dict.fromkeys(("addmm", "baddbmm"), _ADDED)))
def addmm(
    input: Tensor,
    mat1: Tensor,
    mat2: Tensor,
    beta: float = 1,
    alpha: float = 1,
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """Computes ``beta * input + alpha * mat1 @ mat2`` with unit-scaled terms and a unit-scaled sum.

    An input (n,) added to the product of two matrices is a bias: the result is ``s * (alpha * mat1
    @ mat2 + beta * input)``, as in `linear`, and mat2 is treated as its weight (no constraint on
    its gradient).

    Args:
        input: broadcastable to (..., m, n) or (..., m); not read if beta is 0.
        mat1: (..., m, k).
        mat2: (..., k, n) or (k,).
        beta: the factor of ``input``.
        alpha: the factor of the product.
    """
    if not (mat1.dtype.is_floating_point or mat1.dtype.is_complex):
        return input * beta + torch.matmul(mat1, mat2) * alpha
    s = addmm_scales(input, mat1, mat2, beta, alpha, constraint)
    scales = (alpha * s["output"], alpha * s["mat1"], alpha * s["mat2"])
    if is_bias(input, mat2):
        bias = None
        if beta:  # the product applies its weight's factor to the bias
            bias = scale_each(
                input, beta * s["output"], beta * s["input"] / (scales[2] or 1.0)
            )
        return linear_product(mat1, mat2.mT, bias, scales=scales, unit=True)
    product = matrix_product(mat1, mat2, scales=scales, unit=True)
    if not beta:
        return product
    forward = beta / (math.hypot(alpha, beta) or 1.0)
    (input,) = to_autocast_dtype(input)
    if forward == beta * s["input"]:
        return torch.add(product, input, alpha=forward)
    return product + scale_each(input, forward, beta * s["input"])


# Contractions in Einstein notation


def _parsed(
    equation: str, left: Tensor, right: Tensor | None, more: Sequence[Tensor]
) -> tuple[list[Tensor], list[str], str]:
    """The operands, their letters and the letters of the output."""
    if isinstance(more, Tensor):
        raise TypeError(
            "unit-scaled einsum takes an equation, two operands and a tuple of the others: "
            "einsum('ij,jk,kl', a, b, (c,))"
        )
    operands = [x for x in (left, right, *more) if x is not None]
    equation = equation.replace(" ", "")
    terms = equation.partition("->")[0].split(",")
    if len(terms) != len(operands):
        raise ValueError(
            f"einsum {equation!r} needs {len(terms)} operands, got {len(operands)}"
        )
    for term, x in zip(terms, operands, strict=True):
        hidden = x.ndim - len(term.replace("...", ""))
        if hidden < 0 or (hidden and "..." not in term):
            raise ValueError(
                f"einsum: {term!r} does not fit an operand of {x.ndim} dimensions"
            )
    return operands, *letters(equation, operands)


def einsum_scales(
    equation: str,
    left: Tensor,
    right: Tensor | None = None,
    more: Sequence[Tensor] = (),
    constraint: str | None = "to_output_scale",
) -> Scales:
    """1/sqrt of the number of terms in each sum: the product of the sizes of all indices that a
    tensor lacks. A broadcast dimension of size 1 counts as lacking.
    """
    return _factors(*_parsed(equation, left, right, more), constraint)


def _factors(
    operands: Sequence[Tensor],
    terms: Sequence[str],
    output: str,
    constraint: str | None,
) -> Scales:
    sizes: dict[str, int] = {}
    for term, x in zip(terms, operands, strict=True):
        for letter, size in zip(term, x.shape, strict=True):
            if sizes.get(letter, 1) == 1:  # torch broadcasts a size of 1
                sizes[letter] = size
    every = math.prod(list(sizes.values()))
    factors = {"output": inverse(every // (math.prod([sizes[c] for c in output]) or 1))}
    for name, term, x in zip(("left", "right"), terms, operands, strict=False):
        own = dict(zip(term, x.shape, strict=True))
        elements = math.prod(list(own.values()))
        factors[name] = inverse(every // (elements or 1))
    # The table has no factors for further operands.
    if constraint and len(operands) > 2:
        constraint = "to_output_scale"
    return tie(constraint, **factors)


def _torch_einsum(*args: Any) -> Kwargs:
    equation, (left, *others) = as_equation(args)
    right: Tensor | None = None
    more: list[Tensor] = []
    if others:
        right, *more = others
    return {"equation": equation, "left": left, "right": right, "more": tuple(more)}


@row(einsum_scales, adapters={torch.einsum: _torch_einsum})
def einsum(
    equation: str,
    left: Tensor,
    right: Tensor | None = None,
    more: Sequence[Tensor] = (),
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """Computes ``s * einsum(equation, left, right, *more)``.

    Two operands are multiplied by one (batched) matrix product, more in pairs, in torch's order.

    Args:
        equation: as in `torch.einsum`, with or without "..." and "->".
        left: the first operand.
        right: the second operand, if any.
        more: further operands.
        constraint: see `unit_scaling.constraints`. For more than two operands, any constraint other
            than None is "to_output_scale".

    Raises:
        TypeError: the equation is not a string, or ``more`` is not a sequence.
        ValueError: the equation does not fit the operands.
    """
    operands, terms, output = _parsed(equation, left, right, more)
    equation = f"{','.join(terms)}->{output}"
    if len(operands) > 2:
        tied = "to_output_scale" if constraint else None
        return in_pairs(equation, operands, partial(einsum, constraint=tied))
    s = _factors(operands, terms, output, constraint)
    if len(operands) == 2 and sums_products(equation, operands):
        scales = (s["output"], s["left"], s["right"])
        product = as_matmul(equation, operands, scales=scales, unit=True)
        if product is not None:
            return product
    pairs = zip(("left", "right"), operands, strict=False)
    inputs = [scale_each(x, 1.0, s[name]) for name, x in pairs]
    return scale_each(torch.einsum(equation, *inputs), s["output"], 1.0)
