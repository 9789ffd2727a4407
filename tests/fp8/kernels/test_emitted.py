"""What the compiler emits of casts for an NVIDIA GPU: read, on a machine without one."""

import json
import re
from pathlib import Path

import pytest
import torch

from tests.launch import python
from tests.shared import pairs, parametrize

NO_BUILD = (
    ""
    if torch.version.cuda
    else "torch is no CUDA build, whose Triton compiles for GPUs"
)

pytestmark = pytest.mark.skipif(bool(NO_BUILD), reason=NO_BUILD)

CASTS = {
    "e5m2": {"format": "e5m2"},
    "e5m2 by tensor": {"format": "e5m2", "scaling": "tensor", "overflow": "nonfinite"},
    "e5m2 by tensor, saturated": {"format": "e5m2", "scaling": "tensor"},
    "e5m2 by row, exact": {"format": "e5m2", "scaling": "row", "rule": "exact"},
    "e4m3": {"format": "e4m3"},
    "e4m3 by row": {"format": "e4m3", "scaling": "row", "overflow": "nonfinite"},
    "e4m3 by tensor, exact": {"format": "e4m3", "scaling": "tensor", "rule": "exact"},
}
NAMES = ["e5m2, saved", "selftest", *CASTS]
ONE_SCALE = [
    "e5m2",
    "e5m2 by tensor",
    "e5m2 by tensor, saturated",
    "e4m3",
    "e4m3 by tensor, exact",
]


@pytest.fixture(scope="module")
def emitted():
    """The PTX of the kernels of each cast, in all configurations that are tried on a device."""
    script = Path(__file__).with_name("emitted.py")
    casts = ["saved", "selftest", *map(json.dumps, CASTS.values())]
    found = json.loads(python(script, *casts, warnings="ignore"))
    return dict(pairs(NAMES, found))


def converted(ptx, format):
    """The instructions whose results are converted to an FP8 format. Of a single value, the second
    of the pair is undefined."""
    lines = dict(re.findall(r"^\s+(?=\S+\s+(%r\d+), )(.*);$", ptx, re.M))
    pairs = re.findall(
        rf"cvt\.rn\.satfinite\.{format}x2\.f32\s+\S+, (%r\d+), (%r\d+);", ptx
    )
    return [lines[name] for pair in pairs for name in pair if name in lines]


@parametrize("name", [name for name in NAMES if "e5m2" in name])
def test_inf_is_nan_where_e5m2_would_saturate(name, emitted):
    """x * 0 + y, for a multiple y of x: NaN for Inf. The conversion keeps NaN (PTX ISA, "cvt")."""
    found = [line for ptx in emitted[name] for line in converted(ptx, "e5m2")]
    assert found
    for line in found:
        assert re.fullmatch(r"fma\.rn\.f32\s+%r\d+, %r\d+, 0f00000000, %r\d+", line), (
            line
        )


@parametrize("name", [name for name in NAMES if "e4m3" in name])
def test_inf_is_nan_in_e4m3(name, emitted):
    """By x * 0 + y, or where a value overflows; one instruction for each value."""
    makes = r"fma\.rn\.f32\s+%r\d+, %r\d+, 0f00000000, %r\d+;|selp\.f32\s+%r\d+, .*0f7FC00000"
    for ptx in emitted[name]:
        assert len(re.findall(makes, ptx)) >= len(converted(ptx, "e4m3"))
    assert any(converted(ptx, "e4m3") for ptx in emitted[name])


@parametrize("name", [name for name in NAMES if "exact" in name])
def test_scales_of_rule_exact_divide_exactly(name, emitted):
    assert all("div.full" not in ptx for ptx in emitted[name])
    assert any("div.rn.f32" in ptx for ptx in emitted[name])


@parametrize("name", ["e5m2, saved", "selftest", *ONE_SCALE])
def test_a_kernel_that_stores_casts_has_no_minimum_or_maximum(name, emitted):
    """After which an H100 may store wrong bytes (triton-lang/triton issue 11111)."""
    storing = [ptx for ptx in emitted[name] if "satfinite" in ptx]
    assert storing
    for ptx in storing:
        assert not re.findall(r"(?:min|max)\S*\.f32", ptx)
