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


def test_the_pre_scale_is_halved_at_a_share_and_grows_from_a_half_to_two_in_1000_steps():
    state = distributed.HookState()
    state.update()  # before the first step
    assert state.pre_scale == 1.0
    state.count(torch.tensor([10, 10**6]))
    state.update()
    assert state.pre_scale == distributed.GROWTH  # 0.001 % is not more than 0.001 %
    state.pre_scale = 1.0
    state.count(torch.tensor([10, 10**6 - 1]))
    state.update()
    assert state.pre_scale == 0.5
    for step in range(1000):
        assert state.pre_scale == pytest.approx(0.5 * 4 ** (step / 1000), rel=1e-12)
        state.count(torch.tensor([0, 1]))
        state.count(torch.tensor([0, 1]))  # another bucket of the step
        state.update()
    assert state.pre_scale == pytest.approx(2, rel=1e-12)
    state.count(torch.tensor([0, 1]))
    state.update()
    assert state.pre_scale == 2


def test_the_pre_scale_moves_where_saturation_costs_less_than_a_rounding():
    """Gaussian gradients, 1,200 steps: once nothing has saturated for long, a few values do."""
    torch.manual_seed(0)
    state, found = distributed.HookState(), []
    for _ in range(1200):
        x = torch.randn(100, distributed.BLOCK)
        scale = (distributed._exponents(x).int() << 23).view(torch.float32) / state.pre_scale
        state.count(distributed._counts(x / scale))
        saturated = (x / scale).abs() > 31.5
        y = distributed._decode(distributed._encode(x / scale)) * scale
        assert ((y - x).abs() <= 2**-5 * x.abs())[saturated].all()
        found.append(state.pre_scale)
        state.update()
    assert 0.5 <= min(found[1:]) < 0.52
    assert 1.016 < max(found) < 1.06


@pytest.mark.proves("the field", "gradients reduced in FP8", how="own")
@needs_gloo
def test_four_processes(tmp_path: Path):
    run_ranks(Path(__file__).with_name("all_reduce_worker.py"), 4, tmp_path / "store")
