"""Tensor and sequence parallelism by torch's parallelize_module, in two and four processes."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.launch import run_ranks

WORKER = Path(__file__).with_name("tensor_parallel_worker.py")


@pytest.mark.proves("the field", "tensor and sequence parallelism", how="own")
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch is built without gloo")
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_parallelize_module(world, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("WORLD", str(world))
    run_ranks(WORKER, world, tmp_path / "store", warnings="default")
