"""Products of MXFP8 and NVFP4 as the compiler makes them for a Blackwell GPU, which is not there.
That operands decode to the simulation's values, by the inverse of the swizzle, is in
test_kernels.py; that torch's own checks of a CUDA device accept them, in test_selftest.py."""

import re

import pytest
import torch
from torch import nn

import fp8
from fp8.kernels import selftest
from fp8.lab.forecast.assembly import configurations, sources
from fp8.lab.forecast.card import CARDS, compiling_for, why_not
from fp8.lab.forecast.compiled import graphs

pytestmark = [
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # the compiler's
]

B200 = CARDS["b200"]
DTYPES = {
    "mxfp8": ("float8_e4m3fn", "float8_e8m0fnu"),
    "nvfp4": ("float4_e2m1fn_x2", "float8_e4m3fn"),
}


def scales_of(recipe):
    """Kind and layout of an operand's scales, as in the generated code."""
    types, swizzles = nn.functional.ScalingType, nn.functional.SwizzleType
    kinds = {
        "mxfp8": [types.BlockWise1x32],
        "nvfp4": [types.BlockWise1x16, types.TensorWise],
    }
    layouts = [swizzles.SWIZZLE_32_4_4, swizzles.NO_SWIZZLE][: len(kinds[recipe])]
    return f"{[kind.value for kind in kinds[recipe]]}, {[layout.value for layout in layouts]}"


@pytest.mark.parametrize("recipe", DTYPES)
def test_a_step_compiles_and_assembles_for_sm_100(recipe):
    """Tokens and widths need padding. Of the three products, those that the recipe casts are
    scaled_mm with swizzled scales; none is a product of dequantized values."""
    with compiling_for(B200), selftest.trusted(), torch.device("cuda"):
        layer = nn.Linear(96, 160, bias=False, dtype=torch.bfloat16)
        layer = fp8.convert(layer, recipe, backend="native")
        x = torch.empty(72, 96, dtype=torch.bfloat16, requires_grad=True)
        made = graphs(layer, x)
        codes = [
            next(configurations(name, source, B200.capability)).binary.asm["cubin"]
            for graph in made
            for name, source in sources(graph).items()
        ]
    source = "\n".join(graph.source for graph in made)
    cast = sum(
        None not in pair
        for pair in zip(*[iter(fp8.RECIPES[recipe].casts)] * 2, strict=True)
    )
    assert [k.kind for graph in made for k in graph.kernels].count("fp8") == cast == 3
    calls = re.findall(
        r"^ +buf\d+ = torch\.ops\.aten\._scaled_mm_v2\.default\(.*", source, re.M
    )
    assert [call.count(scales_of(recipe)) for call in calls] == [2] * cast
    assert all(dtype in source for dtype in DTYPES[recipe])
    assert codes
    assert all(code[:4] == b"\x7fELF" for code in codes)
