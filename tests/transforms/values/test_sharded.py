"""`unit_scale` of models that processes have divided: in place, with the numbers of the model that
is whole, whatever the batch of each process."""

import copy
import math

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import unit_scaling as uu
from fp8.common.dtensor import whole
from tests.launch import needs_gloo, run_ranks
from tests.shared import Net, assert_close, both, descend, parametrize, refuses, seeded
from unit_scaling.parameter import tags_of
from unit_scaling.transforms import unit_scale
from unit_scaling.transforms.values.set_values import GRID

LAYERS = 6

pytestmark = needs_gloo


def residual(m, x):
    return x + m.down(nn.functional.gelu(m.up(m.norm(x))))


def block():
    up, down = nn.Linear(32, 128), nn.Linear(128, 32)
    return Net(residual, norm=nn.LayerNorm(32), up=up, down=down)


def logits(m, ids):
    x = m.embed(ids)
    for block in m.blocks:
        x = block(x)
    return m.head(m.norm(x))


def batch(rank):
    return torch.randint(65, (4, 32), generator=seeded(rank))


def model(seed=0):
    torch.manual_seed(seed)
    return Net(
        logits,
        embed=nn.Embedding(65, 32),
        blocks=nn.ModuleList(block() for _ in range(LAYERS)),
        norm=nn.LayerNorm(32),
        head=nn.Linear(32, 65),
    )


def check_equal(ours, reference, octaves=0.0):
    """The values and tags of a divided model are those of one that is whole, up to ``octaves``."""
    for mine, theirs in both(ours, reference):
        size = 2**octaves * (1 + 1e-5) - 1
        assert_close(whole(mine.detach()), theirs.detach(), rtol=size, atol=0)
        tags, expected = (tags_of(p)._replace(mup_divisor=None) for p in (mine, theirs))
        assert abs(math.log2(tags.mup_scale / expected.mup_scale)) <= octaves + 1e-9
        assert tags._replace(mup_scale=1.0) == expected._replace(mup_scale=1.0)


def check_trains(ours, ids):
    optimizer = uu.optim.AdamW(ours.parameters())
    loss = lambda: nn.functional.cross_entropy(ours(ids).mT, ids)  # noqa: E731
    first, *_, last = descend(optimizer, (loss() for _ in range(5)))
    assert last < first - 1


def shard(plain):
    for block in plain.blocks:
        fully_shard(block)
    return fully_shard(plain)


def check_fully_shard(rank, store):
    torch.manual_seed(0)
    reference = unit_scale(model(), batch=batch(0))
    ids = batch(0)  # of the process that is first, whichever that is
    at_once = shard(model())
    assert unit_scale(at_once, batch=ids) is at_once
    check_equal(at_once, reference)
    pending = unit_scale(shard(model()))
    pending(ids)
    for part in pending.modules():
        if hasattr(part, "reshard"):
            part.reshard()
    check_equal(pending, reference)
    check_trains(pending, batch(rank))
    late = shard(unit_scale(model()))
    with refuses("before fully_shard, or call unit_scale after that", RuntimeError):
        late(ids)
    with refuses("FullyShardedDataParallel has flattened"):
        unit_scale(FullyShardedDataParallel(model(), device_id=torch.device("cpu")))


def by_rows_and_columns(plain):
    plan = {"head": ColwiseParallel(output_layouts=Replicate())}
    for i in range(LAYERS):
        plan |= {
            f"blocks.{i}.up": ColwiseParallel(),
            f"blocks.{i}.down": RowwiseParallel(),
        }
    return parallelize_module(plain, init_device_mesh("cpu", (2,)), plan)


def by_sequence(plain):
    """Norms and the table divide the positions."""
    positions = Shard(1)
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=positions),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=positions, output_layouts=Replicate()),
    }
    for i in range(LAYERS):
        plan[f"blocks.{i}.norm"] = SequenceParallel()
        plan[f"blocks.{i}.up"] = ColwiseParallel(input_layouts=positions)
        plan[f"blocks.{i}.down"] = RowwiseParallel(output_layouts=positions)
    return parallelize_module(plain, init_device_mesh("cpu", (2,)), plan)


def check_parallelize(rank, store):
    ids = batch(0)
    for seed in (1, 2, 3, 0):
        reference = unit_scale(model(seed), batch=ids)
        check_equal(unit_scale(by_rows_and_columns(model(seed)), batch=ids), reference)
        # A branch is measured on the positions of one process: the next number of the grid.
        ours = unit_scale(by_sequence(model(seed)), batch=ids)
        check_equal(ours, reference, octaves=GRID)
    check_trains(ours, ids)
    pending = unit_scale(by_rows_and_columns(model()))
    assert_close(pending(ids), reference(ids), rtol=1e-4, atol=1e-5)
    check_equal(pending, reference)
    check_trains(pending, ids)
    early = unit_scale(copy.deepcopy(model()))
    by_rows_and_columns(early)(ids)
    check_equal(early, reference)


@parametrize("check", [check_fully_shard, check_parallelize])
def test_a_divided_model_has_the_numbers_of_a_whole_one(check, tmp_path):
    run_ranks(check, 2, tmp_path / "store", warnings="default")
