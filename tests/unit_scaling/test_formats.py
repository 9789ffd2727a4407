"""`FPFormat`: the interface of 0.3.5; its values are those of torch's fnuz dtypes."""

import math

import pytest
import torch

from tests.shared import assert_same, parametrize, refuses
from unit_scaling.formats import FPFormat, format_to_tuple, tuple_to_format

LIMITS = {  # recorded from 0.3.5: srbits, max, min normal, min subnormal, bits
    (4, 3): (20, 240.0, 2.0**-7, 2.0**-10, 8),
    (5, 2): (21, 57344.0, 2.0**-15, 2.0**-17, 8),
    (8, 7): (16, (2 - 2**-7) * 2.0**127, 2.0**-127, 2.0**-134, 16),
    (4, 0): (23, 128.0, 2.0**-7, 2.0**-7, 5),
}


@parametrize("bits", LIMITS)
@parametrize("rounding", ["nearest", "stochastic"])
def test_limits(bits, rounding):
    f = FPFormat(*bits, rounding)
    srbits, *limits = LIMITS[bits]
    assert f.srbits == (srbits if rounding == "stochastic" else 0)
    assert [
        f.max_absolute_value,
        f.min_absolute_normal,
        f.min_absolute_subnormal,
        f.bits,
    ] == limits
    assert str(f) == f"E{bits[0]}M{bits[1]}-{'RN' if rounding == 'nearest' else 'SR'}"


def test_defaults():
    f = FPFormat(4, 3)
    assert (f.rounding, f.srbits) == ("stochastic", 20)
    assert (
        repr(f)
        == "FPFormat(exponent_bits=4, mantissa_bits=3, rounding='stochastic', srbits=20)"
    )
    assert f == FPFormat(4, 3) != FPFormat(4, 3, "nearest")
    assert tuple_to_format(format_to_tuple(FPFormat(5, 2))) == FPFormat(5, 2)
    assert format_to_tuple(FPFormat(5, 2, "nearest")) == (5, 2)


REFUSED = {
    (
        4,
        3,
        "banker",
    ): "unknown rounding 'banker'; choose one of 'nearest', 'stochastic'",
    (9, 3): "exponent_bits must be 1 to 8, got 9",
    (0, 3): "exponent_bits must be 1 to 8, got 0",
    (4, 24): "mantissa_bits must be 0 to 23, got 24",
    (4, -1): "mantissa_bits must be 0 to 23, got -1",
    (4, 3, "stochastic", 25): "srbits of stochastic rounding must be 0 to 20, got 25",
    (4, 3, "nearest", 5): "srbits of nearest rounding must be 0 to 0, got 5",
}


@parametrize("args", REFUSED)
def test_refusals(args):
    with refuses(REFUSED[args]):
        FPFormat(*args)


@parametrize(
    "bits, dtype", [((4, 3), torch.float8_e4m3fnuz), ((5, 2), torch.float8_e5m2fnuz)]
)
@parametrize("rounding", ["nearest", "stochastic"])
def test_values_of_the_format_are_kept(bits, dtype, rounding):
    """All 255 values; torch's dtype has them and a NaN in the place of -0."""
    values = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).float()
    values = values[~values.isnan()]
    assert values.numel() == 255
    assert_same(FPFormat(*bits, rounding).quantise(values), values)


def test_few_random_bits():
    """The probability of rounding up, 0.4 here, becomes the nearest multiple of 2**-srbits."""
    n, few = 2**18, FPFormat(4, 3, srbits=1)
    x = torch.full((n,), 1 + 0.4 * 0.125, requires_grad=True)
    (few.quantise_bwd(x) * 1.0).backward(x.detach())
    for y in (few.quantise(x), few.quantise_fwd(x).detach(), x.grad):
        share = float((y == 1.125).double().mean())
        assert share == pytest.approx(1 / 2, abs=5 * math.sqrt(1 / 4 / n))


def test_gradients():
    f, x = FPFormat(4, 3, "nearest"), torch.tensor([1.1, 500.0], requires_grad=True)
    f.quantise_fwd(x).backward(torch.tensor([1.1, 1.1]))
    assert_same(x.grad, torch.tensor([1.1, 1.1]))
    x.grad = None
    y = f.quantise_bwd(x)
    assert_same(y, x)
    y.backward(torch.tensor([1.1, 500.0]))
    assert x.grad.tolist() == [1.125, 240.0]
    assert not f.quantise(x).requires_grad
