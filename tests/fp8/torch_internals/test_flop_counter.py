"""FLOPs that torch's counter finds in a converted layer: those of the plain one."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fp8
from fp8 import RECIPES
from fp8.kernels.product import why_not_recipe
from fp8.torch_internals.flop_counter import _flops
from tests.launch import python
from tests.shared import filterwarnings, parametrize

UNROTATED = [
    name
    for name, recipe in RECIPES.items()
    if not any(cast is not None and cast.hadamard for cast in recipe.casts)
]
NATIVE = "unit tensor delayed static static_gw_hp row row_gw_hp".split()
LAYERS = {
    "linear": (nn.Linear(64, 48), (32, 64)),
    "without bias": (nn.Linear(48, 64, bias=False), (2, 16, 48)),
    "conv": (nn.Conv1d(8, 16, 3), (4, 8, 20)),
}


def flops(layer, x):
    with FlopCounterMode(display=False) as counter:
        layer(x.detach().requires_grad_()).sum().backward()
    return counter.get_total_flops()


@parametrize("recipe", UNROTATED)
@parametrize("kind", LAYERS)
@filterwarnings("ignore::fp8.warnings.RecipeWarning")
def test_a_simulated_layer_has_those_of_the_plain_one(kind, recipe):
    layer, shape = LAYERS[kind]
    if kind == "conv" and RECIPES[recipe].accumulate:
        pytest.skip("a convolution has the sums of torch, with a warning")
    x = torch.randn(shape)
    simulated = fp8.convert(deepcopy(layer), recipe, backend="simulate")
    assert 0 < flops(simulated, x) == flops(layer, x)


@pytest.mark.native
@parametrize("recipe", NATIVE)
@parametrize("kind", ["linear", "without bias"])
@filterwarnings("ignore::fp8.warnings.RecipeWarning")
def test_a_native_layer_has_those_of_the_plain_one(kind, recipe):
    layer, shape = LAYERS[kind]
    x = torch.randn(shape)
    native = fp8.convert(deepcopy(layer), recipe, backend="native")
    assert not why_not_recipe(RECIPES[recipe])
    assert 0 < flops(native, x) == flops(layer, x)


def test_grouped_products():
    """Those of a loop over the experts, whatever is split."""
    offs = torch.tensor([16, 16, 48], dtype=torch.int32)
    x, experts = (
        torch.randn(48, 32, requires_grad=True),
        torch.randn(3, 32, 16, requires_grad=True),
    )
    with FlopCounterMode(display=False) as counter, fp8.autocast("tensor"):
        nn.functional.grouped_mm(x, experts, offs=offs).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 48 * 32 * 16
    for first, second, output, groups in (
        ((6, 4), (4, 8), (6, 8), 1),
        ((3, 6, 4), (3, 4, 8), (3, 6, 8), 3),
        ((6, 4), (3, 4, 8), (6, 8), 1),
        ((3, 6, 4), (4, 8), (6, 8), 1),
    ):
        shapes = map(torch.empty, (first, second))
        assert _flops(*shapes, out_val=torch.empty(output)) == groups * 384
    packed = torch.empty(6, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    assert _flops(packed, packed, out_val=torch.empty(6, 8)) == 384


LATE = """
import os, sys, torch, fp8
from torch import nn
assert "torch.utils.flop_counter" not in sys.modules
layer, x = fp8.convert(nn.Linear(64, 48), "row", backend="native"), torch.randn(32, 64)
first = os.fork()  # what takes seconds is imported once
if not first:
    layer(x)
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    layer(x).sum().backward()
assert counter.get_total_flops() == 4 * 32 * 64 * 48, counter.get_total_flops()
if first:
    assert os.waitpid(first, 0)[1] == 0
"""


@pytest.mark.native
def test_a_counter_is_open_before_the_first_product_or_made_after_it():
    """It has copied torch's table; importing fp8 does not import it."""
    python("-c", LATE, warnings="default")
