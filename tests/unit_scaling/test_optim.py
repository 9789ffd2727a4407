import copy
import inspect
import math

import pytest
import torch
from torch import nn

import unit_scaling as uu
from unit_scaling.optim import (
    LR_RULES,
    SGD,
    Adam,
    AdamW,
    lr_scale_func_adam,
    lr_scale_func_sgd,
    scaled_parameters,
)
from unit_scaling.parameter import Parameter

OPTIMIZERS = [SGD, Adam, AdamW]
each_optimizer = pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda c: c.__name__)


def parameters() -> list[nn.Parameter]:
    shapes = [
        ((8, 16), "weight", None),
        ((16,), "bias", 4),
        ((16,), "norm", None),
        ((8, 32), "output", None),
        ((8, 4, 3), "weight", 9),
        ((8, 16), "weight", None),
        ((8, 4, 3, 5), "weight", None),
    ]
    return [Parameter(torch.ones(shape), kind, depth) for shape, kind, depth in shapes]


def lrs(opt) -> list[float]:
    """The learning rate of every parameter, in the order of `parameters`."""
    by_id = {id(p): g["lr"] for g in opt.param_groups for p in g["params"]}
    return list(by_id.values())


def test_rules():
    """Recorded from the library this one replaces; the convolution of two dimensions is ours."""
    conv2d = 60**-0.5
    adam = [0.25, 0.5, 1, 1, 0.096225, 0.25, conv2d]
    assert [lr_scale_func_adam(p) for p in parameters()] == pytest.approx(adam, abs=5e-7)
    assert [lr_scale_func_sgd(None)(p) for p in parameters()] == pytest.approx(adam, abs=5e-7)
    sgd = [4.0, 8.0, 16, 1, 1.154701, 4.0, 60**0.5]
    scale = lr_scale_func_sgd("to_output_scale")
    assert [scale(p) for p in parameters()] == pytest.approx(sgd, abs=5e-7)
    assert {tuple(rules) for rules in LR_RULES.values()} == {("weight", "bias", "norm", "output")}
    with pytest.raises(ValueError, match="choose None or 'to_output_scale'"):
        lr_scale_func_sgd("gmean")


@each_optimizer
def test_torch_arguments(cls):
    """Positions and names are torch's; what is added is by keyword only."""
    plain = inspect.signature(getattr(torch.optim, cls.__name__)).parameters.values()
    positional = [p.name for p in plain if p.kind is p.POSITIONAL_OR_KEYWORD]
    ours = inspect.signature(cls).parameters.values()
    assert [p.name for p in ours if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    opt = cls(parameters(), 0.1)
    assert opt.defaults["lr"] == 0.1
    assert lrs(cls(parameters())) == pytest.approx([x * 1e-3 for x in unit_lrs(cls)])


def unit_lrs(cls) -> list[float]:
    return lrs(cls(parameters(), lr=1.0))


def test_positional_arguments_arrive():
    opt = SGD(parameters(), 0.1, 0.9, 0.0, 0.01, True)
    assert opt.defaults["momentum"] == 0.9
    assert all(g["momentum"] == 0.9 and g["nesterov"] for g in opt.param_groups)
    opt = AdamW(parameters(), 1e-3, (0.9, 0.95), 1e-6)
    assert all(g["betas"] == (0.9, 0.95) and g["eps"] == 1e-6 for g in opt.param_groups)
    assert Adam(parameters(), 1e-3, (0.9, 0.95), maximize=True).param_groups[0]["maximize"]


@each_optimizer
def test_one_group_for_each_learning_rate(cls):
    opt = cls(parameters(), lr=0.5)
    rates = [g["lr"] for g in opt.param_groups]
    assert len(set(rates)) == len(rates) == 5
    assert len(opt.param_groups[0]["params"]) == 2


@each_optimizer
def test_forms_of_params(cls):
    expected = unit_lrs(cls)
    module = nn.ParameterList(parameters())
    assert lrs(cls(module.parameters(), lr=1.0)) == expected
    named = cls(module.named_parameters(), lr=1.0)
    assert lrs(named) == expected
    assert named.param_groups[0]["param_names"] == ["0", "5"]
    single = cls([{"params": parameters()[0], "lr": 2.0}, {"params": parameters()[1:3]}], lr=1.0)
    assert [g["lr"] for g in single.param_groups] == pytest.approx([0.5, 0.5, 1.0])


@each_optimizer
def test_added_groups_are_scaled(cls):
    opt = cls(parameters()[:1], lr=0.5, weight_decay=0.1)
    opt.add_param_group({"params": parameters()[4:5]})
    opt.add_param_group({"params": parameters()[2:], "lr": 1.0, "weight_decay": 0.0})
    assert opt.param_groups[1]["lr"] == pytest.approx(0.5 / 3 / 12**0.5)
    assert opt.param_groups[1]["weight_decay"] == pytest.approx(0.1 / (0.5 / 3 / 12**0.5))
    assert len(opt.param_groups) == 2 + 4
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        opt.add_param_group({"params": opt.param_groups[0]["params"]})


def test_weight_decay():
    """Independent: lr * weight_decay is the same for all. Otherwise torch's."""
    opt = AdamW(parameters(), 0.1, weight_decay=0.01)
    assert [g["lr"] * g["weight_decay"] for g in opt.param_groups] == pytest.approx([0.01] * 5)
    opt = SGD(parameters(), 0.1, weight_decay=0.1, independent_weight_decay=False)
    assert [g["weight_decay"] for g in opt.param_groups] == [0.1] * 5


@each_optimizer
def test_learning_rate_of_zero(cls):
    opt = cls(parameters(), lr=0, weight_decay=0.1)
    assert {g["lr"] for g in opt.param_groups} == {0}
    assert {g["weight_decay"] for g in opt.param_groups} == {0.1}
    for p in (p for g in opt.param_groups for p in g["params"]):
        p.grad = torch.ones_like(p)
    opt.step()
    assert all((p == 1).all() for g in opt.param_groups for p in g["params"])


@each_optimizer
def test_tensor_learning_rate(cls):
    lr = torch.tensor(0.5)
    opt = cls(parameters(), lr=lr, foreach=False, weight_decay=0.1)
    assert all(isinstance(g["lr"], torch.Tensor) and g["lr"] is not lr for g in opt.param_groups)
    assert [float(x) for x in lrs(opt)] == pytest.approx([x / 2 for x in unit_lrs(cls)])
    lr.fill_(7.0)
    assert float(lrs(opt)[0]) == 0.125


@each_optimizer
def test_untagged_parameters(cls):
    params = [("head.weight", nn.Parameter(torch.ones(2, 3)))]
    with pytest.raises(
        ValueError, match=r"parameter head\.weight of shape \(2, 3\) has no mup_type"
    ):
        cls(params, 0.1)
    opt = cls(params, 0.1, allow_non_unit_scaling_params=True)
    assert lrs(opt) == [0.1]


@each_optimizer
def test_schedules(cls):
    """A schedule that multiplies keeps the ratios; one that sets a rate takes a list."""
    opt = cls(parameters(), lr=1.0)
    base = lrs(opt)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 0.5**step)
    opt.step()
    schedule.step()
    assert lrs(opt) == pytest.approx([x / 2 for x in base])

    opt = cls(parameters(), lr=1.0)
    peaks = [g["lr"] for g in opt.param_groups]
    momentum = {"cycle_momentum": False} if cls is SGD else {}
    one = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=peaks, total_steps=10, **momentum)
    highest = []
    for _ in range(10):
        highest = [max(a, b) for a, b in zip(highest or lrs(opt), lrs(opt), strict=True)]
        opt.step()
        if _ < 9:
            one.step()
    assert highest == pytest.approx(base)


@each_optimizer
def test_step_is_that_of_torch(cls):
    """The same update as torch's optimizer with the learning rates set by hand; state too."""
    ours, theirs = parameters(), parameters()
    opt = cls(ours, lr=0.1, weight_decay=0.01)
    rates = {id(p): g for g in opt.param_groups for p in g["params"]}
    groups = [
        {"params": [b], "lr": rates[id(a)]["lr"], "weight_decay": rates[id(a)]["weight_decay"]}
        for a, b in zip(ours, theirs, strict=True)
    ]
    plain = getattr(torch.optim, cls.__name__)(groups)
    for i in range(3):
        for p in (*ours, *theirs):
            p.grad = torch.linspace(-1, 1 + i, p.numel()).reshape(p.shape)
        opt.step()
        plain.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)
    state = opt.state_dict()
    fresh = cls(parameters(), lr=0.7)
    fresh.load_state_dict(state)
    assert lrs(fresh) == lrs(opt)
    assert copy.deepcopy(opt).param_groups[0]["lr"] == opt.param_groups[0]["lr"]


def test_scaled_parameters():
    groups = scaled_parameters(
        [
            {"params": parameters()[:2], "lr": 0.2, "betas": (0.8, 0.9)},
            {"params": parameters()[2:3]},
        ],
        lr_scale_func_adam,
        lr=0.1,
        weight_decay=0.3,
    )
    assert [g["lr"] for g in groups] == pytest.approx([0.05, 0.1, 0.1])
    assert [g["weight_decay"] for g in groups] == pytest.approx([6, 3, 3])
    assert groups[1]["betas"] == (0.8, 0.9)
    torch.optim.RAdam(groups)  # any optimizer of torch takes them
    with pytest.raises(ValueError, match="needs lr=, or an 'lr' in every parameter group"):
        scaled_parameters(parameters(), lr_scale_func_adam)


def test_training():
    """A whole model learns, and the state is as torch keeps it."""
    torch.manual_seed(0)
    model = uu.TransformerDecoder(32, 16, layers=2, heads=2)
    opt = AdamW(model.parameters(), lr=2**-3, weight_decay=2**-10)
    tokens = (torch.arange(64) % 16).reshape(4, 16)
    first = model.loss(tokens).item()
    for _ in range(30):
        opt.zero_grad()
        model.loss(tokens).backward()
        opt.step()
    assert first == pytest.approx(math.log(16), rel=0.2)
    assert model.loss(tokens).item() < 0.2 * first
