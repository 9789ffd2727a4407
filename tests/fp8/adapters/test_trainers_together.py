"""Trainers over two processes, run for real: see trainers_worker.py."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.launch import run_ranks


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch is built without gloo")
@pytest.mark.timeout(300)
def test_two_processes(tmp_path: Path):
    for library in ("accelerate", "lightning", "transformers"):
        pytest.importorskip(library, reason="the library that is adapted")
    worker = Path(__file__).with_name("trainers_worker.py")
    run_ranks(worker, 2, tmp_path / "store", 280, warnings="ignore")  # libraries' own
