"""Sums of products in Einstein's notation: einsum, tensordot, inner, vecdot."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fp8.einsum import as_equation
from fp8.matmul import matmul as matrix_product

from ..ops import Scales, row, tie
from .products import inverse, scaled

__all__ = ["einsum"]


def _parsed(equation: str, operands: Sequence[Tensor]) -> tuple[list[str], str]:
    """The indices of each operand and of the output, one letter for each dimension.

    The dimensions of an ellipsis get letters that the equation does not use, counted from the
    right, as they broadcast. Without "->" the output has the letters that occur once, sorted.
    Raises ValueError where the equation does not fit the operands.
    """
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(operands):
        raise ValueError(f"einsum {equation!r} needs {len(terms)} operands, got {len(operands)}")
    named = [t.replace("...", "") for t in terms]
    counts = [x.dim() - len(n) for x, n in zip(operands, named, strict=True)]
    for term, x, count in zip(terms, operands, counts, strict=True):
        if count < 0 or (count and "..." not in term):
            raise ValueError(f"einsum: {term!r} does not fit an operand of {x.dim()} dimensions")
    widest = (
        max(c for c, t in zip(counts, terms, strict=True) if "..." in t) if "..." in inputs else 0
    )
    spare = "".join(c for c in string.ascii_letters if c not in equation)[:widest]
    if not arrow:
        once = (c for c in sorted(set("".join(named))) if "".join(named).count(c) == 1)
        output = "..." + "".join(once)
    full = [t.replace("...", spare[widest - c :]) for t, c in zip(terms, counts, strict=True)]
    return full, output.replace("...", spare)


def _sizes(terms: Sequence[str], operands: Sequence[Tensor]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for term, x in zip(terms, operands, strict=True):
        for letter, size in zip(term, x.shape, strict=True):
            sizes[letter] = size if sizes.get(letter, 1) == 1 else sizes[letter]
    return sizes


def einsum_scales(
    equation: str,
    left: Tensor,
    right: Tensor | None = None,
    more: Sequence[Tensor] = (),
    constraint: str | None = "to_output_scale",
) -> Scales:
    """1/sqrt of what each tensor sums over: the sizes of all indices that it does not have.

    A dimension of size 1 that is broadcast counts as one it does not have.
    """
    operands = [left, *([] if right is None else [right]), *more]
    return _factors(*_parsed(equation, operands), operands, constraint)


def _factors(
    terms: Sequence[str], output: str, operands: Sequence[Tensor], constraint: str | None
) -> Scales:
    sizes = _sizes(terms, operands)
    every = math.prod(list(sizes.values()))
    factors = {"output": inverse(every // (math.prod([sizes[c] for c in output]) or 1))}
    for name, term, x in zip(("left", "right"), terms, operands, strict=False):
        own = math.prod([size for i, size in enumerate(x.shape) if term.index(term[i]) == i])
        factors[name] = inverse(every // (own or 1))
    if constraint and len(operands) > 2:  # the further operands' factors are not in the table
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


def _torch_tensordot(
    a: Tensor, b: Tensor, dims: Any = 2, out: Tensor | None = None
) -> dict[str, Any]:
    _no_out(out)
    dims = dims.tolist() if isinstance(dims, Tensor) else dims
    if isinstance(dims, int):
        dims = (range(a.dim() - dims, a.dim()), range(dims))
    first = list(string.ascii_letters[: a.dim()])
    second = list(string.ascii_letters[a.dim() : a.dim() + b.dim()])
    for i, j in zip(*dims, strict=True):
        second[j] = first[i]
    output = [c for c in (*first, *second) if not (c in first and c in second)]
    equation = f"{''.join(first)},{''.join(second)}->{''.join(output)}"
    return {"equation": equation, "left": a, "right": b}


def _torch_inner(input: Tensor, other: Tensor, *, out: Tensor | None = None) -> dict[str, Any]:
    _no_out(out)
    if not (input.dim() and other.dim()):
        return {"equation": "...,...->...", "left": input, "right": other}
    return _torch_tensordot(input, other, ([-1], [-1]))


def _torch_vecdot(
    x: Tensor, y: Tensor, *, dim: int = -1, out: Tensor | None = None
) -> dict[str, Any]:
    _no_out(out)
    left, right = x.movedim(dim, -1), y.movedim(dim, -1)
    return {"equation": "...i,...i->...", "left": left, "right": right}


def _no_out(out: object) -> None:
    if out is not None:
        raise TypeError("unit-scaled einsum has no out= argument")


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
    """``s * einsum(equation, left, right, *more)``.

    equation: as in `torch.einsum`, with or without "..." and "->". Two operands are multiplied by
    one (batched) matrix product, more of them two at a time from the left, so that a constraint
    between two operands does not exist for them: any other than None is "to_output_scale".
    Raises ValueError where the equation does not fit the operands.
    """
    operands = [left, *([] if right is None else [right]), *more]
    terms, output = _parsed(equation, operands)
    if len(operands) > 2:
        later = {*output, *"".join(terms[2:])}
        kept = "".join(dict.fromkeys(c for c in terms[0] + terms[1] if c in later))
        tied = "to_output_scale" if constraint else None
        first = einsum(f"{terms[0]},{terms[1]}->{kept}", left, right, constraint=tied)
        rest = f"{','.join((kept, *terms[2:]))}->{output}"
        return einsum(rest, first, more[0], more[1:], tied)
    s = _factors(terms, output, operands, constraint)
    groups = None if right is None else _matrix_form(terms, output, left, right)
    if groups is not None:
        assert right is not None
        return _contract(terms, output, left, right, groups, s)
    named = dict(zip(("left", "right"), operands, strict=False))
    return scaled(lambda *xs: torch.einsum(f"{','.join(terms)}->{output}", *xs), named, s)


Groups = tuple[list[str], list[str], list[str], list[str]]
"""The indices of a product of matrices: batch, rows, inner, columns."""


def _matrix_form(terms: list[str], output: str, left: Tensor, right: Tensor) -> Groups | None:
    """The indices by what they are, or None where this is no product of two batches of matrices.

    It is one if every index is batch (in all three), row or column (in one operand and the
    output) or inner (in both operands), no term repeats an index, and nothing is broadcast.
    """
    a, b = terms
    batch = [c for c in a if c in b and c in output]
    inner = [c for c in a if c in b and c not in output]
    rows = [c for c in a if c not in b]
    columns = [c for c in b if c not in a]
    repeated = any(len(set(term)) < len(term) for term in (a, b, output))
    private = not {*rows, *columns} <= set(output)
    broadcast = any(left.shape[a.index(c)] != right.shape[b.index(c)] for c in (*batch, *inner))
    if not inner or repeated or private or broadcast:
        return None
    return batch, rows, inner, columns


def _contract(
    terms: list[str], output: str, left: Tensor, right: Tensor, groups: Groups, s: Scales
) -> Tensor:
    a, b = terms
    sizes = dict(zip(a + b, (*left.shape, *right.shape), strict=True))
    batch, rows, inner, columns = groups
    *lead, m, k, n = [math.prod([sizes[c] for c in group]) for group in groups]
    lead = lead if batch else []
    x = left.permute([a.index(c) for c in (*batch, *rows, *inner)]).reshape(*lead, m, k)
    y = right.permute([b.index(c) for c in (*batch, *inner, *columns)]).reshape(*lead, k, n)
    z = matrix_product(x, y, scales=(s["output"], s["left"], s["right"]))
    order = [*batch, *rows, *columns]
    return z.reshape([sizes[c] for c in order]).permute([order.index(c) for c in output])
