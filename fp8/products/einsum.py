"""`torch.einsum` under a recipe. Two operands become one product of (batches of) matrices."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch.backends import opt_einsum

from .matmul import matmul


def in_pairs(
    equation: str,
    operands: Sequence[Tensor],
    product: Callable[..., Tensor] = torch.einsum,
) -> Tensor:
    """An equation of three operands or more as products of two, in the order that `torch.einsum`
    would take. product: called with an equation of two operands and these."""
    terms, output = letters(equation, operands)
    order = _order(f"{','.join(terms)}->{output}", operands)
    return contracted(list(zip(terms, operands, strict=True)), order, output, product)


def contracted(
    terms: list[tuple[str, Tensor]],
    order: list[tuple[int, int, int]],
    output: str,
    product: Callable[..., Tensor],
) -> Tensor:
    """The value of an equation with these terms. Recursive: each product has its own stack."""
    if not order:
        return terms[0][1]
    (i, j, place), *others = order
    (second, b), (first, a) = terms.pop(j), terms.pop(i)
    later = {*output}.union(*(term for term, _ in terms))
    indices = [*output, *sorted({*first, *second} - {*output})]
    result = "".join(c for c in indices if c in later and c in first + second)
    terms.insert(place, (result, product(f"{first},{second}->{result}", a, b)))
    return contracted(terms, others, output, product)


def _order(equation: str, operands: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """The positions of two operands and of their product among what is left of both, step by step:
    from the left, or in the order of the package opt_einsum where torch uses it."""
    last = len(operands) - 2
    if not opt_einsum.enabled:
        return [(0, 1, 0)] * (last + 1)
    find = opt_einsum.get_opt_einsum().contract_path
    path = find(equation, *operands, optimize=opt_einsum.strategy)[0]
    return [(min(pair), max(pair), last - step) for step, pair in enumerate(path)]


def as_matmul(equation: str, operands: list[Tensor], **options: Any) -> Tensor | None:
    """The value of an equation that is one `matmul`, with these options; None for others."""
    if len(operands) != 2:
        return None
    (first, second), output = letters(equation, operands)
    a, b = operands
    if len({*first}) < len(first) or len({*second}) < len(second):
        return None
    size = dict(zip(second, b.shape, strict=True)) | dict(
        zip(first, a.shape, strict=True)
    )
    batch = [c for c in first if c in second and c in output]
    inner = [c for c in first if c in second and c not in output]
    rows = [c for c in first if c not in second]
    columns = [c for c in second if c not in first]
    if any(a.shape[first.index(c)] != b.shape[second.index(c)] for c in inner):
        return None
    left = a.permute([first.index(c) for c in (*batch, *rows, *inner)])
    right = b.permute([second.index(c) for c in (*batch, *inner, *columns)])
    m, k, n = [math.prod([size[c] for c in group]) for group in (rows, inner, columns)]
    head = len(batch)
    left, right = (
        left.reshape(*left.shape[:head], m, k),
        right.reshape(*right.shape[:head], k, n),
    )
    y = matmul(left, right, **options)
    y = y.reshape((*y.shape[:head], *[size[c] for c in (*rows, *columns)]))
    order = [*batch, *rows, *columns]
    over = [i for i, c in enumerate(order) if c not in output]
    if over:
        y, order = y.sum(over), [c for c in order if c in output]
    return y.permute([order.index(c) for c in output])


def letters(equation: str, operands: Sequence[Tensor]) -> tuple[list[str], str]:
    """The indices of each operand and of the result, one letter per dimension."""
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    if not arrow:
        once = sorted(
            c for c in {*inputs} & {*string.ascii_letters} if inputs.count(c) == 1
        )
        output = "".join(["..." if "..." in inputs else "", *once])
    hidden = [
        x.ndim - len(t.replace("...", "")) for t, x in zip(terms, operands, strict=True)
    ]
    dots = "".join(c for c in string.ascii_letters if c not in equation)[: max(hidden)]
    terms = [
        t.replace("...", dots[len(dots) - n :])
        for t, n in zip(terms, hidden, strict=True)
    ]
    return terms, output.replace("...", dots)


def as_equation(args: tuple[Any, ...]) -> tuple[str, list[Any]]:
    """The arguments of torch.einsum, in any of its three forms, as (equation, operands)."""
    if isinstance(args[0], str):
        listed = len(args) == 2 and isinstance(args[1], list | tuple)
        return args[0].replace(" ", ""), list(args[1] if listed else args[1:])

    def term(indices: Sequence[Any]) -> str:
        return "".join(
            "..." if i is Ellipsis else string.ascii_letters[i] for i in indices
        )

    pairs = list(zip_longest(args[::2], args[1::2]))
    output = pairs.pop()[0] if len(args) % 2 else None
    equation = ",".join(term(indices) for _, indices in pairs)
    equation += "" if output is None else f"->{term(output)}"
    return equation, [t for t, _ in pairs]


def sums_products(equation: str, operands: list[Tensor]) -> bool:
    """Whether operands, as many as the equation has, share a summed index of size above one."""
    if equation.partition("->")[0].count(",") + 1 != len(operands):
        return False
    terms, output = letters(equation, operands)
    for letter in {*"".join(terms)} - {*output}:
        pairs = zip(terms, operands, strict=True)
        sizes = [x.shape[term.index(letter)] for term, x in pairs if letter in term]
        if len(sizes) > 1 and max(sizes) > 1:
            return True
    return False
