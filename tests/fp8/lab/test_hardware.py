"""The table of accelerators: their figures, and the constants with their sources."""

import re
from dataclasses import replace
from statistics import median

import pytest

from fp8.lab import hardware
from fp8.lab.hardware import HARDWARE, get_hardware
from tests.shared import pairs, parametrize, refuses

H100 = HARDWARE["h100"]


def test_the_constants_are_those_of_their_tables():
    """Calibrated on products and casts alone, never on the speedups of layers."""
    # torchao #940, bench_matmul: seconds of squares of 4096 to 32768.
    sizes = (4096, 8192, 16384, 32768)
    bf16 = (0.000210, 0.001671, 0.015030, 0.103236)
    fast = (0.000082, 0.000680, 0.006498, 0.048097)
    exact = (0.000101, 0.000788, 0.006351, 0.049498)

    def share(times, unit):
        return [2 * m**3 / t / H100.peak[unit] for m, t in pairs(sizes, times)]

    assert hardware.ACHIEVED["bf16"] == round(median(share(bf16, "bf16")), 2)
    both = share(fast, "fp8") + share(exact, "fp8")
    assert hardware.ACHIEVED["fp8"] == round(median(both), 2)
    # torchao, blockwise_fp8_training/README.md: GB/s of its casts, of 3352.3.
    casts = (
        2633.9,
        2675.2,
        2696.8,
        2736.0,
        2777.3,
        2768.1,
        2772.5,
        2798.7,
        2892.8,
        2900.7,
    )
    assert hardware.ACHIEVED["memory"] == round(median(casts) / 3352.3, 2)
    # torchao #3675, bench_matmul on a B200, after the change: shares of the peak.
    b200 = (0.657785, 0.749135, 0.743115, 0.761527, 0.773520, 0.689166)
    fp4 = (0.497106, 0.506390, 0.573318, 0.511411, 0.425100, 0.483568)
    assert HARDWARE["b200"].achieved["bf16"] == pytest.approx(median(b200), abs=0.01)
    assert hardware.ACHIEVED["mxfp4"] == round(median(fp4), 2)
    assert hardware.ACHIEVED["mxfp8"] == round(median((0.656, 0.651, 0.521)), 2)


@parametrize("row", HARDWARE.values(), ids=lambda row: row.name)
def test_every_row_has_a_source_and_plausible_figures(row):
    assert re.search(r"\w+ \(20\d\d-\d\d\)$", row.source)
    assert 100e12 < row.peak["bf16"] < 5e15
    assert 0.5e12 < row.bandwidth < 20e12
    for unit, peak in row.peak.items():
        bits = float(re.search(r"\d+$", unit)[0])
        ratio = peak / row.peak["bf16"]
        assert 0.95 <= ratio / (16 / max(bits, 4 if bits < 6 else 8)) <= 1.05, unit
    assert hardware.ACHIEVED.keys() == hardware.UNITS.keys() | {
        "memory",
        "fp8, narrow",
    }


def test_time_is_the_longer_of_arithmetic_and_memory():
    assert H100.seconds("fp8", 1e12, 2, at_peak=True) == 1e12 / H100.peak["fp8"]
    assert H100.seconds("fp8", 1e12, 2) == 1e12 / H100.rate("fp8")
    assert H100.seconds("bf16", 0, 2e9) == 2e9 / H100.stream
    assert H100.seconds("bf16", 0, 4) == hardware.LAUNCH


@parametrize(
    "call, error, message",
    [
        (lambda: get_hardware("h101"), ValueError, "unknown hardware 'h101'.*'h100'"),
        (lambda: get_hardware(5), TypeError, "hardware is a int; give a name"),
        (lambda: replace(H100, peak={"fp8": 1e15}), ValueError, "'h100' needs 'bf16'"),
        (
            lambda: replace(H100, peak={"bf16": 1, "fp7": 1}),
            ValueError,
            "unknown unit in peak",
        ),
        (
            lambda: replace(H100, achieved={"fp7": 1}),
            ValueError,
            "unknown unit in achieved",
        ),
        (
            lambda: replace(H100, bandwidth=0),
            ValueError,
            "bandwidth of 'h100' must be positive",
        ),
        (
            lambda: replace(H100, bandwidth="1"),
            TypeError,
            "bandwidth of 'h100' must be a number",
        ),
        (
            lambda: replace(H100, achieved={"fp8": 1.2}),
            ValueError,
            "above 0 and at most 1",
        ),
    ],
)
def test_what_it_refuses(call, error, message):
    with refuses(message, error):
        call()
