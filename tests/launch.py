"""Starts a program once for each rank of a process group, as a launcher does, and waits for all."""

from __future__ import annotations

import atexit
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import warnings as warnings_module
from collections.abc import Callable
from pathlib import Path
from threading import Timer

import torch.distributed as dist

from fp8.warnings import RecipeWarning

ROOT = Path(__file__).parents[1]
#: GLOO talks over the loopback interface.
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@functools.cache
def server() -> subprocess.Popen[str]:
    """The one of this process, with the processes that it starts in a group: see tests/forks.py."""
    atexit.register(stop)
    return subprocess.Popen(
        [sys.executable, "-m", "tests.forks"],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def stop() -> None:
    """Ends the server and what it has started; the next request starts another."""
    if server.cache_info().currsize:
        with server() as process:
            os.killpg(process.pid, signal.SIGKILL)
        server.cache_clear()


def run_processes(
    program: Path,
    arguments: list[list[str]],
    environments: list[dict[str, str]],
    timeout: float = 200,
    warnings: str = "error",
) -> list[tuple[int, str]]:
    """``python program arguments`` for each process, all at once: exit codes and what they printed.

    Warnings are errors there too, unless told.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / str(i) for i in range(len(arguments))]
        request = {
            "program": str(program),
            "arguments": arguments,
            "environments": environments,
            "outputs": [str(path) for path in outputs],
            "warnings": warnings,
        }
        process = server()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = Timer(timeout, stop)
        timer.start()
        try:
            print(json.dumps(request), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except BaseException:  # its answer would be taken for that to the next request
            stop()
            raise
        finally:
            timer.cancel()
        texts = [path.read_text() if path.exists() else "" for path in outputs]
    assert line, f"not done in {timeout} seconds:\n" + "\n".join(texts)
    return list(zip(json.loads(line), texts, strict=True))


def run_ranks(
    worker: Path | Callable[[int, Path], None],
    world: int,
    store: Path,
    timeout: float = 200,
    warnings: str = "error",
) -> list[str]:
    """``worker(rank, store)``, a function of a module, in a process group for each rank; or
    ``python worker RANK STORE`` for a file. What each printed. All of them must succeed."""
    program, variables = (worker if isinstance(worker, Path) else Path(__file__)), {}
    if not isinstance(worker, Path):
        variables["CHECK"] = f"{worker.__module__}:{worker.__name__}"
    arguments = [[str(rank), str(store)] for rank in range(world)]
    environments = [{"WORLD": str(world), **variables} for _ in range(world)]
    results = run_processes(program, arguments, environments, timeout, warnings)
    for i, (code, output) in enumerate(results):
        assert code == 0, output
        assert f"rank {i} done" in output
    return [output for _, output in results]


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


if __name__ in ("imported", "__main__"):  # the former before the processes are divided
    module, _, name = os.environ["CHECK"].partition(":")
    function = getattr(importlib.import_module(module), name)
    if __name__ == "__main__":
        as_rank(function, int(os.environ["WORLD"]))
