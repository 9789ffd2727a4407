"""Groups of rows or columns, by the offsets of their ends."""

import torch

from fp8.casts.groups import pieces, product_shape
from tests.shared import parametrize

ENDS = torch.tensor([1, 1, 4], dtype=torch.int32)


@parametrize(
    "shape, axis, shapes",
    [
        ((5, 2), 0, [(1, 2), (0, 2), (3, 2)]),
        ((2, 5), 1, [(2, 1), (2, 0), (2, 3)]),
        ((3, 5, 2), 0, [(5, 2)] * 3),
    ],
)
def test_pieces_are_views(shape, axis, shapes):
    x = torch.zeros(shape)
    found = pieces(x, ENDS, axis)
    assert [tuple(piece.shape) for piece in found] == shapes
    found[2].add_(1)
    assert x.sum() == found[2].numel()


@parametrize(
    "first, second, offs, shape",
    [
        ((5, 2), (3, 2, 4), ENDS, [5, 4]),
        ((3, 5, 2), (3, 2, 4), None, [3, 5, 4]),
        ((2, 5), (5, 4), ENDS, [3, 2, 4]),
        ((3, 2, 5), (5, 4), ENDS, [2, 4]),
    ],
)
def test_the_shape_of_a_product(first, second, offs, shape):
    assert product_shape(torch.empty(first), torch.empty(second), offs) == shape
