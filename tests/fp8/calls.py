"""One call of every function in PRODUCTS, and what is cast in it."""

import operator
from collections import namedtuple

import torch
from torch.nn import functional as F

import fp8
from fp8 import Cast, Recipe
from tests.shared import normal, pairs

A, B, V = (5, 8), (8, 6), (8,)
BATCH = ((3, 5, 8), (3, 8, 6))
IMAGE = {
    1: ((2, 4, 9), (6, 4, 3)),
    2: ((2, 4, 5, 6), (6, 4, 3, 2)),
    3: ((1, 2, 4, 5, 4), (3, 2, 2, 3, 1)),
}
BACK = {
    1: ((2, 4, 9), (4, 6, 3)),
    2: ((2, 4, 5, 6), (4, 3, 3, 2)),
    3: ((1, 2, 4, 5, 4), (2, 3, 2, 3, 1)),
}

# Every operand is its own e4m3 value times this, so that a cast changes each and is seen.
OFF = 1 + 2**-5

COARSE = Recipe(
    name="coarse",
    input=Cast(format="e3m2"),
    weight=Cast(format="e2m1"),
    grad=Cast(format="e2m3"),
)


PLAIN = (), ("input", "input"), (), {}
Row = namedtuple("Row", "shapes names kinds before kwargs", defaults=PLAIN)
"""How to call one function of PRODUCTS: the operands that are cast, and as what; before: positional
arguments before the operands."""


def _added(shape, *shapes, names, **kw):
    return Row((shape, *shapes), ("input", *names), ("none", "input", "input"), **kw)


def _each(row, *functions):
    return dict.fromkeys(functions, row)


MATMUL = Row((A, B), ("input", "other"))
ADDMM = _added((6,), A, B, names=("mat1", "mat2"))
BADDBMM = _added((3, 5, 6), *BATCH, names=("batch1", "batch2"))
BIASED, ROWS = ("input", "weight", "bias"), ("input", "weight", "none")
T = torch.Tensor

CALLS = {
    F.linear: Row((A, (6, 8), (6,)), BIASED, ROWS),
    **_each(MATMUL, torch.matmul, torch.linalg.matmul, T.matmul),
    **_each(Row((A, B)), T.__matmul__, operator.matmul),
    T.__rmatmul__: Row((B, A)),
    **_each(Row((A, B), ("input", "mat2")), torch.mm, T.mm),
    **_each(Row(BATCH, ("input", "mat2")), torch.bmm, T.bmm),
    **_each(Row((A, V), ("input", "vec")), torch.mv, T.mv),
    **_each(ADDMM, torch.addmm, T.addmm),
    **_each(BADDBMM, torch.baddbmm, T.baddbmm),
    torch.einsum: Row((A, B), before=("ij,jk->ki",)),
    F.conv1d: Row((*IMAGE[1], (6,)), BIASED, ROWS, kwargs={"padding": 1}),
    F.conv2d: Row((*IMAGE[2], (6,)), BIASED, ROWS, kwargs={"stride": 2}),
    F.conv3d: Row((*IMAGE[3], (3,)), BIASED, ROWS),
    F.conv_transpose1d: Row((*BACK[1], (6,)), BIASED, ROWS),
    F.conv_transpose2d: Row((*BACK[2], (3,)), BIASED, ROWS, kwargs={"stride": 2}),
    F.conv_transpose3d: Row((*BACK[3], (3,)), BIASED, ROWS),
    F.scaled_dot_product_attention: Row(
        ((2, 5, 8), (2, 6, 8), (2, 6, 4)), ("query", "key", "value"), ("input",) * 3
    ),
}


def operands(row, dtype=torch.float32):
    return [(normal(*s, seed=i) * OFF).to(dtype) for i, s in enumerate(row.shapes)]


def forms(function, row, tensors):
    """The call as each form writes it."""
    yield "positional", lambda: function(*row.before, *tensors, **row.kwargs)
    if row.names:
        method = function in vars(torch._C.TensorBase).values()
        first, named = (tensors[:1], row.names[1:]) if method else ([], row.names)
        values = dict(pairs(named, tensors[len(first) :]))
        yield "keyword", lambda: function(*first, *row.before, **values, **row.kwargs)


def cast(x, how):
    return x if how is None else fp8.quantize(x, how.format)
