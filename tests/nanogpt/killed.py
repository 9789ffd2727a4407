"""``killed(command, moment)``: the program, killed by SIGKILL in the middle of something."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import torch

from notebooks.nanogpt.cli import main


def _die(*args: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _half_written(state: object, file: Any) -> None:
    file.write(b"PK\x03\x04 the first bytes of a checkpoint")
    file.flush()
    _die()


def _after(count: int, call: Callable[..., Any], last: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, but ``last`` from the call on that follows ``count`` others."""
    calls = iter(range(count))
    return lambda *args: (last if next(calls, None) is None else call)(*args)


def killed(command: list[str], moment: str) -> None:
    """After the third checkpoint. "step": between the backward pass and the optimizer of step 13;
    "write": half of the next checkpoint is written."""
    if moment == "step":
        clip = torch.nn.utils.clip_grad_norm_
        torch.nn.utils.clip_grad_norm_ = _after(12, clip, _die)
    else:
        torch.save = _after(3, torch.save, _half_written)
    main(command)
