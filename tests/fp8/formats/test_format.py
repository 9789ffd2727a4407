"""The format table against the specifications, torch and gfloat."""

import dataclasses
import math

import pytest
import torch

from fp8 import FORMATS, Format
from fp8.formats.format import get_format
from tests.fp8.oracles import GFLOAT
from tests.shared import parametrize, refuses

# name: max, min normal, min subnormal, Inf, NaN, -0, bits. OFP8 1.0 table 1, MX 1.0 tables 2 to 7,
# IEEE 754.
SPECIFIED = {
    "e4m3": (448.0, 2.0**-6, 2.0**-9, False, True, True, 8),
    "e5m2": (57344.0, 2.0**-14, 2.0**-16, True, True, True, 8),
    "e4m3fnuz": (240.0, 2.0**-7, 2.0**-10, False, True, False, 8),
    "e5m2fnuz": (57344.0, 2.0**-15, 2.0**-17, False, True, False, 8),
    "e3m2": (28.0, 2.0**-2, 2.0**-4, False, False, True, 6),
    "e2m3": (7.5, 1.0, 2.0**-3, False, False, True, 6),
    "e2m1": (6.0, 1.0, 0.5, False, False, True, 4),
    "bf16": (float.fromhex("0x1.fep127"), 2.0**-126, 2.0**-133, True, True, True, 16),
    "fp16": (65504.0, 2.0**-14, 2.0**-24, True, True, True, 16),
}


def row(**changes):
    fields = {
        "name": "custom",
        "exponent_bits": 4,
        "mantissa_bits": 3,
        "bias": 7,
        "max": 448.0,
    }
    return Format(**{**fields, **changes})


def test_values_are_the_specified_ones():
    found = {
        name: (
            *(f.max, f.min_normal, f.min_subnormal),
            *(f.infinity, f.nan, f.negative_zero, f.bits),
        )
        for name, f in FORMATS.items()
    }
    assert found == SPECIFIED
    for f in FORMATS.values():
        assert str(f.nonfinite) == ("inf" if f.infinity else "nan" if f.nan else "None")


@parametrize("format", FORMATS.values())
def test_values_are_those_of_torch_and_gfloat(format):
    if format.dtype is not None:
        limits = torch.finfo(format.dtype)
        assert (limits.max, limits.smallest_normal) == (format.max, format.min_normal)
        assert limits.bits == format.bits
    if format.name in GFLOAT:
        other = GFLOAT[format.name]
        assert (format.max, format.min_subnormal) == (
            other.max,
            other.smallest_subnormal,
        )
        assert format.bits == (other.bits if hasattr(other, "bits") else other.k)
        assert (format.bias, format.mantissa_bits) == (other.bias, other.precision - 1)


def test_get_format():
    assert get_format("e4m3") is FORMATS["e4m3"]
    custom = row()
    assert get_format(custom) is custom
    with refuses(r"unknown format 'e4m4'; choose one of 'e4m3', 'e5m2'"):
        get_format("e4m4")
    with refuses("int", TypeError):
        get_format(8)


def test_a_format_is_frozen_and_prints_its_name():
    assert str(row()) == "custom"
    with pytest.raises(dataclasses.FrozenInstanceError):
        row().max = 1.0


@parametrize(
    "changes, message",
    [
        ({"name": ""}, "name is empty"),
        ({"exponent_bits": 0}, "exponent_bits must be 1 to 8, got 0"),
        ({"exponent_bits": 9}, "exponent_bits must be 1 to 8, got 9"),
        ({"mantissa_bits": 24}, "mantissa_bits must be 0 to 23, got 24"),
        ({"bias": 129}, "exponent of min normal must be -127 to"),
        ({"max": math.inf}, "not finite and positive"),
        ({"max": -1.0}, "not finite and positive"),
        ({"max": 512.0}, "exponent of max must be -6 to 8, got 9"),
        ({"max": 433.0}, "has more than 3 bits"),
        ({"dtype": torch.int8}, "torch.int8 lacks its values"),
        (
            {"dtype": torch.float8_e5m2},
            "torch.float8_e5m2 lacks its values",
        ),  # too coarse
        (
            {"dtype": torch.float8_e4m3fn, "max": 480.0},
            "float8_e4m3fn lacks its values",
        ),
        ({"dtype": torch.float8_e4m3fn, "bias": 8, "max": 240.0}, "lacks its values"),
        (
            {"dtype": torch.float8_e8m0fnu, "mantissa_bits": 0, "max": 256.0},
            "lacks its values",
        ),
        ({"name": 3}, "name cannot be"),
        ({"exponent_bits": 4.0}, "exponent_bits cannot be"),
        ({"bias": "7"}, "bias cannot be"),
        ({"max": "448"}, "max cannot be"),
        ({"dtype": "float8_e4m3fn"}, "dtype cannot be"),
        (
            {"name": "e4m3", "max": 240.0},
            "'e4m3': fp8.FORMATS has that name",
        ),
    ],
)
def test_contradictions_and_types_are_refused(changes, message):
    with refuses(message, TypeError if "cannot be" in message else ValueError):
        row(**changes)


@parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float16])
def test_a_dtype_with_more_values_will_do(dtype):
    assert row(dtype=dtype).dtype == dtype
