"""Starts a worker once for each rank of a process group, as a launcher does, and waits for all."""

import functools
import importlib
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
import warnings as warnings_module
from multiprocessing import forkserver
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from fp8.warnings import RecipeWarning

ROOT = Path(__file__).parents[1]
needs_gloo = pytest.mark.skipif(
    not dist.is_gloo_available(), reason="this torch is built without gloo"
)
#: GLOO talks over the loopback interface.
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
PRELOADED = [
    *("torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("torch.distributed.tensor.parallel", "fp8", "unit_scaling"),
]
"""Imported once, by the server that processes are forked from: it takes each of them seconds."""


def ran(*command, cwd=ROOT, **options):
    """What a command prints. It must succeed."""
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def python(*arguments, warnings="error", **options):
    """What a new interpreter prints, as by `ran`."""
    return ran(sys.executable, "-W", warnings, *arguments, **options)


@functools.cache
def server():
    """What starts processes in which `PRELOADED` is imported, with `ENVIRONMENT`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with patch.dict(os.environ, ENVIRONMENT):
        forkserver.ensure_running()
    return context


def run_ranks(worker, world, store, timeout=200, warnings="error"):
    """``worker(rank, store)``, a function of a module, in a process group for each rank; or
    ``python worker RANK STORE`` for a file. What each printed. All of them must succeed.

    Warnings are errors there too, unless told: "error", "default" or "ignore", as of ``python -W``.
    """
    name = (
        str(worker)
        if isinstance(worker, Path)
        else f"{worker.__module__}:{worker.__name__}"
    )
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(rank) for rank in range(world)]
        processes = [
            server().Process(
                target=_run, args=(name, world, rank, store, outputs[rank], warnings)
            )
            for rank in range(world)
        ]
        end = time.monotonic() + timeout
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join(max(0.0, end - time.monotonic()))
        finally:
            for process in processes:
                process.kill()
                process.join()
        texts = [path.read_text() if path.exists() else "" for path in outputs]
    for rank, (process, text) in enumerate(zip(processes, texts, strict=True)):
        assert process.exitcode == 0, (
            f"rank {rank} ended with {process.exitcode}:\n{text}"
        )
        assert f"rank {rank} done" in text
    return texts


def _run(name, world, rank, store, output, warnings):
    """In a process of its own. name: the file, or the module and the function."""
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ["WORLD"] = str(world)
    sys.argv = [name, str(rank), str(store)]
    warnings_module.simplefilter(warnings)
    # Not to change views in place.
    warnings_module.filterwarnings("ignore", "FSDP2-wrapped module")
    if name.endswith(".py"):
        runpy.run_path(name, run_name="__main__")
    else:
        module, _, function = name.partition(":")
        as_rank(getattr(importlib.import_module(module), function), world)


def as_rank(check, world):
    """The main program of a worker: ``check(rank, store)`` in a process group of gloo.

    Plain models under "unit" are cast without scales here, as in the suite (pyproject.toml).
    """
    warnings_module.filterwarnings("ignore", category=RecipeWarning)
    rank, store = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=world
    )
    check(rank, store)
    dist.barrier()
    dist.destroy_process_group()
    print("rank", rank, "done", flush=True)
    os._exit(0)  # a thread of gloo that is not joined yet aborts a regular exit
