import torch
from torch.nn import functional as F

import fp8
from fp8.products.convolution import conv, conv_transpose
from tests.fp8.products.test_matmul import RECIPES, SCALES, check, every
from tests.shared import (
    assert_close,
    filterwarnings,
    parametrize,
    randn,
    refuses,
    sampled,
)

# (torch's function, ours, input, weight, arguments)
CASES = [
    (F.conv1d, conv, (2, 4, 9), (6, 4, 3), {}),
    (F.conv1d, conv, (4, 9), (6, 4, 3), {"padding": 1}),
    (F.conv1d, conv, (2, 4, 9), (6, 2, 3), {"stride": 2, "groups": 2}),
    (F.conv1d, conv, (2, 4, 9), (4, 1, 4), {"padding": "same", "groups": 4}),
    (F.conv1d, conv, (2, 4, 9), (6, 4, 3), {"padding": "valid", "dilation": 2}),
    (F.conv1d, conv, (2, 4, 1), (4, 1, 1), {"groups": 4}),
    (F.conv1d, conv, (0, 4, 9), (6, 4, 3), {}),
    (F.conv2d, conv, (2, 4, 6, 5), (6, 4, 3, 2), {"padding": (1, 0), "stride": (2, 1)}),
    (
        F.conv2d,
        conv,
        (2, 4, 6, 5),
        (6, 4, 3, 2),
        {"padding": "same", "dilation": (1, 3)},
    ),
    (F.conv2d, conv, (4, 6, 5), (6, 2, 1, 1), {"groups": 2}),
    (F.conv3d, conv, (2, 3, 4, 5, 4), (4, 3, 2, 3, 1), {"padding": 1}),
    (F.conv_transpose1d, conv_transpose, (2, 4, 9), (4, 6, 3), {}),
    (F.conv_transpose1d, conv_transpose, (4, 9), (4, 3, 3), {"stride": 2, "groups": 2}),
    (
        F.conv_transpose2d,
        conv_transpose,
        (2, 4, 5, 4),
        (4, 3, 3, 2),
        {
            "stride": 2,
            "padding": (1, 0),
            "output_padding": 1,
            "dilation": (2, 1),
            "groups": 2,
        },
    ),
    (
        F.conv_transpose3d,
        conv_transpose,
        (2, 3, 3, 2, 3),
        (3, 4, 2, 2, 1),
        {"padding": (1, 0, 0)},
    ),
]


@sampled(3)
@every
@parametrize("torchs, ours, input, weight, kwargs", CASES)
@filterwarnings("ignore:Using padding='same' with even kernel")
def test_against_float64(torchs, ours, input, weight, kwargs, dtype, recipe):
    operands = randn(*input, dtype=dtype), randn(*weight, dtype=dtype)

    if kwargs.get("padding") == "same" and recipe.input and recipe.input.tile != (0, 0):
        # The zeros of "same" would move the reference's tiles.
        kwargs = kwargs | {"padding": 1}

    def function(x, w, **scaled):
        return ours(x, w, **kwargs, **scaled)

    check(function, lambda x, w: torchs(x, w, **kwargs), operands, recipe)


@parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
@parametrize("ours, input, weight", [c[1:4] for c in (CASES[1], CASES[7], CASES[11])])
def test_bias(ours, input, weight, recipe):
    """Added after the scale of the output; no cast touches its gradient."""
    x, w, b = randn(*input), randn(*weight), randn(6)
    with fp8.autocast(recipe):
        y, plain = (ours(x, w, bias, scales=SCALES) for bias in (b, None))
    assert_close(y, plain + b.view(-1, *[1] * (len(weight) - 2)))
    (db,) = torch.autograd.grad(y.sum(), b)
    assert_close(db, torch.full((6,), SCALES[2] * y.numel() / 6))


def test_double_backward():
    x, w = randn(2, 4, 9, dtype=torch.float64), randn(6, 4, 3, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(
        lambda x, w: conv(x, w, scales=(0.5, 0.5, 0.5)), (x, w)
    )


def test_padding_same_needs_stride_1():
    with refuses("padding='same' needs stride 1, got 2"):
        conv(randn(2, 4, 9), randn(6, 4, 3), stride=2, padding="same")
