"""`fp8.initialize`: what it changes, what it keeps, what it refuses; and what the levels keep."""

import math
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

import fp8
import unit_scaling as uu
from fp8.casts.scaled_tensor import ScaledTensor, dequantized
from fp8.training.levels import LEVELS
from tests.shared import (
    Net,
    assert_close,
    descend,
    normal,
    pairs,
    parametrize,
    proves,
    refuses,
    same,
    warns,
)

OPTIMIZERS = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "fp8.Adam": fp8.optim.Adam,
    "fp8.AdamW": fp8.optim.AdamW,
    "uu.Adam": lambda p, **k: uu.optim.Adam(p, allow_non_unit_scaling_params=True, **k),
    "uu.AdamW": lambda p, **k: uu.optim.AdamW(
        p, allow_non_unit_scaling_params=True, **k
    ),
}

each_level = parametrize("level", LEVELS)


def build(optimizer=torch.optim.AdamW, lr=1e-2):
    torch.manual_seed(0)
    layers = nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 8)
    model = nn.Sequential(*layers)
    return model, optimizer(model.parameters(), lr=lr)


def batch(seed):
    x = normal(32, 16, seed=seed)
    return x, x[:, :8].sin()


def loss_of(model, seed):
    x, y = batch(seed)
    return (model(x) - y).square().mean()


def steps(model, optimizer, count, start=0):
    seeds = range(start, start + count)
    return descend(optimizer, (loss_of(model, seed) for seed in seeds))


def numbers(model):
    return [dequantized(p).detach().clone() for p in model.parameters()]


# --- what it does -------------------------------------------------------------------------------


@proves("MS-AMP", "msamp.initialize")
@parametrize("name", OPTIMIZERS)
def test_it_is_the_same_optimizer(name):
    model, optimizer = build(OPTIMIZERS[name])
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    groups, rates = optimizer.param_groups, schedule.get_last_lr()
    same_model, same_optimizer = fp8.initialize(model, optimizer, "O3")
    assert same_model is model
    assert same_optimizer is optimizer
    assert isinstance(optimizer, getattr(fp8.optim, name.rpartition(".")[2]))
    assert optimizer.param_groups is groups
    given = {id(p) for g in groups for p in g["params"]}
    assert given == {id(p) for p in model.parameters()}
    steps(model, optimizer, 1)
    schedule.step()
    assert [group["lr"] for group in groups] == [rate * 0.5 for rate in rates]
    assert type(deepcopy(optimizer)) is type(optimizer)


@each_level
def test_a_training_under_way_goes_on(level):
    """Moments, step counts and rates are taken over: the next losses are those of before, within
    the roundings; from zero moments they are not."""
    model, optimizer = build()
    steps(model, optimizer, 20)
    other, expected = deepcopy((model, optimizer))
    fp8.initialize(model, optimizer, level, recipe=None)
    before, after = numbers(other), numbers(model)
    assert_close(before, after, rtol=2**-4, atol=1e-3)
    steps(model, optimizer, 1, 20)
    steps(other, expected, 1, 20)
    moved = [q - p for p, q in pairs(before, numbers(other))]
    if level != "O3":  # there the weight is coarser than a step: the master moves
        error = [q - p - d for p, q, d in pairs(after, numbers(model), moved)]
        assert sum(e.norm() for e in error) < 0.2 * sum(d.norm() for d in moved)
    names = [name for state in optimizer.state.values() for name in state]
    assert any(name.startswith("master") for name in names) == (level == "O3")


@each_level
def test_ties_frozen_parameters_tags_and_groups(level):
    embed, head = nn.Embedding(8, 16), nn.Linear(16, 8, bias=False)
    head.weight, other = embed.weight, nn.Linear(16, 16)
    model = Net(embed=embed, head=head, other=other)
    other.weight.requires_grad_(False)
    head.weight.mup_type = "output"
    tied = {"params": [head.weight, other.weight], "lr": 0.1, "weight_decay": 0.3}
    groups = [tied, {"params": [other.bias], "name": "rest"}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    fp8.initialize(model, optimizer, level)
    assert head.weight is embed.weight
    assert head.weight.mup_type == "output"
    assert not other.weight.requires_grad
    assert isinstance(other.weight, ScaledTensor)
    first, second = optimizer.param_groups
    assert first["params"][0] is head.weight
    assert (first["lr"], first["weight_decay"]) == (0.1, 0.3)
    assert (second["lr"], second["name"]) == (0.01, "rest")


def test_what_the_optimizer_does_not_train_stays():
    model, _ = build()
    optimizer = torch.optim.AdamW(model[0].parameters())
    fp8.initialize(model, optimizer)
    assert isinstance(model[0].weight, ScaledTensor)
    assert type(model[3].weight) is nn.Parameter
    (line,) = fp8.report(model).notes
    assert line.endswith(
        "1 weights of linear layers and convolutions in fp16, of 2 parameters that AdamW trains"
    )


def test_without_an_optimizer():
    model, optimizer = fp8.initialize(build()[0])
    assert isinstance(optimizer, fp8.optim.AdamW)
    (line,) = fp8.report(model).notes
    assert line.endswith("that AdamW trains, made here with lr=0.001")


def test_what_has_no_level_is_reported():
    model = nn.LSTM(8, 8)
    with warns("one kernel computes all its products", fp8.warnings.ConvertWarning):
        fp8.initialize(model, torch.optim.Adam(model.parameters()), "O3")
    (line,) = fp8.report(model).notes
    assert line.startswith(
        "level O3: 0 weights of linear layers and convolutions in e4m3, of 4 "
    )


# --- gradients ----------------------------------------------------------------------------------


@parametrize(
    "level, where, bad", [("O1", "bias", math.inf), ("O3", "weight", math.nan)]
)
def test_a_step_with_a_bad_gradient_is_skipped_and_counted(level, bad, where):
    model, optimizer = build()
    fp8.initialize(model, optimizer, level)
    steps(model, optimizer, 2)
    before = numbers(model)
    gradient = getattr(model[3], where).grad
    gradient += torch.full(gradient.shape, bad)
    optimizer.step()
    assert optimizer.skipped_steps == 1
    assert same(numbers(model), before)
    losses = steps(model, optimizer, 2, 2)
    assert all(map(math.isfinite, losses))
    assert not same(numbers(model), before)


# --- what is kept -------------------------------------------------------------------------------

ALLOWED = {"O1": 11.1, "O2": 6.1, "O3": 7.1}
"""Bytes for each covered weight: of it, its gradient, master and moments."""


@proves("MS-AMP", "the precisions of O1, O2, O3")
@each_level
def test_bytes(level):
    model = nn.Sequential(
        nn.Conv2d(3, 64, 7, bias=False), nn.Flatten(), nn.Linear(256, 64, False)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    fp8.initialize(model, optimizer, level)
    count = sum(p.numel() for p in model.parameters())
    for passes, gradient in ((1, 1), (3, 4)):
        optimizer.zero_grad()
        for _ in range(passes):
            model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        optimizer.step()
        found = fp8.optim.state_bytes(optimizer)
        assert sum(found.values()) <= (ALLOWED[level] + gradient - 1) * count
        assert found["weight"] == pytest.approx(
            count if level == "O3" else 2 * count, rel=0.01
        )
        assert found["gradient"] == pytest.approx(gradient * count, rel=0.01)


# --- checkpoints --------------------------------------------------------------------------------


@each_level
def test_a_backward_pass_after_a_step_is_refused(level):
    """As torch does: the weights are no more those of the forward pass."""
    model, optimizer = build()
    fp8.initialize(model, optimizer, level, recipe=None)
    loss = model(batch(0)[0]).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    with refuses("modified by an inplace operation", RuntimeError):
        loss.backward()


@each_level
@parametrize("name, order", [("AdamW", 1), ("uu.AdamW", -1)])
def test_resume_is_exact(level, name, order, tmp_path):
    model, optimizer = build(OPTIMIZERS[name])
    fp8.initialize(model, optimizer, level)
    steps(model, optimizer, 5)
    torch.save([model.state_dict(), optimizer.state_dict()], tmp_path / "checkpoint.pt")
    expected = steps(model, optimizer, 5, 5)
    other, second = build(OPTIMIZERS[name])
    fp8.initialize(other, second, level)
    steps(other, second, 2)  # whatever it was before
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    for target, state in list(pairs((other, second), saved))[::order]:
        target.load_state_dict(state)
    assert steps(other, second, 5, 5) == expected
    assert same(numbers(other), numbers(model))


# --- what it refuses ----------------------------------------------------------------------------


class DeepSpeedEngine(nn.Module):
    """As the library's, by name."""


class Unknown(torch.optim.AdamW):
    def step(self, closure=None):
        raise AssertionError


def test_bad_input_changes_nothing():
    model, optimizer = build()
    others = build()[1]
    state, kinds = numbers(model), [type(p) for p in model.parameters()]

    def refused(match, model, optimizer, *args, error=ValueError, **kwargs):
        if isinstance(optimizer, partial):
            optimizer = optimizer(model.parameters())
        with refuses(match, error):
            fp8.initialize(model, optimizer, *args, **kwargs)

    adam, wrong = partial(torch.optim.Adam), {"error": TypeError}
    levels = "unknown opt_level 'O4'; choose one of 'O1', 'O2', 'O3'"
    refused(levels, model, optimizer, "O4")
    refused("unknown recipe", model, optimizer, recipe="none")
    refused("not the model's", model, others)
    refused("SGD is not supported", model, partial(torch.optim.SGD), **wrong)
    refused("Unknown", model, partial(Unknown), **wrong)
    generator = "needs a torch optimizer, got generator"
    refused(generator, model, model.parameters(), **wrong)
    refused("unknown opt_level", model, optimizer, ["O1"])
    refused("amsgrad", model, partial(torch.optim.Adam, amsgrad=True))
    codes = nn.ParameterList([torch.zeros(2).to(torch.float8_e5m2)])
    refused("float8_e5m2", nn.Sequential(model[0], codes), adam, **wrong)
    refused("fully_shard", DeepSpeedEngine(), optimizer)
    wrapper = nn.Sequential(nn.DataParallel(model[0]))
    refused(r"DataParallel \(0\)", wrapper, adam)
    assert same(numbers(model), state)
    assert [type(p) for p in model.parameters()] == kinds
    assert type(optimizer) is torch.optim.AdamW
    fp8.initialize(model, optimizer)
    refused(r"has a level already: 0\.weight", model, optimizer, "O1")
