import copy
import inspect
import math

import pytest
import torch
from torch import nn

import unit_scaling as uu
from fp8.warnings import OptimizerWarning
from tests.shared import pairs, parametrize, pickled, refuses, warns
from unit_scaling.optim import (
    LR_MULT,
    RATES,
    SGD,
    UMUP,
    Adam,
    AdamW,
    lr_scale_func_adam,
    lr_scale_func_sgd,
    scaled_parameters,
)
from unit_scaling.parameter import Parameter, tag
from unit_scaling.rules.rates import default_rate, kind_of

approx = pytest.approx
OPTIMIZERS = [SGD, Adam, AdamW]
each_optimizer = parametrize("cls", OPTIMIZERS)


def parameters():
    shapes = (8, 16), (16,), (16,), (8, 32), (8, 4, 3), (8, 16), (8, 4, 3, 5)
    kinds = "weight bias norm output weight weight weight".split()
    rows = pairs(shapes, kinds, (None, 4, None, None, 9, None, None))
    return [Parameter(torch.ones(shape), kind, depth) for shape, kind, depth in rows]


def lrs(opt):
    """The learning rate of every parameter, in the order in which they were given."""
    groups = opt.state_dict()["param_groups"]
    return [group["lr"] * scale for group in groups for scale in group["mup_lr_scales"]]


def decays(opt):
    """What a step takes off each parameter, as a share, if its gradient is zero or a step's."""
    opt.state_dict()
    parts = [part for split in opt._splits for part in split.parts]
    each = [(float(p["lr"]) * p["weight_decay"], p["params"]) for p in parts]
    return [decay for decay, params in each for _ in params]


FAN_INS = {
    (): 1,
    (6,): 6,
    (2, 6): 6,
    (2, 3, 5): 15,
    (2, 3, 5, 7): 105,
    (2, 3, 1, 4, 2): 24,
}


@parametrize("shape", FAN_INS)
def test_fan_in(shape):
    """Of up to three dimensions it is that of the library this one replaces. A stack has the rate
    of one of its matrices."""
    p, stack = Parameter(torch.ones(shape), "weight"), torch.ones(7, *shape)
    many = Parameter(stack, "weight", mup_stacked=True)
    fan_in, sgd = FAN_INS[shape], lr_scale_func_sgd("to_output_scale")
    for each in (p, many):
        assert lr_scale_func_adam(each) == approx(fan_in**-0.5)
        assert sgd(each) == approx(fan_in**0.5)
    rate = RATES["sgd"] * 5 * fan_in * (2 if len(shape) > 2 else 1)
    for parameter, stacked in ((nn.Parameter(torch.ones(shape)), False), (many, True)):
        tag(parameter, "weight", mup_divisor=0.5, mup_stacked=stacked)
        assert default_rate("sgd", parameter) == approx(rate)


def test_rules():
    """Recorded from the library this one replaces; the convolution of two dimensions is ours."""
    adam = approx([0.25, 0.5, 1, 1, 0.096225, 0.25, 60**-0.5], abs=5e-7)
    assert [lr_scale_func_adam(p) for p in parameters()] == adam
    assert [lr_scale_func_sgd(None)(p) for p in parameters()] == adam
    sgd = [4.0, 8.0, 16, 1, 1.154701, 4.0, 60**0.5]
    scale = lr_scale_func_sgd("to_output_scale")
    assert [scale(p) for p in parameters()] == approx(sgd, abs=5e-7)
    with refuses("choose one of None, 'to_output_scale'"):
        lr_scale_func_sgd("gmean")


@each_optimizer
def test_torch_arguments(cls):
    """Positions and names are torch's; what is added is by keyword only."""
    plain = inspect.signature(getattr(torch.optim, cls.__name__)).parameters.values()
    positional = [p.name for p in plain if p.kind is p.POSITIONAL_OR_KEYWORD]
    ours = inspect.signature(cls).parameters.values()
    assert [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    rate = RATES["sgd" if cls is SGD else "adam"]
    assert lrs(cls(parameters())) == approx(lrs(cls(parameters(), lr=rate)))


@each_optimizer
def test_lr_mult(cls):
    """A factor for a kind beside the rule's, also in groups added later; the decay stays."""
    mult = {"norm": 1 / 4, "bias": 0.5, "output": 1, "kernel": 2, "few": 1}
    for parameter in parameters():
        (alone,) = lrs(cls([parameter], lr=1.0, lr_mult=UMUP))
        opt = pickled(cls([parameter], 1.0, weight_decay=1e-3, lr_mult=mult))
        opt.add_param_group({"params": [copy.deepcopy(parameter)]})
        expected = alone * mult.get(kind_of(parameter), 1.0)
        assert [group["lr"] for group in opt.param_groups] == [1.0, 1.0]
        assert lrs(opt) == approx([expected, expected])
        assert decays(opt) == approx([1e-3, 1e-3])


def test_default_factors():
    """Those of LR_MULT, unless another is given for the kind."""
    umup = [lr_scale_func_adam(p) for p in parameters()]
    factors = [1, 1 / 32, 1 / 32, 2, 2 * 12**0.5 / 4, 1, 2]
    expected = [u * f for u, f in pairs(umup, factors)]
    assert lrs(AdamW(parameters(), lr=1.0)) == approx(expected)
    assert lrs(AdamW(parameters(), lr=1.0, lr_mult=UMUP)) == approx(umup)
    expected[2] = 1.0
    given = AdamW(parameters(), lr=1.0, lr_mult={"norm": 1.0})
    assert lrs(given) == approx(expected)
    assert set(LR_MULT["adam"]) == set(UMUP)


@parametrize("fan_in", [1, 9, 16, 100])
def test_the_rate_of_a_weight_of_few_inputs_is_limited(fan_in):
    """To that of 16; also of kernels, but not of readouts."""
    x, kernel = torch.ones(64, fan_in), torch.ones(64, 1, fan_in)
    rows = (x, "weight"), (kernel, "weight"), (x, "output")
    of_space = 2 if fan_in > 1 else 1
    given = [Parameter(values.clone(), kind, None) for values, kind in rows]
    for mult, limit in ((None, 1 / 4), ({"few": 1 / 8}, 1 / 8)):
        factor = min(fan_in**-0.5, limit)
        rates = lrs(AdamW(given, lr=1.0, lr_mult=mult))
        assert rates == approx([factor, of_space * factor, 2])


def test_lr_mult_that_cannot_be():
    with refuses(r"kind in lr_mult.*'gain'"):
        AdamW(parameters(), lr_mult={"gain": 0.1})
    for factor in (-1.0, math.inf, math.nan):
        with refuses("lr_mult must be finite and not negative"):
            scaled_parameters(parameters(), "adam", lr=1.0, lr_mult={"norm": factor})


@each_optimizer
def test_forms_of_params(cls):
    """Groups are those that were given."""
    module = nn.ParameterList(parameters())
    opt = cls(module.parameters(), lr=1.0)
    assert [len(group["params"]) for group in opt.param_groups] == [len(module)]
    named = cls(module.named_parameters(), lr=1.0)
    assert lrs(named) == lrs(opt)
    names = [name for name, _ in module.named_parameters()]
    assert named.param_groups[0]["param_names"] == names
    groups = [{"params": parameters()[0], "lr": 2.0}, {"params": parameters()[1:3]}]
    several = cls(groups, lr=1.0, lr_mult=UMUP)
    assert peaks(several) == [2.0, 1.0]
    assert lrs(several) == approx([0.5, 0.5, 1.0])
    assert peaks(cls(several.param_groups, lr=7.0)) == [2.0, 1.0]


@each_optimizer
def test_added_groups_are_scaled(cls):
    opt = cls(parameters()[:1], lr=0.5, weight_decay=1e-3, lr_mult=UMUP)
    opt.add_param_group({"params": parameters()[4:5]})
    opt.add_param_group({"params": parameters()[2:], "lr": 1.0, "weight_decay": 0.0})
    assert lrs(opt)[1] == approx(0.5 / 3 / 12**0.5)
    assert decays(opt) == approx([1e-3, 1e-3, *[0.0] * 5])
    assert peaks(opt) == [0.5, 0.5, 1.0]
    with refuses("has no mup_type"):
        opt.add_param_group({"params": nn.Parameter(torch.ones(2))})
    assert len(lrs(opt)) == 7


@each_optimizer
def test_weight_decay(cls):
    """Independent: that of a step is the same for all. Otherwise torch's. One copied from torch is
    named."""
    opt = cls(parameters(), 0.1, weight_decay=1e-3)
    assert decays(opt) == approx([1e-3] * 7)
    opt.param_groups[0]["lr"] /= 4  # as by a schedule
    assert decays(opt) == approx([1e-3 / 4] * 7)
    opt.param_groups[0]["weight_decay"] *= 2
    assert decays(opt) == approx([1e-3 / 2] * 7)
    opt = cls(parameters(), 0.1, weight_decay=0.2, independent_weight_decay=False)
    assert sorted(decays(opt)) == approx(sorted(0.2 * rate for rate in lrs(opt)))
    opt = cls(parameters(), lr=0, weight_decay=1e-3)
    opt.param_groups[0]["lr"] = 0.5  # no rate that it could be divided by: torch's
    by_rate = sorted(1e-3 * rate for rate in lrs(opt))
    assert sorted(decays(opt)) == approx(by_rate)
    decay = {SGD: 0.011, Adam: 0.012, AdamW: 0.013}[cls]  # once per process and number
    with warns(f"weight_decay={decay} takes 1% off .* times the lr", OptimizerWarning):
        cls(parameters(), lr=0.5, weight_decay=decay)
    cls(parameters(), lr=0.5, weight_decay=0.009)


@each_optimizer
def test_untagged_parameters(cls):
    params = [("head.weight", nn.Parameter(torch.ones(2, 3)))]
    with refuses(r"head\.weight of shape \(2, 3\) has no mup_type"):
        cls(params, 0.1)
    assert lrs(cls(params, 0.1, allow_non_unit_scaling_params=True)) == [0.1]


def peaks(groups):
    return [group["lr"] for group in getattr(groups, "param_groups", groups)]


def test_scaled_parameters():
    first = {"params": parameters()[:2], "lr": 0.2, "betas": (0.8, 0.9)}
    given = [first, {"params": parameters()[2:3]}]
    groups = scaled_parameters(given, lr_scale_func_adam, lr=0.1, weight_decay=3e-3)
    assert peaks(groups) == approx([0.05, 0.1, 0.1])
    assert [g["weight_decay"] for g in groups] == approx([0.06, 0.03, 0.03])
    assert groups[1]["betas"] == (0.8, 0.9)
    assert [g["mup_lr_scale"] for g in groups] == approx([0.25, 0.5, 1.0])
    torch.optim.RAdam(groups)  # any optimizer of torch takes them
    with refuses("a function has no default rate"):
        scaled_parameters(parameters(), lr_scale_func_adam)


def test_rule_by_name_or_of_ones_own():
    rules = "sgd_to_output_scale", lr_scale_func_sgd("to_output_scale")
    named, own = (scaled_parameters(parameters(), rule, lr=0.1) for rule in rules)
    assert peaks(named) == peaks(own)
    # Shampoo's update has singular values of 1, as Muon's before its own correction.
    rule = lambda p: (p.shape[0] / (p.mup_scaling_depth or 1)) ** 0.5  # noqa: E731
    groups = scaled_parameters(parameters()[1:2], rule, lr=0.1)
    assert peaks(groups) == approx([0.1 * 2])
    with refuses("unknown learning-rate rule 'adamw'; choose one of 'adam"):
        scaled_parameters(parameters(), "adamw", lr=0.1)
    with refuses(r"'muon' is for .* 'weight': got 'bias', .* \(16,\)"):
        scaled_parameters(parameters(), "muon", lr=0.1)


@parametrize("shape", [(64, 64), (256, 64), (64, 256), (128, 128)])
def test_muon(shape):
    """The layer changes by lr * sqrt(fan_out/fan_in) in the spectral norm.

    The Newton-Schulz iteration of Muon takes singular values to between 0.7 and 1.2 of 1.
    """
    fan_out, fan_in = shape
    layer = uu.Linear(fan_in, fan_out)
    groups = scaled_parameters(layer.parameters(), "muon", lr=0.5)
    opt = torch.optim.Muon(groups)
    before = layer.weight.detach().clone()
    layer(torch.randn(64, fan_in)).backward(torch.randn(64, fan_out))
    opt.step()
    step = (layer.weight.detach() - before) / fan_in**0.5
    change = torch.linalg.matrix_norm(step, 2) / (0.5 * (fan_out / fan_in) ** 0.5)
    assert 0.65 < change < 1.25


@each_optimizer
def test_the_state_of_another_optimizer_is_refused(cls):
    """Of torch, and of unit-scaling 0.3.5, which has a group for each parameter."""
    plain = getattr(torch.optim, cls.__name__)
    for params in (parameters(), [{"params": [p]} for p in parameters()]):
        with refuses(r"is not of an optimizer of unit_scaling\.optim"):
            cls(parameters()).load_state_dict(plain(params).state_dict())
