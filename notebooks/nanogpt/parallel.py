"""One run on several processes, as torchrun starts them: DDP or FSDP2.

Every process does the same, on its share of each batch; the first one also writes and prints. What
a checkpoint holds is whole, as that of a single process is.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from fp8.distributed.fsdp import gather_in_fp8, portable_state_dict
from fp8.distributed.gradient_hook import all_reduce_hook
from unit_scaling.parameter import has_parameter_data

T = TypeVar("T")

KINDS = ("ddp", "fsdp")
ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class BadInputError(ValueError):
    """What the user is to change, in one line."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes of a run: by default this one alone.

    fp8: DDP averages gradients, and FSDP2 gathers weights, in FP8.
    """

    kind: str | None = None
    rank: int = 0
    world: int = 1
    fp8: bool = False

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, batch: Tensor) -> Tensor:
        """The examples of a batch that this process trains on."""
        return batch.chunk(self.world)[self.rank]

    def of_first(self, value: T) -> T:
        """The first process's value."""
        values = [value]
        if self.world > 1:
            dist.broadcast_object_list(values)
        return values[0]

    def together(self, call: Callable[[], T]) -> T:
        """``call()``. Where it raises ValueError or OSError on one, BadInputError on all."""
        result, error = None, None
        try:
            result = call()
        except (ValueError, OSError) as raised:
            error = str(raised)
        errors = [error] * self.world
        if self.world > 1:
            dist.all_gather_object(errors, error)
        for found in errors:
            if found is not None:
                raise BadInputError(found)
        return result  # type: ignore[return-value]

    def of_all(self, value: Tensor) -> Tensor:
        """(world, ...): the value of each process."""
        values = [torch.empty_like(value) for _ in range(self.world)]
        if self.world > 1:
            dist.all_gather(values, value)
        else:
            values = [value]
        return torch.stack(values)

    def average_(self, values: Tensor) -> None:
        """Gives ``values`` the mean over the processes."""
        if self.world > 1:
            dist.all_reduce(values)
            values /= self.world


ALONE = Ranks()


@contextmanager
def start(kind: str | None, *, fp8: bool = False) -> Iterator[Ranks]:
    """The processes that torchrun has started; the block is what they do together.

    Raises BadInputError where it has not.
    """
    if kind is None:
        yield ALONE
        return
    missing = [name for name in ENVIRONMENT if name not in os.environ]
    if missing:
        raise BadInputError(
            f"--parallel {kind} needs torchrun --nproc-per-node N -m notebooks.nanogpt: "
            f"{', '.join(missing)} not set"
        )
    # Of outputs that are views: nothing here changes one in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    yield Ranks(kind=kind, rank=dist.get_rank(), world=dist.get_world_size(), fp8=fp8)
    dist.barrier()
    dist.destroy_process_group()


def distribute(model: nn.Module, ranks: Ranks, rehearse: Callable[[nn.Module], None]) -> nn.Module:
    """What to call instead of ``model``, whose parameters FSDP2 replaces.

    rehearse: calls the model in every way that it will be called: `unit_scale` cannot look at a
    sharded model, and measures the same gradients however many processes there are.
    """
    if ranks.kind in ("ddp", "fsdp"):
        rehearse(model)
    if ranks.kind == "ddp":
        wrapped = DistributedDataParallel(model)
        if ranks.fp8:
            wrapped.register_comm_hook(None, all_reduce_hook)
        return wrapped
    if ranks.kind == "fsdp":
        if ranks.fp8:
            unit_scaled = any(has_parameter_data(p) for p in model.parameters())
            gather_in_fp8(model, "unit" if unit_scaled else "tensor")
        mesh = init_device_mesh(next(model.parameters()).device.type, (ranks.world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def optimizer_state(optimizer: torch.optim.Optimizer, ranks: Ranks) -> Any:
    """The whole state of an optimizer; under FSDP2 without what is about one shard."""
    sharded = ranks.kind == "fsdp"
    return whole(portable_state_dict(optimizer) if sharded else optimizer.state_dict())


def whole(state: Any) -> Any:
    """A state_dict with the whole of every sharded tensor. All processes must call it."""
    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    return [whole(value) for value in state] if isinstance(state, list) else state


def load(
    model: nn.Module, optimizer: torch.optim.Optimizer, weights: dict[str, Any], states: Any
) -> None:
    """Loads whole state_dicts into what may be sharded, in another number of parts than before."""
    own = model.state_dict()
    model.load_state_dict({name: _sharded(t, own.get(name)) for name, t in weights.items()})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    by_parameter = {
        i: {name: _sharded(value, parameters[i]) for name, value in state.items()}
        for i, state in states["state"].items()
    }
    optimizer.load_state_dict({**states, "state": by_parameter})


def _sharded(value: Any, like: Any) -> Any:
    if isinstance(like, DTensor) and isinstance(value, Tensor) and value.shape == like.shape:
        value = value.to(like.device)
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value
