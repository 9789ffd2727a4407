"""DDP and FSDP2 over two processes: tags, learning rates and gradients are those of one."""

from pathlib import Path

import pytest
import torch.distributed as dist

from tests.launch import run_ranks

WORKER = Path(__file__).with_name("distributed_worker.py")


@pytest.mark.skipif(
    not dist.is_gloo_available(), reason="this torch is built without gloo"
)
def test_two_processes(tmp_path):
    run_ranks(WORKER, 2, tmp_path / "store")
