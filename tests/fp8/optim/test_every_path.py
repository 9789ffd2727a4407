"""Steps with random settings, parameters and gradients: the same bits in a process that is resumed
or copied, near to those of torch's optimizers in float64."""

import copy
import io
import random

import pytest
import torch
from torch import nn

from fp8.optim import Adam, AdamW
from fp8.optim.encodings import MOMENTS
from tests.shared import pickled, seeded

SHAPES = ((8,), (3, 5), (), (0,), (64, 80), (5000,), (4, 2, 3, 3), (70, 70))
STEPS = 8
DOUBLE = {Adam: torch.optim.Adam, AdamW: torch.optim.AdamW}


def drawn(seed):
    """(class, settings of torch, of this package, parameters)."""
    choose = random.Random(seed)
    kind = choose.choice(list(DOUBLE))
    settings = {"lr": 0.01, "weight_decay": choose.choice([0.0, 0.1])}
    low = {"master_weights": choose.choice([None, None, "float32", "float16"])}
    shapes = [choose.choice(SHAPES) for _ in range(choose.randint(2, 4))]
    dtype = choose.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    settings["betas"] = choose.choice([(0.9, 0.95), (0.8, 0.99), (0.9, 0.999)])
    low |= {name: choose.choice(sorted(allowed)) for name, allowed in MOMENTS.items()}
    low |= {"min_size": choose.choice([0, 4096]), "seed": choose.randrange(3)}
    low["stochastic_weights"] = choose.random() < 0.5
    draw = seeded(seed)
    values = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    turned = [x.mT if x.dim() > 1 and choose.random() < 0.3 else x for x in values]
    return kind, settings, low, [nn.Parameter(x) for x in turned]


def gradients(seed, step, parameters):
    """Of many sizes, of zeros, sparse, none, and a NaN in a step of five."""
    choose = random.Random(f"{seed} {step}")
    draw = seeded(100 * seed + step)
    missing = step % 5 == 3
    for parameter in parameters:
        grad = torch.randn(parameter.shape, generator=draw) * 10.0 ** choose.choice(
            [-6, -2, 0, 1]
        )
        what = choose.choice(["none", "zeros", "sparse", "", "", "", ""])
        if what == "sparse":
            grad *= torch.rand(grad.shape, generator=draw) < 0.05
        grad *= what != "zeros"
        yield (
            None
            if what == "none"
            else (grad / 0 * 0 if missing else grad).to(parameter.dtype)
        )


def stepped(seed, optimizer, steps):
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for step in steps:
        for parameter, grad in zip(
            parameters, gradients(seed, step, parameters), strict=True
        ):
            parameter.grad = grad
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        optimizer.step()


def same(ours, theirs):
    pairs = zip(
        *(each.param_groups[0]["params"] for each in (ours, theirs)), strict=True
    )
    for a, b in pairs:
        state, other = ours.state[a], theirs.state[b]
        assert state.keys() == other.keys()
        for x, y in ((a, b), *((state[name], other[name]) for name in state)):
            assert x.dtype == y.dtype
            assert torch.equal(x.float(), y.float())


def saved(optimizer, kind, settings):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    own = [p for group in optimizer.param_groups for p in group["params"]]
    other = kind([nn.Parameter(p.detach().clone()) for p in own], **settings)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


@pytest.mark.filterwarnings("ignore:stochastic_weights=True rounds no weight")
@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(80))
def test_steps(seed):
    kind, settings, low, parameters = drawn(seed)
    doubles = [nn.Parameter(p.detach().double()) for p in parameters]
    before = [p.detach().double() for p in parameters]
    optimizer = kind(parameters, **settings, **low)
    middle = random.Random(seed).randrange(1, STEPS)
    stepped(seed, optimizer, range(middle))
    others = [saved(optimizer, kind, {**settings, **low}), copy.deepcopy(optimizer)]
    others.append(pickled(optimizer))
    for each in (optimizer, *others):
        stepped(seed, each, range(middle, STEPS))
    for other in others:
        same(other, optimizer)
    reference = DOUBLE[kind](doubles, **settings)
    for step in range(STEPS):
        found = list(gradients(seed, step, parameters))
        if all(grad is None or grad.isfinite().all() for grad in found):
            for double, grad in zip(doubles, found, strict=True):
                double.grad = None if grad is None else grad.double()
            for group in reference.param_groups:
                group["lr"] = 0.01 / (1 + step)
            reference.step()
    exact = low["first_moment"] == low["second_moment"] == "float32"
    unit = torch.finfo(parameters[0].dtype).eps
    for ours, exactly, start in zip(parameters, doubles, before, strict=True):
        moved = (exactly - start).norm()
        error = (ours.double() - exactly).norm()
        assert (
            error
            <= STEPS * unit * (start.norm() + moved) + (0 if exact else 0.6) * moved
        )
