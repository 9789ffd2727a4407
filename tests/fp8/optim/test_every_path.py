"""Steps with random settings, parameters and gradients: the same bits in a process that is resumed
or copied, near to those of torch's optimizers in float64."""

import random
from copy import deepcopy

import torch
from torch import nn

from fp8.optim import Adam, AdamW
from fp8.optim.encodings import MOMENTS
from tests.shared import (
    assert_same,
    filterwarnings,
    pairs,
    parametrize,
    pickled,
    sampled,
    saved,
    seeded,
)

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
        size = 10.0 ** choose.choice([-6, -2, 0, 1])
        grad = torch.randn(parameter.shape, generator=draw) * size
        what = choose.choice(["none", "zeros", "sparse", "", "", "", ""])
        if what == "sparse":
            grad *= torch.rand(grad.shape, generator=draw) < 0.05
        grad *= what != "zeros"
        grad = grad / 0 * 0 if missing else grad
        yield None if what == "none" else grad.to(parameter.dtype)


def step_by(optimizer, grads, step):
    (group,) = optimizer.param_groups
    for parameter, grad in pairs(group["params"], grads):
        parameter.grad = grad
    group["lr"] = 0.01 / (1 + step)
    optimizer.step()


def stepped(seed, optimizer, steps):
    for step in steps:
        given = optimizer.param_groups[0]["params"]
        step_by(optimizer, gradients(seed, step, given), step)


def state_of(optimizer):
    return optimizer.param_groups[0]["params"], optimizer.state_dict()["state"]


def resumed(optimizer, kind, settings):
    (group,) = optimizer.param_groups
    own = [nn.Parameter(p.detach().clone()) for p in group["params"]]
    other = kind(own, **settings)
    other.load_state_dict(saved(optimizer.state_dict()))
    return other


@filterwarnings("ignore:stochastic_weights=True rounds no weight")
@sampled(8)
@parametrize("seed", range(80))
def test_steps(seed):
    kind, settings, low, parameters = drawn(seed)
    doubles = [nn.Parameter(p.detach().double()) for p in parameters]
    before = [p.detach().double() for p in parameters]
    optimizer = kind(parameters, **settings, **low)
    middle = random.Random(seed).randrange(1, STEPS)
    stepped(seed, optimizer, range(middle))
    others = [resumed(optimizer, kind, {**settings, **low}), deepcopy(optimizer)]
    others.append(pickled(optimizer))
    for each in (optimizer, *others):
        stepped(seed, each, range(middle, STEPS))
    for other in others:
        assert_same(state_of(other), state_of(optimizer))
    reference = DOUBLE[kind](doubles, **settings)
    for step in range(STEPS):
        found = list(gradients(seed, step, parameters))
        if all(grad is None or grad.isfinite().all() for grad in found):
            wide = [grad if grad is None else grad.double() for grad in found]
            step_by(reference, wide, step)
    exact = low["first_moment"] == low["second_moment"] == "float32"
    unit = torch.finfo(parameters[0].dtype).eps
    for ours, exactly, start in pairs(parameters, doubles, before):
        moved = (exactly - start).norm()
        error = (ours.double() - exactly).norm()
        rounding = STEPS * unit * (start.norm() + moved)
        assert error <= rounding + (0 if exact else 0.6) * moved
