"""Starts a program once for each rank of a process group, as a launcher does, and waits for all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_ranks(worker: Path, world: int, store: Path, timeout: float = 200) -> list[str]:
    """``python worker RANK STORE`` for each rank; what each printed. All of them must succeed.

    Warnings are errors there too. GLOO talks over the loopback interface.
    """
    views = "ignore:FSDP2-wrapped module"  # not to change them in place: nothing here does
    command = [sys.executable, "-W", "error", "-W", views, str(worker)]
    paths = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(store)],
            env=os.environ | paths,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=timeout)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for i, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert rank.returncode == 0, output
        assert f"rank {i} done" in output
    return outputs
