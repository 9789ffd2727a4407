"""Starts a program once for each rank of a process group, as a launcher does, and waits for all."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings as warnings_module
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from fp8 import RecipeWarning

ROOT = Path(__file__).parents[1]


def run_ranks(
    worker: Path, world: int, store: Path, timeout: float = 200, warnings: str = "error"
) -> list[str]:
    """``python worker RANK STORE`` for each rank; what each printed. All of them must succeed.

    Warnings are errors there too, unless told. GLOO talks over the loopback interface.
    """
    views = "ignore:FSDP2-wrapped module"  # not to change them in place: nothing here does
    command = [sys.executable, "-W", warnings, "-W", views, str(worker)]
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
            with rank:  # waits, and closes its pipe
                rank.kill()
    for i, (rank, output) in enumerate(zip(ranks, outputs, strict=True)):
        assert rank.returncode == 0, output
        assert f"rank {i} done" in output
    return outputs


def as_rank(check: Callable[[int, Path], None], world: int) -> None:
    """The main program of a worker: ``check(rank, store)`` in a process group of gloo.

    Plain models under "unit" are cast without scales here, as in the suite (pyproject.toml).
    """
    warnings_module.filterwarnings("ignore", category=RecipeWarning)
    rank, store = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    check(rank, store)
    dist.barrier()
    dist.destroy_process_group()
    print("rank", rank, "done", flush=True)
    os._exit(0)  # a thread of gloo that is not joined yet aborts a regular exit
