"""The format table against the specifications, torch and gfloat."""

import dataclasses
import math

import pytest
import torch

from fp8 import FORMATS, Format
from fp8.formats.format import get_format
from tests.fp8.oracles import GFLOAT
from tests.shared import parametrize, refuses


def row(**changes):
    fields = {
        "name": "custom",
        "exponent_bits": 4,
        "mantissa_bits": 3,
        "bias": 7,
        "max": 448.0,
    }
    return Format(**{**fields, **changes})


@parametrize("format", FORMATS.values())
def test_values_are_those_of_torch_and_gfloat(format):
    if format.dtype is not None:
        limits = torch.finfo(format.dtype)
        assert (limits.max, limits.smallest_normal) == (format.max, format.min_normal)
        assert limits.bits == format.bits
    if format.name in GFLOAT:
        other = GFLOAT[format.name]
        assert (format.max, format.min_normal, format.min_subnormal) == (
            other.max,
            other.smallest_normal,
            other.smallest_subnormal,
        )
        found = format.infinity, format.nan, format.negative_zero
        assert found == (other.num_posinfs > 0, other.num_nans > 0, other.has_nz)
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
