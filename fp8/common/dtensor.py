"""Tensors that are divided among processes: torch's `DTensor`."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

#: A DTensor, whose class a torch without distributed processes lacks, or a plain tensor.
Sharded = Any


def is_dtensor(x: object) -> bool:
    """Whether ``x`` is a DTensor. Does not import torch.distributed, which torch may lack."""
    if type(x) is Tensor or type(x) is torch.nn.Parameter:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def whole(x: Sharded) -> Sharded:
    """``x``, gathered from all processes if it is a DTensor."""
    if is_dtensor(x):
        return x.full_tensor()
    return x


def part_of(x: Sharded) -> Sharded:
    """``x``, or the local part of a DTensor, detached: it has the same memory."""
    if is_dtensor(x):
        return x.detach().to_local()
    return x


def mesh_of(layer: torch.nn.Module) -> Any:
    """The DeviceMesh that the parameters of a layer are divided over; None if they are plain."""
    parameters = layer.parameters(recurse=False)
    meshes = (getattr(p, "device_mesh", None) for p in parameters)
    return next(filter(None, meshes), None)


def unreduced(x: Sharded) -> Tensor:
    """The DTensor with its partial sums added up, which a cast must not round one by one."""
    if not any(p.is_partial() for p in x.placements):
        return x
    from torch.distributed.tensor import Replicate

    whole = [Replicate() if p.is_partial() else p for p in x.placements]
    return x.redistribute(placements=whole)


def is_masked(x: Sharded) -> bool:
    """Whether ``x`` is what a table divided by rows returns: its mask serves one reduction."""
    if not is_dtensor(x):
        return False
    from torch.distributed.tensor import Partial

    return any(p.is_partial() and type(p) is not Partial for p in x.placements)


def _divides(x: Sharded, placement: object) -> int | None:
    """The dimension of ``x`` that a placement divides, if any; strided placements, from flattening
    a divided inner dimension, too."""
    if hasattr(placement, "dim"):
        return placement.dim % x.dim()
    return None


def as_shard(x: Sharded, local: Tensor) -> Tensor:
    """A DTensor like ``x`` with the local part ``local``; dimensions that are not divided may
    differ."""
    from torch.distributed.tensor import DTensor

    divided = {_divides(x, p) for p in x.placements}
    shape = list(local.shape)
    for dim in divided:
        if dim is not None:
            shape[dim] = x.shape[dim]
    stride = x.stride()
    if shape != list(x.shape):
        stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local,
        x.device_mesh,
        x.placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=stride,
    )


def reduced(
    x: Sharded,
    part: Tensor,
    dims: Iterable[int],
    how: str,
) -> Tensor:
    """``part`` reduced ("sum", "max") over the processes that divide the dimensions ``dims`` of
    ``x``."""
    from torch.distributed.tensor import DTensor, Partial, Replicate

    divided = {d % x.dim() for d in dims}
    spread = [_divides(x, p) in divided for p in x.placements]
    if not any(spread):
        return part
    # Processes that divide other dimensions have the same part.
    partial = [Partial(how) if yes else Replicate() for yes in spread]
    result: DTensor = DTensor.from_local(part, x.device_mesh, partial, run_check=False)
    return result.redistribute(placements=[Replicate()] * len(partial)).to_local()


def check_whole(
    x: Sharded,
    dim: int,
    by: int,
) -> None:
    """Raises ValueError unless each process has whole tiles of ``by`` along ``dim``."""
    part = x.shape[dim]
    for i, placement in enumerate(x.placements):
        if _divides(x, placement) == dim % x.dim():
            processes = x.device_mesh.size(i)
            part = -(-part // processes)  # as torch.chunk; the last one may have fewer
            part //= getattr(placement, "split_factor", 1)
            if part % by and processes > 1:
                raise ValueError(
                    f"{processes} processes divide dimension {dim % x.dim()} of an operand of "
                    f"shape {tuple(x.shape)} into parts of {part}, which are not made of whole "
                    f"tiles of {by} that share a scale. Choose a size that is a multiple of "
                    f"{processes * by}, or recipe 'tensor' or 'row'"
                )
