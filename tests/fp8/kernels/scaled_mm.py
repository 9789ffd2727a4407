"""`F.scaled_mm` of a CUDA device, written out: what it asks for and computes.

Slow, in float64, and apart from the code that is tested: bytes are decoded number by number and
scales looked up by the formulas of the libraries' documents. Each call is also put to torch's own
checks of shapes and strides, as a call on a device that is only thought of.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from fp8.kernels import selftest
from fp8.kernels.table import KERNELS

TYPES, SWIZZLES = F.ScalingType, F.SwizzleType
REAL = F.scaled_mm
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def values(data):
    """(rows, columns) as float64."""
    if data.dtype != torch.float4_e2m1fn_x2:
        return data.double()
    bytes = data.view(torch.uint8).int()
    codes = torch.stack([bytes & 15, bytes >> 4], -1).flatten(-2)
    return E2M1[codes & 7] * (1 - 2 * (codes >> 3))


def unswizzled(scale, rows, columns):
    """Scale (row, column) is at this place in tiles of 128 x 4, 512 bytes each."""
    assert scale.is_contiguous()
    assert scale.numel() == -(-rows // 128) * 128 * -(-columns // 4) * 4
    i, j = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    tile = (i // 128) * -(-columns // 4) + j // 4
    return scale.double().flatten()[
        512 * tile + 16 * (i % 32) + 4 * (i % 128 // 32) + j % 4
    ]


def spread(scale, across, along):
    return scale.double().repeat_interleave(across, 0).repeat_interleave(along, 1)


def check_outer_first(scale, rows, columns):
    assert scale.shape == (rows, columns)
    assert scale.stride(0) == 1
    assert scale.stride(1) in ((rows, 1) if columns == 1 else (rows,))


def decoded(data, scales, types, swizzles):
    """An operand (outer, inner), in float64. Scales of the second are seen as of the first."""
    x, scale, kind = values(data), scales[0], types[0]
    outer, inner = x.shape
    if kind == TYPES.TensorWise:
        assert (scale.numel(), scale.dtype) == (1, torch.float32)
        return x * scale.double()
    if kind == TYPES.RowWise:
        assert (scale.shape, scale.dtype) == ((outer, 1), torch.float32)
        return x * scale.double()
    if kind in (TYPES.BlockWise1x128, TYPES.BlockWise128x128):
        assert (data.dtype, scale.dtype) == (torch.float8_e4m3fn, torch.float32)
        columns = -(-inner // 128)
        if kind == TYPES.BlockWise1x128:
            check_outer_first(scale, outer, columns)
            return x * spread(scale, 1, 128)[:, :inner]
        four = -(-columns // 4) * 4
        check_outer_first(scale, four, -(-outer // 128))
        return x * spread(scale.T, 128, 128)[:outer, :inner]
    along = {TYPES.BlockWise1x32: 32, TYPES.BlockWise1x16: 16}[kind]
    assert inner % 32 == 0  # cuBLAS reads 16 bytes at a time
    assert swizzles[0] == SWIZZLES.SWIZZLE_32_4_4
    if along == 16:
        assert (types[1], swizzles[1]) == (TYPES.TensorWise, SWIZZLES.NO_SWIZZLE)
        assert data.dtype == torch.float4_e2m1fn_x2
        assert (scale.dtype, scales[1].dtype) == (torch.float8_e4m3fn, torch.float32)
        x = x * scales[1].double()
    else:
        assert data.dtype in (torch.float8_e4m3fn, torch.float4_e2m1fn_x2)
        assert scale.dtype == torch.float8_e8m0fnu
    return x * spread(unswizzled(scale, outer, inner // along), 1, along)


def as_list(x):
    return [] if x is None else x if isinstance(x, list) else [x]


def scaled_mm(*operands, output_dtype, use_fast_accum=False):
    """By the rules of CUDA; for types of tiles."""
    a, b, scale_a, types_a, scale_b, types_b, swizzle_a, swizzle_b = operands
    if not torch.compiler.is_compiling():
        checked_by_torch(
            a, b, scale_a, types_a, scale_b, types_b, swizzle_a, swizzle_b, output_dtype
        )
    assert a.is_contiguous()
    assert b.T.is_contiguous()
    sizes = (a.shape[1] * (2 if a.dtype == torch.float4_e2m1fn_x2 else 1), b.shape[1])
    assert all(size % 16 == 0 for size in sizes)
    scales = as_list(scale_b)
    if as_list(types_b)[0] == TYPES.RowWise:
        scales = [scales[0].T]
    x = decoded(a, as_list(scale_a), as_list(types_a), as_list(swizzle_a))
    y = decoded(b.T, scales, as_list(types_b), as_list(swizzle_b))
    return torch.ops.aten.mm(x, y.T).to(output_dtype)  # which no fp8.autocast sees


def checked_by_torch(*given):
    """Raises what torch does for these shapes, strides and dtypes on CUDA."""
    *arguments, output_dtype = given
    with FakeTensorMode():

        def fake(x):
            if isinstance(x, list):
                return [fake(y) for y in x]
            if not isinstance(x, Tensor):
                return x
            return torch.empty_strided(
                x.shape, x.stride(), dtype=x.dtype, device="cuda"
            )

        REAL(*map(fake, arguments), output_dtype=output_dtype)


def forget():
    """What is known of the devices."""
    for known in (
        selftest._kernels,
        selftest.why_not,
        selftest._failure,
        selftest.why_not_compiled,
    ):
        known.cache_clear()


@pytest.fixture
def emulated(monkeypatch):
    """The CPU as a device with all kernels."""
    for kind, row in KERNELS.items():
        monkeypatch.setitem(KERNELS, kind, replace(row, cpu=True))
    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    forget()
    yield
    forget()
