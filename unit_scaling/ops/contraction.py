"""Tensor contractions in Einstein notation: einsum, tensordot, inner, vecdot."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fp8.products.einsum import as_equation, as_matmul, in_pairs, letters, sums_products

from ..rules.table import Scales, row, tie
from .products import inverse, scaled


def _letters(equation: str, operands: list[Tensor]) -> tuple[list[str], str]:
    """As `fp8.products.einsum.letters`. Raises ValueError if the equation does not fit the
    operands.
    """
    terms = equation.partition("->")[0].split(",")
    if len(terms) != len(operands):
        raise ValueError(f"einsum {equation!r} needs {len(terms)} operands, got {len(operands)}")
    for term, x in zip(terms, operands, strict=True):
        hidden = x.ndim - len(term.replace("...", ""))
        if hidden < 0 or (hidden and "..." not in term):
            raise ValueError(f"einsum: {term!r} does not fit an operand of {x.ndim} dimensions")
    return letters(equation, operands)


def _sizes(terms: Sequence[str], operands: Sequence[Tensor]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for term, x in zip(terms, operands, strict=True):
        for letter, size in zip(term, x.shape, strict=True):
            sizes[letter] = size if sizes.get(letter, 1) == 1 else sizes[letter]
    return sizes


def _operands(equation: str, left: Tensor, right: Tensor | None, more: Any) -> list[Tensor]:
    if isinstance(more, Tensor):
        raise TypeError(
            "unit-scaled einsum takes an equation, two operands and a tuple of the others: "
            "einsum('ij,jk,kl', a, b, (c,))"
        )
    return [left, *([] if right is None else [right]), *more]


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
    operands = _operands(equation, left, right, more)
    return _factors(*_letters(equation.replace(" ", ""), operands), operands, constraint)


def _factors(
    terms: Sequence[str], output: str, operands: Sequence[Tensor], constraint: str | None
) -> Scales:
    sizes = _sizes(terms, operands)
    every = math.prod(list(sizes.values()))
    factors = {"output": inverse(every // (math.prod([sizes[c] for c in output]) or 1))}
    for name, term, x in zip(("left", "right"), terms, operands, strict=False):
        own = math.prod([size for i, size in enumerate(x.shape) if term.index(term[i]) == i])
        factors[name] = inverse(every // (own or 1))
    if constraint and len(operands) > 2:  # the table has no factors for further operands
        constraint = "to_output_scale"
    return tie(constraint, **factors)


def _torch_einsum(*args: Any) -> dict[str, Any]:
    equation, (left, *rest) = as_equation(args)
    return {
        "equation": equation,
        "left": left,
        "right": rest[0] if rest else None,
        "more": tuple(rest[1:]),
    }


def _torch_tensordot(a: Tensor, b: Tensor, dims: Any = 2, out: Any = None) -> dict[str, Any]:
    dims = dims.tolist() if isinstance(dims, Tensor) else dims
    if isinstance(dims, int):
        dims = (range(a.ndim - dims, a.ndim), range(dims))
    first = list(string.ascii_letters[: a.ndim])
    second = list(string.ascii_letters[a.ndim : a.ndim + b.ndim])
    for i, j in zip(*dims, strict=True):
        second[j] = first[i]
    output = [c for c in (*first, *second) if not (c in first and c in second)]
    equation = f"{''.join(first)},{''.join(second)}->{''.join(output)}"
    return {"equation": equation, "left": a, "right": b, "out": out}


def _torch_inner(input: Tensor, other: Tensor) -> dict[str, Any]:
    if not (input.ndim and other.ndim):
        return {"equation": "...,...->...", "left": input, "right": other}
    return _torch_tensordot(input, other, ([-1], [-1]))


def _torch_vecdot(x: Tensor, y: Tensor, *, dim: int = -1) -> dict[str, Any]:
    left, right = x.conj().movedim(dim, -1), y.movedim(dim, -1)
    return {"equation": "...i,...i->...", "left": left, "right": right}


@row(
    einsum_scales,
    adapters={
        torch.einsum: _torch_einsum,
        torch.tensordot: _torch_tensordot,
        torch.inner: _torch_inner,
        torch.Tensor.inner: _torch_inner,
        torch.linalg.vecdot: _torch_vecdot,
    },
)
def einsum(
    equation: str,
    left: Tensor,
    right: Tensor | None = None,
    more: Sequence[Tensor] = (),
    constraint: str | None = "to_output_scale",
) -> Tensor:
    """Computes ``s * einsum(equation, left, right, *more)``.

    Two operands are multiplied by one (batched) matrix product, more by products of two, in the
    order of `torch.einsum`.

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
    operands = _operands(equation, left, right, more)
    terms, output = _letters(equation.replace(" ", ""), operands)
    equation = f"{','.join(terms)}->{output}"
    if len(operands) > 2:
        tied = "to_output_scale" if constraint else None
        return in_pairs(equation, operands, partial(einsum, constraint=tied))
    s = _factors(terms, output, operands, constraint)
    if len(operands) == 2 and sums_products(equation, operands):
        scales = (s["output"], s["left"], s["right"])
        product = as_matmul(equation, operands, scales=scales, unit=True)
        if product is not None:
            return product
    named = dict(zip(("left", "right"), operands, strict=False))
    return scaled(lambda *xs: torch.einsum(equation, *xs), named, s)
