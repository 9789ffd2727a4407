import math

import pytest
import torch

from fp8 import FORMATS
from fp8.scaling import SCALINGS, tensor_scale
from tests import reference

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("format", FORMATS.values(), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensor_scale_is_the_smallest_power_of_two_that_fits(format, dtype):
    limits = torch.finfo(dtype)
    for amax in (1.0, 0.3, 6.0, 448.0, 449.0, 57344.0, 60000.0, limits.max, limits.tiny):
        for factor in (1.0, 1 + limits.eps, 1 - limits.eps / 2):
            x = torch.tensor([0.0, -amax * factor, amax / 3], dtype=torch.float64).to(dtype)
            if x.isfinite().all():
                scale = tensor_scale(x, format)
                assert scale.item() == reference.tensor_scale(x, format), (amax, factor)


def test_both_signs_count():
    e4m3 = FORMATS["e4m3"]
    assert tensor_scale(torch.tensor([-900.0, 1.0]), e4m3) == 4
    assert tensor_scale(torch.tensor([1.0, 900.0]), e4m3) == 4


@pytest.mark.parametrize(
    "values", [[0.0], [-0.0, 0.0], [1.0, math.inf], [-math.inf], [math.nan, 1.0], []], ids=str
)
def test_one_where_nothing_can_be_scaled(values):
    scale = tensor_scale(torch.tensor(values), FORMATS["e4m3"])
    assert (scale.item(), scale.shape, scale.dtype) == (1.0, (), torch.float32)


def test_range():
    e4m3 = FORMATS["e4m3"]
    assert tensor_scale(torch.tensor([2.0**-149]), e4m3) == 2.0**-126
    assert tensor_scale(torch.tensor([3e38]), e4m3) == 2.0**119 * 2
    assert tensor_scale(torch.tensor([1e300], dtype=torch.float64), e4m3) == 2.0**127


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_scaling_fits_every_dtype(name, dtype):
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    scale = SCALINGS[name](x, FORMATS["e4m3"])
    assert scale is None or (not scale.requires_grad and scale.isfinite().all() and scale > 0)
