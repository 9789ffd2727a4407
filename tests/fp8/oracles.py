"""Independent judges of the casts: ml_dtypes for nearest rounding, gfloat for the other modes."""

import contextlib

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import formats as gf

from fp8.formats.random_bits import bits_from_key, random_key

ML_DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "bf16": ml_dtypes.bfloat16,
    "fp16": np.float16,
}

GFLOAT = {
    "e4m3": gf.format_info_ocp_e4m3,
    "e5m2": gf.format_info_ocp_e5m2,
    "e3m2": gf.format_info_ocp_e3m2,
    "e2m3": gf.format_info_ocp_e2m3,
    "e2m1": gf.format_info_ocp_e2m1,
    "bf16": gf.format_info_bfloat16,
    "fp16": gf.format_info_binary16,
}
"""gfloat has no fnuz rows of its own."""


@contextlib.contextmanager
def flush_denormal():
    """Flushes subnormals to zero, as some devices and modes do."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU has no flush-denormal mode")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def all_patterns(dtype):
    """Every value of a 16-bit dtype."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def random_patterns(count, seed):
    """float32 values of random bits: every exponent equally often, NaN, Inf and subnormals among
    them."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    return torch.from_numpy(bits.view(np.int32)).view(torch.float32)


def nearest(x, format, overflow):
    """What quantize(x, format, overflow=overflow) has to give, as float32.

    ml_dtypes decides. Where it has a convention of its own ours is applied: NaN stays NaN (it gives
    -0 in formats without NaN).
    """
    values = x.float()
    if overflow == "saturate":
        values = values.clamp(-format.max, format.max)
    with np.errstate(all="ignore"):
        cast = values.numpy().astype(ML_DTYPES[format.name]).astype(np.float32)
    want = torch.from_numpy(cast)
    want = torch.where(values.isnan(), torch.nan, want)
    return within(
        want,
        x.dtype,
        format,
        format.max if overflow == "saturate" else format.nonfinite,
    )


def within(want, dtype, format, beyond):
    """`want` with magnitudes that `dtype` cannot hold replaced by `beyond`, and that by the largest
    it can."""
    held = want.to(dtype).to(want.dtype)
    if bool(((held == want) | want.isnan()).all()):
        return want
    top = want[want.isfinite() & (held == want)].abs().max()
    limit = top if beyond == format.max else torch.tensor(beyond, dtype=want.dtype)
    return torch.where(want.abs() > top, torch.copysign(limit, want), want)


def with_gfloat(x, format, mode, overflow, bits=None):
    """`x` rounded by gfloat in float64. `bits` are 31-bit; gfloat rounds up where bits + fraction
    overflows."""
    stochastic = (
        {}
        if bits is None
        else {"srbits": bits.numpy().astype(np.int64), "srnumbits": 31}
    )
    rounded = gfloat.round_ndarray(
        GFLOAT[format.name],
        x.double().numpy(),
        mode,
        overflow == "saturate",
        **stochastic,
    )
    return torch.from_numpy(rounded)


def mismatches(got, want):
    """Mask of the elements that differ in value or in the sign of zero. NaN equals NaN."""
    got, want = (t if t.dtype == torch.float64 else t.float() for t in (got, want))
    same = (got == want) & (got.signbit() == want.signbit())
    return (~same).logical_and_(~(got.isnan() & want.isnan()))


def assert_rounded(got, want, x):
    """Fail with the first few (input, got, want) where the two differ."""
    wrong = mismatches(got, want)
    if wrong.any():
        rows = zip(*(t[wrong][:5].tolist() for t in (x, got, want)), strict=True)
        listed = "; ".join(f"{a!r} -> {b!r}, not {c!r}" for a, b, c in rows)
        raise AssertionError(f"{int(wrong.sum())} of {x.numel()} differ: {listed}")


def random_bits(shape, seed):
    """The random bits of a seed on the CPU."""
    return bits_from_key(shape, random_key(seed), device=torch.device("cpu"))
