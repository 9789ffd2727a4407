"""Operands as torch's kernels read them, against independent ones; no kernel is called here."""

import pytest
import torch

from fp8 import FORMATS, RECIPES, Cast
from fp8.casts import casting
from fp8.casts.operands import casts_of
from fp8.formats import rounding
from fp8.kernels import block
from fp8.kernels.blackwell import swizzled
from fp8.kernels.table import KERNELS, kernel_of, store, why_not_kernel
from tests.fp8.kernels.scaled_mm import SWIZZLES, TYPES, decoded, unswizzled
from tests.fp8.oracles import all_patterns
from tests.shared import assert_same, parametrize, proves, randn, seeded

TILED = ["block", "mxfp8", "nvfp4"]
SHAPES = [(5, 48), (130, 600), (257, 16)]


def decode(stored, kind):
    data = stored.values
    if data.dtype == torch.uint8:
        data = data.view(torch.float4_e2m1fn_x2)
    if kind == "block":
        scales = block.scales_of(data, stored.scale)
        return decoded(data, [scales.values], [scales.types], [])
    types = {"mx": [TYPES.BlockWise1x32], "nv": [TYPES.BlockWise1x16, TYPES.TensorWise]}
    swizzles = [SWIZZLES.SWIZZLE_32_4_4, SWIZZLES.NO_SWIZZLE]
    return decoded(data, [stored.scale, stored.unit], types[kind], swizzles)


@parametrize("shape", [(128, 4), (1, 1), (130, 19), (256, 8), (31, 5), (257, 12)])
def test_swizzled_is_the_documents_formula_and_torchaos(shape):
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    scale = torch.randint(256, shape, dtype=torch.uint8, generator=seeded(0))
    got = swizzled(scale)
    assert_same(unswizzled(got, *shape), scale.double())
    assert_same(got, utils.to_blocked(scale).flatten())


@parametrize("axis", [-1, -2])
@parametrize("shape", SHAPES)
@parametrize("recipe", TILED)
def test_operands_are_those_of_the_simulation(recipe, shape, axis):
    """To the bit; of "nv" the simulation rounds twice more, to float32."""
    x = (randn(*shape, seed=3) * torch.logspace(-9, 5, shape[0])[:, None]).detach()
    x[2:4, :17] = 0  # whole tiles, and parts
    for pair in casts_of(RECIPES[recipe].text).pairs:
        kind, _ = kernel_of(*pair)
        for spec in set(pair):
            torch.manual_seed(0)
            want = casting.rounded(x, spec, axis)[0]
            torch.manual_seed(0)
            stored = store(x, spec, axis)
            got = decode(stored, kind)
            want = want if axis == -1 else want.mT
            rest, got = got, got[: want.shape[0], : want.shape[1]]
            bound = 2.0**-23 * want.abs().double() if kind == "nv" else 0.0
            assert ((got - want).abs() <= bound).all()
            assert rest.count_nonzero() == got.count_nonzero()  # what fills up is zero
            assert rest.shape[1] % KERNELS[kind].multiple == 0


@proves("the field", "NVFP4", how="library")
def test_nvfp4_operands_are_torchaos_to_the_byte():
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = (randn(130, 96, seed=1) * torch.logspace(-2, 1, 130)[:, None]).detach()
    ours = store(x, RECIPES["nvfp4"].input)
    theirs = nv.NVFP4Tensor.to_nvfp4(
        x, per_tensor_scale=ours.unit, is_swizzled_scales=True
    )
    assert_same(ours.unit, nv.per_tensor_amax_to_scale(x.abs().max()))
    assert_same(ours.scale.view(torch.uint8), theirs.scale.flatten().view(torch.uint8))
    ties = (ours.values != theirs.qdata.view(torch.uint8)).float().mean()
    assert ties < 1e-3  # x / (q * unit) here, x * (1 / unit / q) there


def test_which_kernel_multiplies_what():
    def kernel(a, b):
        return kernel_of(a, b)

    def cast(scaling, format="e4m3", **options):
        return Cast(format=format, scaling=scaling, **options)

    tensor, row, block, mx = map(cast, ("tensor", "row", "block", "mx"))
    wide, square = cast("unit", "e5m2"), cast("block", tile=(128, 128))
    for name, pairs in {
        "tensor": [(tensor, wide)],
        "row": [(row, tensor)],
        "block": [(block, square), (square, block), (block, block)],
        "mx": [(mx, cast("mx", tile=(32, 32)))],
    }.items():
        assert all(kernel(*pair) == (name, "") for pair in pairs)
    for a, b, why in (
        (wide, wide, "e5m2 by e5m2"),
        (square, square, "128 x 128 by the same"),
        (block, row, "scales by block by scales by row"),
        (block, cast("block", "e5m2"), "e4m3 by e5m2 with scales by block"),
        (mx, cast("mx", tile=(1, 64)), "tiles of 1 x 64"),
        (mx, cast("mx", tile=(2, 32)), "tiles of 2 x 32"),
        (mx, cast("block", tile=(1, 32), rule="exact"), "by rule 'exact'"),
        (mx, cast("mx", "e3m2"), "e4m3 by e3m2 with scales by mx"),
        (mx, cast("mx", "e2m1"), "e4m3 by e2m1 with scales by mx"),
    ):
        assert why in kernel(a, b)[1]
    assert kernel_of(None, mx)[1] == "one operand of a product stays in high precision"
    assert kernel_of(None, None) == ("high", "")


ADA, HOPPER, BLACKWELL = (8, 9), (9, 0), ((10, 0), (12, 0))
EVERY = (ADA, HOPPER, *BLACKWELL)
#: Kernel -> the compute capabilities that have it, by torch and cuBLAS.
DEVICES = {
    "tensor": EVERY,
    "row": EVERY,
    "block": (HOPPER,),
    "mx": BLACKWELL,
    "nv": BLACKWELL,
}


@parametrize("name", KERNELS)
def test_what_each_device_is_expected_to_have(name, monkeypatch):
    """A row from its first capability on, up to that from which it is gone."""
    row = KERNELS[name]

    def why(*capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        return why_not_kernel(name, torch.device("cuda", 0))

    if name in DEVICES:
        assert tuple(each for each in EVERY if not why(*each)) == DEVICES[name]
    gone = row.below or (99, 0)
    assert not why(*row.least) + why(gone[0] - 1, 9)
    for refused in {(row.least[0] - 1, 9), row.below or (0, 0)}:
        text = why(*refused)
        assert text.startswith(f"scales by {name} need {row.devices}")
        assert text.endswith("not {}.{}".format(*refused))
    assert bool(why_not_kernel(name, torch.device("cpu"))) != row.cpu
    assert KERNELS["block"].devices == "CUDA devices of compute capability 9.0"
    assert KERNELS["mx"].devices == "CUDA devices of compute capability 10.0 and up"


@parametrize("format", ["e4m3", "e5m2"])
@parametrize("how", [{}, {"scaling": "tensor"}, {"scaling": "tensor", "rule": "exact"}])
def test_a_conversion_that_saturates_needs_no_clamp(format, how, monkeypatch):
    """``cvt.rn.satfinite`` of the PTX ISA, of what a graph for CUDA computes, on every bfloat16
    number, and scaled ones beyond float32: the bytes of a CPU, where these are finite."""
    monkeypatch.setattr(rounding, "is_inductors", lambda: True)
    monkeypatch.setattr(rounding, "_is_for_cuda", lambda x: True)
    x = all_patterns(torch.bfloat16).view(256, 256)
    top = FORMATS[format].max
    dtype = FORMATS[format].dtype
    for factor in (1.0, 2.0**-30, 2.0**-100):
        y = (x * factor).to(torch.bfloat16)
        spec = Cast(format=format, **how)
        graph = casting.quantized(y, spec, converts=True).values
        converted = torch.where(graph.isnan(), graph, graph.clamp(-top, top)).to(dtype)
        with monkeypatch.context() as eager:
            eager.setattr(rounding, "_is_for_cuda", lambda x: False)
            want = store(y, spec).values
        finite = want.float().isfinite()
        assert_same(finite, converted.float().isfinite())
        got = converted.view(torch.uint8)[finite]
        assert_same(got, want.view(torch.uint8)[finite])
