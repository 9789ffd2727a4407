"""`torch.einsum` under a recipe. Two operands become one product of (batches of) matrices."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.backends import opt_einsum

from ..casts.operands import ONES, Scales
from ..torch_internals import Arguments
from .matmul import matmul


def in_pairs(
    equation: str,
    operands: Sequence[Tensor],
    product: Callable[..., Tensor] = torch.einsum,
) -> Tensor:
    """An equation of three operands or more as products of two, in the order that `torch.einsum`
    would take. product: called with an equation of two operands and these."""
    terms, output = letters(equation, operands)
    left = list(zip(terms, operands, strict=True))
    for i, j, place in _order(f"{','.join(terms)}->{output}", operands):
        second, b = left.pop(j)
        first, a = left.pop(i)
        later = {*output}
        for term, _ in left:
            later.update(term)
        indices = [*output, *sorted({*first, *second} - {*output})]
        kept = [c for c in indices if c in later and c in first + second]
        result = "".join(kept)
        value = product(f"{first},{second}->{result}", a, b)
        left.insert(place, (result, value))
    return left[0][1]


def _order(equation: str, operands: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Step by step, the places of two operands among those that are left, and the place of their
    product: from the left, or as the package opt_einsum chooses where torch finds it."""
    steps = len(operands) - 1
    if not (opt_einsum.enabled and opt_einsum.is_available()):
        return [(0, 1, 0)] * steps
    # From the left, "er,rd,bd->be" has 32 times the operations at r = 16 and d = e = 1024.
    find = opt_einsum.get_opt_einsum().contract_path
    path, _ = find(equation, *operands, optimize=opt_einsum.strategy)
    order = []
    for step, pair in enumerate(path, start=1):
        i, j = sorted(pair)
        order.append((i, j, steps - step))
    return order


def as_matmul(
    equation: str,
    operands: list[Tensor],
    *,
    scales: Scales = ONES,
    unit: bool = False,
) -> Tensor | None:
    """The value of an equation that is one `matmul`, with these options; None for others."""
    if len(operands) != 2:
        return None
    (first, second), output = letters(equation, operands)
    a, b = operands
    if len({*first}) < len(first) or len({*second}) < len(second):
        return None
    size = dict(zip(second, b.shape, strict=True))
    size.update(zip(first, a.shape, strict=True))
    shared = [c for c in first if c in second]
    batch = [c for c in shared if c in output]
    inner = [c for c in shared if c not in output]
    rows = [c for c in first if c not in second]
    columns = [c for c in second if c not in first]
    if any(size[c] != b.shape[second.index(c)] for c in inner):
        return None
    left = a.permute([first.index(c) for c in (*batch, *rows, *inner)])
    right = b.permute([second.index(c) for c in (*batch, *inner, *columns)])
    m = math.prod([size[c] for c in rows])
    k = math.prod([size[c] for c in inner])
    n = math.prod([size[c] for c in columns])
    head = len(batch)
    left = left.reshape(*left.shape[:head], m, k)
    right = right.reshape(*right.shape[:head], k, n)
    y = matmul(left, right, scales=scales, unit=unit)
    free = [*rows, *columns]
    y = y.reshape([*y.shape[:head], *[size[c] for c in free]])
    order = [*batch, *free]
    # What one operand alone has, and the result has not, is summed after the product.
    over = [i for i, c in enumerate(order) if c not in output]
    if over:
        y = y.sum(over)
        order = [c for c in order if c in output]
    return y.permute([order.index(c) for c in output])


def letters(equation: str, operands: Sequence[Tensor]) -> tuple[list[str], str]:
    """The indices of each operand and of the result, one letter per dimension."""
    inputs, arrow, output = equation.partition("->")
    if not arrow:
        # The order is torch's: the dimensions of the ellipsis, then what occurs once, by the
        # alphabet.
        once = [c for c in sorted({*inputs} - {*",."}) if inputs.count(c) == 1]
        output = "".join(once)
        if "..." in inputs:
            output = "..." + output
    terms = inputs.split(",")
    hidden = []
    for term, x in zip(terms, operands, strict=True):
        hidden.append(x.ndim - len(term.replace("...", "")))
    free = [c for c in string.ascii_letters if c not in equation]
    dots = "".join(free[: max(hidden)])
    named = []
    for term, count in zip(terms, hidden, strict=True):
        named.append(term.replace("...", dots[len(dots) - count :]))
    return named, output.replace("...", dots)


def as_equation(args: Arguments) -> tuple[str, list[Tensor]]:
    """The arguments of torch.einsum, in any of its three forms, as (equation, operands)."""
    if isinstance(args[0], str):
        if isinstance(args[-1], list | tuple):
            args = (args[0], *args[-1])
        return args[0].replace(" ", ""), [*args[1:]]

    def term(indices: Sequence[Any]) -> str:
        letters = [*string.ascii_letters, "..."]
        return "".join(letters[-1 if i is Ellipsis else i] for i in indices)

    operands = args[: len(args) // 2 * 2 : 2]
    equation = ",".join(map(term, args[1::2]))
    if len(args) % 2:
        equation += f"->{term(args[-1])}"
    return equation, [*operands]


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
