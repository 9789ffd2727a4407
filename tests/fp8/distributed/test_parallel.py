"""DDP and FSDP2 over two processes: losses and gradients are those of one."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.launch import run_ranks

WORKER = Path(__file__).with_name("parallel_worker.py")


@pytest.mark.proves("MS-AMP", "communication in FP8", how="own")
@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch is built without gloo")
def test_two_processes(tmp_path: Path):
    run_ranks(WORKER, 2, tmp_path / "store")
