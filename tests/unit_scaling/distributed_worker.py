"""One of two processes of test_distributed: ``python distributed_worker.py RANK STORE``.

Each trains on its half of a batch, and compares with the whole batch in one process.
"""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import unit_scaling as uu
from tests.launch import as_rank
from tests.shared import assert_close, quietly, refuses, seeded
from unit_scaling import functional as U
from unit_scaling.transforms import unit_scale

WORLD, CALLS, BATCH, VOCAB, WIDTH = 2, 2, 8, 6, 4


def block():
    return nn.Sequential(uu.Linear(WIDTH, WIDTH, bias=True), uu.GELU())


def made():
    return nn.Sequential(
        uu.Embedding(VOCAB, WIDTH),
        uu.DepthSequential(block(), block()),
        uu.LayerNorm(WIDTH, elementwise_affine=True),
        uu.LinearReadout(WIDTH, VOCAB, constraint="to_output_scale"),
    )


def train(model, batches, steps=2, loss=U.cross_entropy):
    """The parameters after some steps of SGD, each over all batches, gathered."""
    opt = uu.optim.SGD(
        model.parameters(), 0.01, 0.9, readout_constraint="to_output_scale"
    )
    for _ in range(steps):
        opt.zero_grad()
        for tokens in batches:
            logits = model(tokens[:, :-1])
            loss(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        opt.step()
    return {
        name.removeprefix("module."): p.full_tensor()
        if isinstance(p, DTensor)
        else p.detach()
        for name, p in model.named_parameters()
    }


def tags(model):
    return [(p.mup_type, p.mup_scaling_depth) for p in model.parameters()]


def rates(model):
    """The learning rate of each parameter."""
    opt = uu.optim.SGD(model.parameters(), 1.0, readout_constraint="to_output_scale")
    return list(opt.param_groups[0]["mup_lr_scales"])


def sharded(model, parts):
    """Weights by their second dimension, so that what is here is not the fan-in."""
    for part in (*parts, model):
        fully_shard(part, shard_placement_fn=lambda p: Shard(p.dim() - 1))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return model


def check(model, distribute, calls, loss=U.cross_entropy):
    """Tags, learning rates, and weights after training equal those of one process."""
    tokens = torch.randint(VOCAB, (BATCH, 5), generator=seeded(0))
    plain = deepcopy(model)
    expected_tags, expected_rates = tags(plain), rates(plain)
    expected = train(plain, [tokens], loss=loss)
    model = distribute(model)
    uu.parameter.restore_tags(model)  # modules of `uu` do so themselves
    assert tags(model) == expected_tags
    assert rates(model) == expected_rates
    mine = tokens.chunk(WORLD)[dist.get_rank()].chunk(calls)
    with uu.batch_multiplier(WORLD * calls, averaged_over=WORLD):
        result = train(model, list(mine), loss=loss)
    assert tags(model) == expected_tags
    assert_close(result, expected)


def check_zero():
    """ZeroRedundancyOptimizer, under a rate that is set: the steps of one process."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of torch.jit

    torch.manual_seed(0)
    model = nn.Sequential(uu.Linear(8, 16), uu.LayerNorm(16), uu.LinearReadout(16, 4))
    other = deepcopy(model)
    shared = ZeroRedundancyOptimizer(model.parameters(), uu.optim.AdamW, lr=0.5)
    for net, opt in (
        (model, shared),
        (other, uu.optim.AdamW(other.parameters(), lr=0.5)),
    ):
        for step in range(4):
            for p in net.parameters():
                p.grad = torch.linspace(-1, 1 + step, p.numel()).reshape(p.shape)
            opt.param_groups[0]["lr"] /= 2
            opt.step()
    assert_close(list(model.parameters()), list(other.parameters()))


def check_flattened(scaled):
    """FullyShardedDataParallel hides the shapes and the tags of weights: trained as in one process,
    or refused by name."""

    def wrapped(model, **options):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **options)

    tokens = torch.randint(VOCAB, (BATCH, 5), generator=seeded(0))
    expected = train(deepcopy(scaled), [tokens], loss=F.cross_entropy)
    model = deepcopy(scaled)
    opt = uu.optim.SGD(
        model.parameters(), 0.01, 0.9, readout_constraint="to_output_scale"
    )
    whole = wrapped(model, use_orig_params=True)
    mine = tokens.chunk(WORLD)[dist.get_rank()]
    for _ in range(2):
        opt.zero_grad()
        F.cross_entropy(
            whole(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten()
        ).backward()
        opt.step()
    with FullyShardedDataParallel.summon_full_params(whole):
        result = {n: p.detach().clone() for n, p in model.named_parameters()}
    assert_close(result, expected)
    with refuses("make the optimizer before wrapping the model"):
        uu.optim.SGD(whole.parameters(), 0.01)


def main(rank, store):
    torch.manual_seed(0)
    model = made().double()
    for calls in (1, CALLS):
        check(deepcopy(model), DistributedDataParallel, calls)
        check(deepcopy(model), lambda m: sharded(m, list(m[1])), calls)
    net = nn.Sequential(
        nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB)
    )
    net.append(nn.Linear(VOCAB, VOCAB))
    scaled = unit_scale(net.double())
    with refuses("before fully_shard", RuntimeError):
        sharded(deepcopy(scaled), [])(torch.zeros(2, 2, dtype=torch.int64))
    # Is recorded before it is sharded, and measures the gradient of its loss.
    train(scaled, [torch.randint(VOCAB, (BATCH, 5))], steps=1, loss=F.cross_entropy)
    check(deepcopy(scaled), lambda m: sharded(m, [m[2]]), 1, F.cross_entropy)
    with quietly():
        check_flattened(scaled)
        check_zero()
    tokens = torch.zeros(2, 2, dtype=torch.int64)
    wrapped = DistributedDataParallel(deepcopy(scaled))
    assert uu.verify(wrapped, tokens) == uu.verify(scaled, tokens)
    with refuses("which FSDP has sharded: call it before"):
        uu.verify(sharded(deepcopy(scaled), [scaled[2]]), tokens)


if __name__ == "__main__":
    as_rank(main, WORLD)
