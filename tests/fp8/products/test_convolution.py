import pytest
import torch
from torch.nn import functional as F

import fp8
from fp8 import Cast, Recipe
from fp8.products.convolution import conv, conv_transpose
from tests.fp8.products.test_matmul import RECIPES, SCALES, check, every, randn
from tests.reference import NONE, assert_within, product

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
    (F.conv2d, conv, (2, 4, 6, 5), (6, 4, 3, 2), {"padding": "same", "dilation": (1, 3)}),
    (F.conv2d, conv, (4, 6, 5), (6, 2, 1, 1), {"groups": 2}),
    (F.conv3d, conv, (2, 3, 4, 5, 4), (4, 3, 2, 3, 1), {"padding": 1}),
    (F.conv_transpose1d, conv_transpose, (2, 4, 9), (4, 6, 3), {}),
    (F.conv_transpose1d, conv_transpose, (4, 9), (4, 3, 3), {"stride": 2, "groups": 2}),
    (
        F.conv_transpose2d,
        conv_transpose,
        (2, 4, 5, 4),
        (4, 3, 3, 2),
        {"stride": 2, "padding": (1, 0), "output_padding": 1, "dilation": (2, 1), "groups": 2},
    ),
    (F.conv_transpose3d, conv_transpose, (2, 3, 3, 2, 3), (3, 4, 2, 2, 1), {"padding": (1, 0, 0)}),
]


@pytest.mark.sampled(3)
@every
@pytest.mark.parametrize(("torchs", "ours", "input", "weight", "kwargs"), CASES)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_against_float64(torchs, ours, input, weight, kwargs, dtype, recipe):
    operands = randn(*input, dtype=dtype), randn(*weight, dtype=dtype)

    if kwargs.get("padding") == "same" and recipe.input and recipe.input.tile != (0, 0):
        kwargs = kwargs | {"padding": 1}  # the zeros of "same" would move the reference's tiles

    def function(x, w, **scaled):
        return ours(x, w, **kwargs, **scaled)

    check(function, lambda x, w: torchs(x, w, **kwargs), operands, recipe)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
@pytest.mark.parametrize(
    ("torchs", "ours", "input", "weight"), [c[:4] for c in (CASES[1], CASES[7], CASES[11])]
)
def test_bias(torchs, ours, input, weight, recipe):
    x, w, b = randn(*input), randn(*weight), randn(6)
    with fp8.autocast(recipe):
        y = ours(x, w, b, scales=SCALES)
    grad = randn(*y.shape, seed=2).detach()
    values, magnitudes = product(torchs, (x, w), grad, SCALES, recipe)
    channels = b.detach().double().reshape(-1, *[1] * (len(weight) - 2))
    assert_within(y.detach(), values[0] + channels, magnitudes[0] + channels.abs(), y.dtype)
    (db,) = torch.autograd.grad(y, b, grad)
    others = [d for d in range(y.dim()) if d != y.dim() - len(weight) + 1]
    total = SCALES[2] * grad.double()
    assert_within(db, total.sum(others), total.abs().sum(others), y.dtype)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (1, 2)])
def test_gradients_only_where_asked_for(wanted):
    tensors = [randn(2, 4, 9), randn(6, 4, 3), randn(6)]
    expected = torch.autograd.grad(conv(*tensors, scales=SCALES).sum(), tensors)
    leaves = [t.detach().requires_grad_(i in wanted) for i, t in enumerate(tensors)]
    conv(*leaves, scales=SCALES).sum().backward()
    for i, leaf in enumerate(leaves):
        assert torch.equal(leaf.grad, expected[i]) if i in wanted else leaf.grad is None


def test_double_backward():
    x, w = randn(2, 4, 9, dtype=torch.float64), randn(6, 4, 3, dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda x, w: conv(x, w, scales=(0.5, 0.5, 0.5)), (x, w))
    with fp8.autocast(Recipe(name="grad only", grad=Cast(format="e5m2"))):
        y = conv(x, w)
    g = randn(*y.shape, dtype=torch.float64, seed=3)
    (dx,) = torch.autograd.grad(y, x, g, create_graph=True)
    (dw,) = torch.autograd.grad(dx.sum(), w)
    _, expected = torch.autograd.functional.vjp(
        lambda w: torch.autograd.grad(
            F.conv1d(x, w), x, fp8.quantize(g, "e5m2"), create_graph=True
        )[0].sum(),
        w,
    )
    torch.testing.assert_close(dw, expected)


def test_vmap():
    x, w = randn(3, 2, 4, 9).detach(), randn(6, 4, 3).detach()
    y = torch.func.vmap(lambda x: conv(x, w, scales=SCALES))(x)
    torch.testing.assert_close(y, torch.stack([conv(one, w, scales=SCALES) for one in x]))


def test_channels_last():
    x = randn(2, 4, 6, 5).to(memory_format=torch.channels_last)
    check(conv, F.conv2d, (x, randn(6, 4, 3, 2)), NONE)


def test_torch_autocast():
    x, w, b = randn(2, 4, 9), randn(6, 4, 3), randn(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with fp8.autocast("unit"):
            y = conv(x, w, b)
        expected = F.conv1d(fp8.quantize(x, "e4m3"), fp8.quantize(w, "e4m3"), b)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_what_does_not_fit_is_refused(recipe):
    x, w = randn(2, 4, 6, 5), randn(6, 4, 3, 2)
    calls = [
        lambda: conv(x[0, 0], w[:, :, 0, 0]),
        lambda: conv(x[None], w),
        lambda: conv(x[0, 0], w),
        lambda: conv_transpose(x[0, 0], w),
        lambda: conv(x, w, stride=(1, 2, 3)),
        lambda: conv(x, w, padding="full"),
        lambda: conv(x, w, stride=2, padding="same"),
    ]
    with fp8.autocast(recipe):
        for call in calls:
            with pytest.raises((RuntimeError, TypeError, ValueError)):
                call()
