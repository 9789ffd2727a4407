"""DDP and FSDP2 over two processes: tags, learning rates and gradients are those of one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

WORKER = Path(__file__).with_name("distributed_worker.py")
ROOT = WORKER.parents[2]


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch is built without gloo")
def test_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    views = "ignore:FSDP2-wrapped module"  # not to change them in place: nothing here does
    command = [sys.executable, "-W", "error", "-W", views, str(WORKER)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], **pipes) for rank in (0, 1)
    ]
    try:
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for i, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert rank.returncode == 0, output
        assert f"rank {i} done" in output
