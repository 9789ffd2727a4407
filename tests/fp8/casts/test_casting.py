"""Casts of small operands, computed by hand."""

import pytest
import torch

from fp8 import Cast
from fp8.casts.casting import cast_forward

X = torch.tensor([[1.0, 0.3, -500.0, 0.0], [2.0**-12, 3.0, -0.4, 7.0]])
FIRST = [1.0, 0.3125, -512.0, 0.0]  # under the scale 2
CASES = {
    "no scale": (
        {"format": "e4m3"},
        [[1.0, 0.3125, -448.0, 0.0], [0.0, 3.0, -0.40625, 7.0]],
    ),
    "tensor": (
        {"format": "e4m3", "scaling": "tensor"},
        [FIRST, [0.0, 3.0, -0.40625, 7.0]],
    ),
    "row": (
        {"format": "e4m3", "scaling": "row"},
        [FIRST, [2.0**-12, 3.0, -0.40625, 7.0]],
    ),
    "toward zero": (
        {"format": "e4m3", "scaling": "row", "rounding": "toward_zero"},
        [[1.0, 0.28125, -480.0, 0.0], [2.0**-12, 3.0, -0.375, 7.0]],
    ),
    "two values a scale": (
        {"format": "e2m1", "scaling": "block", "tile": (1, 2)},
        [[1.0, 0.25, -512.0, 0.0], [0.0, 3.0, 0.0, 8.0]],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_cast_by_hand(name):
    fields, expected = CASES[name]
    assert cast_forward(X, Cast(**fields)).tolist() == expected


def test_gradients_pass_straight_through_and_no_cast_is_the_operand():
    x, g = X.clone().requires_grad_(), torch.randn(2, 4)
    y = cast_forward(x, Cast(format="e2m1", scaling="tensor"))
    (grad,) = torch.autograd.grad(y, x, g)
    assert torch.equal(grad, g)
    assert cast_forward(x, None) is x
