"""Optimizers that step the wrong parameters, or unit-scaled ones at torch's rate, say so once."""

import re

import torch
from torch import nn

import fp8
import unit_scaling as uu
from fp8.warnings import OptimizerWarning
from tests.shared import linears, parametrize, quietly, refuses, said, warns
from unit_scaling.transforms import simulate_fp8, track_scales, unit_scale

RATE = 0.5


def plain():
    torch.manual_seed(0)
    return linears(16, 32, nn.GELU, 8)


def batch():
    return torch.randn(4, 16)


def step(model, *optimizers, scale=1.0):
    for optimizer in optimizers:
        optimizer.zero_grad()
    (model(batch()).square().sum() * scale).backward()
    for optimizer in optimizers:
        optimizer.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), RATE)


# An optimizer made before the transform

#: Name -> transforms, of which the first is named.
TRANSFORMS = {
    "unit_scale": unit_scale,
    "simulate_fp8": simulate_fp8,
    "track_scales": track_scales,
    "unit_scale, then another": lambda model: simulate_fp8(unit_scale(model)),
}


@parametrize("trained", [False, True])
@parametrize("name", TRANSFORMS)
def test_an_optimizer_made_before_a_transform_says_so_at_its_first_step(name, trained):
    model = plain()
    optimizer = sgd(model)
    if trained:
        step(model, optimizer)
    model = TRANSFORMS[name](model)
    message = f"SGD was made before {name.partition(',')[0]}"
    with warns(message, OptimizerWarning) as caught:
        step(model, optimizer)
    assert caught[0].filename == __file__
    step(model, optimizer)  # no second one: warnings are errors here
    step(model, sgd(model))
    model = plain()
    optimizer = sgd(model)
    model = TRANSFORMS[name](model)
    with fp8.strict(), refuses(message, OptimizerWarning):
        step(model, optimizer)


def test_the_original_may_be_trained_on():
    """With copies that are evaluated, or trained as well (a student, an average of weights)."""
    model = plain()
    optimizer = sgd(model)
    step(model, optimizer)
    scaled = unit_scale(model)
    uu.verify(scaled, batch())
    with torch.no_grad():
        scaled(batch())
    step(model, optimizer)
    student = sgd(scaled)
    x = batch()
    for _ in range(2):
        (scaled(x) - model(x)).square().sum().backward()
        optimizer.step()
        student.step()
    both = torch.optim.SGD([*model.parameters(), *scaled.parameters()], RATE)
    step(scaled, both)


def test_an_optimizer_without_gradients_or_of_another_model_is_none_of_it():
    model, other = plain(), plain()
    optimizer, of_other = sgd(model), sgd(other)
    scaled = unit_scale(model)
    scaled(batch())
    optimizer.step()  # nothing has a gradient
    step(other, of_other)
    of_other.zero_grad()
    scaled(batch()).sum().backward()
    of_other.step()


def test_compiled_steps_are_left_alone():
    model = unit_scale(plain())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    compiled = torch.compile(optimizer.step, backend="eager")
    model(batch()).sum().backward()
    before = model[0].weight.detach().clone()
    with quietly():
        compiled()
    assert not torch.equal(model[0].weight, before)


# A rate far from the rule's on unit-scaled weights


def of_modules():
    return nn.Sequential(uu.Linear(16, 32), uu.GELU(), uu.LinearReadout(32, 8))


def transformed():
    return unit_scale(plain(), batch=torch.randn(64, 16))


def named(make, **settings):
    return lambda model: make(model.parameters(), **settings)


def by_group(model):
    parameters = enumerate(model.parameters())
    groups = [{"params": [p], "lr": 0.1 * (1 + i / 4)} for i, p in parameters]
    return torch.optim.AdamW(groups, lr=0.1)


def warm(model):
    """At the start of a schedule to a rate near the rule's."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, total_iters=10)
    return optimizer


def reduced(model):
    """In a loop that sets rates itself."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    return optimizer


class Container(torch.optim.Optimizer):
    """Of optimizers, as torchtitan's: it has parameters and no rate of its own."""

    def step(self, closure=None):
        pass


OPT, SCALED = torch.optim, uu.optim.scaled_parameters
BELOW = r"2 unit-scaled weights.*rate of {}, \d+ times below .* unit_scaling.optim"
#: (The optimizer of a model, what it is warned of).
FAR = [
    (named(OPT.AdamW, lr=1e-3), BELOW.format("0.001")),
    (named(fp8.optim.AdamW, lr=1e-3), BELOW.format("0.001")),
    (named(OPT.SGD, lr=1e-4), BELOW.format("0.0001")),
    (named(OPT.NAdam, lr=4.0), r"rate of 4, \d+ times above that of the rule"),
    (named(uu.optim.AdamW, lr=2**-4.25), "lr=0.05256, 10 times below.* Leave lr out"),
    (named(uu.optim.AdamW, lr=2**2.25), "lr=4.757, 10 times above.* Leave lr out"),
]
NEAR = [
    named(OPT.Adagrad, lr=4.0),  # it may multiply its rate by a factor of its own
    named(OPT.AdamW, lr=0.1),
    named(OPT.SGD, lr=0.5),
    lambda model: OPT.AdamW(SCALED(model.parameters(), "adam"), lr=1.0),
    by_group,
    warm,
    reduced,
    named(uu.optim.AdamW),
    named(uu.optim.AdamW, lr=2**1.75),
    named(uu.optim.AdamW, lr_mult=uu.optim.UMUP),
    lambda model: Container(model.parameters(), {}),
]


def warned_of(model, make, **options):
    """In two steps."""
    optimizer = make(model)
    with said(OptimizerWarning) as messages:
        for _ in range(2):
            step(model, optimizer, **options)
    return messages


@parametrize("make, message", FAR)
def test_a_rate_far_from_the_rule_is_named_once(make, message):
    """One rate of torch's does in a model of `unit_scale` what it does in the plain one."""
    (found,) = warned_of(of_modules(), make)
    assert re.search(message, found)
    assert len(warned_of(transformed(), make)) == ("lr=" in message)


@parametrize("make", NEAR)
def test_a_rate_near_the_rule_is_not_named(make):
    for model in (of_modules(), transformed()):
        assert warned_of(model, make) == []


# An eps that gradients are not large against


@parametrize(
    "scale, eps, warned", [(1e-9, 1e-8, True), (1e-9, 1e-16, False), (1.0, 1e-8, False)]
)
def test_an_eps_near_the_gradients_is_named_once(scale, eps, warned):
    model = unit_scale(plain())
    found = warned_of(model, named(OPT.Adam, lr=2.0**-4, eps=eps), scale=scale)
    assert len([text for text in found if "its eps of 1e-08" in text]) == warned


# Values of the plain model at rates of the transformed one


def trained(model, cls=OPT.AdamW, **settings):
    optimizer = cls(model.parameters(), **settings)
    for _ in range(20):
        step(model, optimizer)
    return model.state_dict()


def average(net):
    mean = torch.optim.swa_utils.AveragedModel(net)
    mean.update_parameters(net)
    return mean.module.state_dict()


#: (The values that are loaded, of the plain and the transformed model; whether this is named.)
LOADED = [
    (lambda net, scaled: net.state_dict(), True),
    (lambda net, scaled: trained(net, lr=1e-3), True),
    (lambda net, scaled: trained(scaled, uu.optim.AdamW), False),
    (lambda net, scaled: average(scaled), False),
]
#: An optimizer, and whether its rates follow tags.
STEPPED = [
    (named(OPT.AdamW, lr=1e-3), False),
    (lambda model: OPT.AdamW(SCALED(model.named_parameters(), "adam")), True),
    (named(uu.optim.AdamW), True),
]


@parametrize("values, is_plain", LOADED)
@parametrize("make, by_tag", STEPPED)
def test_plain_values_at_rates_of_others_are_named_once(values, is_plain, make, by_tag):
    net = linears(16, 32, nn.GELU, 64, nn.GELU, 8)
    scaled, model = (unit_scale(net, batch=torch.randn(64, 16)) for _ in range(2))
    model.load_state_dict(values(net, scaled))
    found = [text for text in warned_of(model, make) if "before unit_scale" in text]
    assert len(found) == (is_plain and by_tag)
