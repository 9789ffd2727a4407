"""The processes of torch.distributed."""

from __future__ import annotations

import torch
from torch import distributed

Group = torch.distributed.ProcessGroup | None
"""Some of the processes; None: all."""


def is_started() -> bool:
    """Whether torch.distributed is there and initialized."""
    return distributed.is_available() and distributed.is_initialized()


def ranks(group: Group = None) -> int:
    """The number of processes; 1 without torch.distributed, -1 in one outside of the group."""
    if is_started():
        return distributed.get_world_size(group)
    return 1


def rank(group: Group = None) -> int:
    """The number of this process, from 0; -1 outside of the group."""
    if is_started():
        return distributed.get_rank(group)
    return 0
