"""What no recipe can do: the error says so, the same for all of them."""

import pytest
import torch
from torch import nn

import fp8
from fp8 import RECIPES, AmaxHistory, Cast
from fp8.casting import is_whole
from tests.fp8.test_matmul import randn

each_recipe = pytest.mark.parametrize("recipe", RECIPES)


@each_recipe
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64], ids=str)
def test_tensors_that_are_not_floating_point(recipe, dtype):
    layer = fp8.convert(nn.Linear(8, 8), recipe)
    error, message = TypeError, f"cannot quantize {dtype}; allowed are float32, bfloat16"
    if RECIPES[recipe].keeps_history:  # under a mode, which leaves such products to torch
        error, message = RuntimeError, "same dtype"
    with pytest.raises(error, match=message):
        layer(torch.zeros(2, 8, dtype=dtype))


@each_recipe
def test_a_second_derivative_is_computed_or_refused_by_name(recipe):
    """It needs the operands as tensors. Where bytes are kept instead there are none."""
    layer, x = fp8.convert(nn.Linear(32, 16), recipe), randn(8, 32)
    y = layer(x).square().sum()
    if is_whole(RECIPES[recipe]):
        with pytest.raises(RuntimeError, match=r"create_graph=True: .* bytes, which have no grad"):
            torch.autograd.grad(y, x, create_graph=True)
        return
    (first,) = torch.autograd.grad(y, x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert second.isfinite().all()
    assert second.any()


def test_names_that_are_not_there():
    layer = nn.Linear(8, 8)
    for use in (fp8.get_recipe, lambda name: fp8.convert(layer, name), fp8.autocast):
        with pytest.raises(ValueError, match="unknown recipe 'fp7'; choose one of 'unit', "):
            use("fp7")
        with pytest.raises(TypeError, match="a recipe must be a name or a Recipe, not int"):
            use(8)
    assert type(layer) is nn.Linear


@pytest.mark.parametrize("format", ["e2m1", "e2m3", "e3m2"])
def test_a_format_without_nan_has_nothing_to_overflow_to(format):
    with pytest.raises(ValueError, match=f"format '{format}' has neither Inf nor NaN"):
        Cast(format=format, overflow="nonfinite")
    with pytest.raises(ValueError, match=f"format '{format}' has neither Inf nor NaN"):
        fp8.quantize(torch.ones(2), format, overflow="nonfinite")


@pytest.mark.parametrize("recipe", ["block", "mxfp8", "nvfp4"])
def test_a_block_that_does_not_divide_is_shorter(recipe):
    """What is beyond a dimension counts as zeros: it is no error, and changes nothing."""
    recipe = fp8.RECIPES[recipe]
    x, w = randn(7, 150).detach(), randn(20, 150).detach()
    wide = [nn.functional.pad(t, (0, 256 - 150)) for t in (x, w)]
    with fp8.autocast(recipe):
        torch.testing.assert_close(
            nn.functional.linear(x, w), nn.functional.linear(*wide), rtol=1e-5, atol=1e-5
        )


def test_a_history_is_needed():
    with pytest.raises(ValueError, match=r"history=fp8.AmaxHistory\(\), not None"):
        fp8.autocast("delayed")
    with fp8.autocast("delayed", history=AmaxHistory()):
        assert nn.functional.linear(randn(2, 4), randn(3, 4)).shape == (2, 3)
