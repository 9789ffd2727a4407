"""DDP and FSDP2 over two processes: tags, learning rates and gradients are those of one."""

from pathlib import Path

from tests.launch import needs_gloo, run_ranks

WORKER = Path(__file__).with_name("distributed_worker.py")


@needs_gloo
def test_two_processes(tmp_path):
    run_ranks(WORKER, 2, tmp_path / "store")
