"""The processes of torch.distributed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, distributed

Group = torch.distributed.ProcessGroup | None
"""Some of the processes; None: all."""


def take_largest(tensors: Sequence[Tensor], groups: Iterable[Group]) -> None:
    """Sets each entry of ``tensors`` to its maximum over the processes of all groups."""
    # One all-reduce for all tensors, as each has the latency of the network.
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    for group in groups:
        distributed.all_reduce(flat, distributed.ReduceOp.MAX, group)
    parts = flat.split([tensor.numel() for tensor in tensors])
    for tensor, largest in zip(tensors, parts, strict=True):
        tensor.copy_(largest.view_as(tensor))


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
