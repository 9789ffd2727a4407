"""Starts programs in processes that have imported torch and the packages before: importing them
takes each process seconds.

Reads a request from each line of stdin, JSON of the fields of `Request`; answers with a line, JSON
of the exit codes of its processes, where -9 is that of one which SIGKILL ended.
"""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import sys
import traceback
import warnings

import torch._dynamo  # of optimizers and of DDP too
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor.parallel  # noqa: F401

import fp8  # noqa: F401
import unit_scaling  # noqa: F401


@dataclasses.dataclass(frozen=True)
class Request:
    """A program, and for each of its processes the arguments, the environment and the file that its
    output goes to; warnings: "error", "default" or "ignore", as of ``python -W``."""

    program: str
    arguments: list[list[str]]
    environments: list[dict[str, str]]
    outputs: list[str]
    warnings: str


def serve() -> None:
    for line in sys.stdin:
        request = Request(**json.loads(line))
        pid = os.fork()
        if pid == 0:
            answer(request)
        os.waitpid(pid, 0)


def answer(request: Request) -> None:
    """In a process of its own, which imports what the program does before it is divided."""
    warnings.simplefilter(request.warnings)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")  # not to change views in place: none
    with open(request.outputs[0], "w") as file:
        os.dup2(file.fileno(), 2)
    try:
        prepare(request, 0)
        runpy.run_path(request.program, run_name="imported")
        pids = [start(request, rank) for rank in range(len(request.arguments))]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    except BaseException:
        traceback.print_exc()
        codes = [1 for _ in request.arguments]
    print(json.dumps(codes), flush=True)
    os._exit(0)


def prepare(request: Request, rank: int) -> None:
    os.environ.update(request.environments[rank])
    sys.argv = [request.program, *request.arguments[rank]]


def start(request: Request, rank: int) -> int:
    """The id of a new process; in that one, does not return."""
    pid = os.fork()
    if pid != 0:
        return pid
    with open(request.outputs[rank], "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 1
    try:
        prepare(request, rank)
        runpy.run_path(request.program, run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
