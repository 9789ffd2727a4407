"""`torch.einsum` under a recipe. Two operands become one product of (batches of) matrices, more
become products of two."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from ..casts.casting import cast_backward, cast_forward, is_whole
from ..casts.counts import product_name
from ..casts.operands import Exponents
from ..context.active import histories, static_exponents
from ..recipes.recipe import Recipe
from .matmul import ONES, matmul
from .summed import Scales, warn_unsummed

aten = torch.ops.aten


def einsum(equation: str, operands: list[Tensor], recipe: Recipe) -> Tensor | str:
    """Computes an equation with `fp8.products.matmul.matmul` where possible.

    With a repeated index in one operand or a sum over a broadcast size, torch computes it from
    operands cast once, and the gradient of the result is cast. With scales by rows or blocks this
    is not defined, and a string that says so is returned.
    """
    if len(operands) > 2 and _is_regular(*letters(equation, operands), operands):
        return in_pairs(equation, operands, lambda pair, *two: _pair(pair, [*two], recipe))
    static = static_exponents(recipe, *operands)
    y = as_matmul(equation, operands, static=static)
    if y is not None:
        return y
    if not is_whole(recipe):
        return "a scale by rows or blocks needs one axis to sum over; write products of two"
    warn_unsummed(recipe, "an einsum that is not one product")
    cast, name = recipe.input, product_name("einsum", None, recipe)
    *of, of_grad = histories(recipe, "einsum", operands, *[cast] * len(operands), recipe.grad)
    operands = [
        cast_forward(t, cast, -1, history, name, f"input {i}", exponent)
        for i, (t, history, exponent) in enumerate(zip(operands, of, static, strict=True), 1)
    ]
    y = aten.einsum.default(equation, operands)
    return cast_backward(y, recipe.grad, of_grad, name)


def _is_regular(terms: Sequence[str], output: str, operands: Sequence[Tensor]) -> bool:
    """Whether no operand repeats an index, and no sum is over a broadcast size."""
    sizes: dict[str, set[int]] = {}
    for term, operand in zip(terms, operands, strict=True):
        for letter, size in zip(term, operand.shape, strict=True):
            sizes.setdefault(letter, set()).add(size)
    summed = sizes.keys() - {*output}
    return all(len({*t}) == len(t) for t in terms) and all(len(sizes[c]) == 1 for c in summed)


def _pair(equation: str, operands: list[Tensor], recipe: Recipe) -> Tensor:
    """A product of two with the casts of a recipe, where it sums products."""
    if sums_products(equation, operands):
        y = einsum(equation, operands, recipe)
        assert isinstance(y, Tensor)
        return y
    return aten.einsum.default(equation, operands)


def in_pairs(equation: str, operands: list[Tensor], einsum: Callable[..., Tensor]) -> Tensor:
    """The value of an equation of three or more operands, by products of two from the left.

    einsum: (equation, operand, operand) -> the product of two.
    """
    terms, output = letters(equation, operands)
    kept, value = terms[0], operands[0]
    for number, (term, operand) in enumerate(zip(terms[1:], operands[1:], strict=True), 2):
        later = {*output, *"".join(terms[number:])}
        left = "".join(dict.fromkeys(c for c in kept + term if c in later))
        left = output if number == len(terms) else left
        value, kept = einsum(f"{kept},{term}->{left}", value, operand), left
    return value


def as_matmul(
    equation: str,
    operands: list[Tensor],
    *,
    scales: Scales = ONES,
    static: Exponents | None = None,
    unit: bool = False,
) -> Tensor | None:
    """The value of an equation that is one product of matrices; None for others.

    scales, static, unit: as in `fp8.products.matmul.matmul`.
    """
    if len(operands) != 2:
        return None
    (first, second), output = letters(equation, operands)
    a, b = operands
    if len({*first}) < len(first) or len({*second}) < len(second):
        return None
    size = dict(zip(second, b.shape, strict=True)) | dict(zip(first, a.shape, strict=True))
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
    y = matmul(
        left.reshape(*left.shape[:head], m, k),
        right.reshape(*right.shape[:head], k, n),
        scales=scales,
        static=static,
        unit=unit,
    )
    y = y.reshape((*y.shape[:head], *[size[c] for c in (*rows, *columns)]))
    order = [*batch, *rows, *columns]
    over = [i for i, c in enumerate(order) if c not in output]
    if over:
        y, order = y.sum(over), [c for c in order if c in output]
    return y.permute([order.index(c) for c in output])


def letters(equation: str, operands: list[Tensor]) -> tuple[list[str], str]:
    """The indices of each operand and of the result, one letter per dimension."""
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    if not arrow:
        once = sorted(c for c in {*inputs} & {*string.ascii_letters} if inputs.count(c) == 1)
        output = "".join(["..." if "..." in inputs else "", *once])
    hidden = [x.ndim - len(t.replace("...", "")) for t, x in zip(terms, operands, strict=True)]
    dots = "".join(c for c in string.ascii_letters if c not in equation)[: max(hidden)]
    terms = [t.replace("...", dots[len(dots) - n :]) for t, n in zip(terms, hidden, strict=True)]
    return terms, output.replace("...", dots)


def as_equation(args: tuple[Any, ...]) -> tuple[str, list[Any]]:
    """The arguments of torch.einsum, in any of its three forms, as (equation, operands)."""
    if isinstance(args[0], str):
        listed = len(args) == 2 and isinstance(args[1], list | tuple)
        return args[0].replace(" ", ""), list(args[1] if listed else args[1:])

    def term(indices: Sequence[Any]) -> str:
        return "".join("..." if i is Ellipsis else string.ascii_letters[i] for i in indices)

    pairs = list(zip_longest(args[::2], args[1::2]))
    output = pairs.pop()[0] if len(args) % 2 else None
    equation = ",".join(term(indices) for _, indices in pairs)
    equation += "" if output is None else f"->{term(output)}"
    return equation, [t for t, _ in pairs]


def is_of_more(args: tuple[Any, ...]) -> bool:
    """Whether the arguments of torch.einsum hold more than two operands."""
    given = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args
    return sum(isinstance(value, Tensor) for value in given) > 2


def sums_products(equation: str, operands: list[Tensor]) -> bool:
    """Whether operands share a summed index of size greater than one. False for an equation of
    another number of operands."""
    if equation.partition("->")[0].count(",") + 1 != len(operands):
        return False
    terms, output = letters(equation, operands)
    for letter in {*"".join(terms)} - {*output}:
        pairs = zip(terms, operands, strict=True)
        sizes = [x.shape[term.index(letter)] for term, x in pairs if letter in term]
        if len(sizes) > 1 and max(sizes) > 1:
            return True
    return False
