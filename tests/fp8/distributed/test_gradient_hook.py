"""Gradients averaged in FP8, by two processes and by four; the bytes that they send."""

from pathlib import Path

import ml_dtypes
import pytest
import torch
import torch.distributed as dist

from fp8.distributed import gradient_hook as distributed
from tests.launch import run_ranks

needs_gloo = pytest.mark.skipif(not dist.is_gloo_available(), reason="built without gloo")
ALL_BITS = torch.arange(256, dtype=torch.uint8)


def test_bits_are_those_of_e3m4():
    """ml_dtypes' e3m4 has Inf and NaN where ours goes on to 31: the other 224 codes are equal."""
    values = distributed._decode(ALL_BITS)
    expected = torch.from_numpy(ALL_BITS.numpy().view(ml_dtypes.float8_e3m4).astype("float32"))
    finite = expected.isfinite()
    assert finite.sum() == 224
    assert torch.equal(values[finite], expected[finite])
    assert values.abs()[~finite].tolist() == [*range(16, 32), *range(16, 32)]
    assert torch.equal(distributed._encode(values), ALL_BITS)


@pytest.mark.proves("the field", "gradients reduced in FP8", how="own")
@needs_gloo
def test_four_processes(tmp_path: Path):
    run_ranks(Path(__file__).with_name("all_reduce_worker.py"), 4, tmp_path / "store")
