"""Optimizers that step the wrong parameters, or unit-scaled ones at torch's rate, say so once."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

import fp8
import unit_scaling as uu
from unit_scaling.transforms import compile, simulate_fp8, track_scales, unit_scale

RATE = 0.5


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def step(model: nn.Module, *optimizers: torch.optim.Optimizer, scale: float = 1.0) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    (model(torch.randn(4, 16)).square().sum() * scale).backward()
    for optimizer in optimizers:
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), RATE)


# An optimizer made before the transform

#: Name -> transforms, of which the first is named.
TRANSFORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "unit_scale": unit_scale,
    "simulate_fp8": simulate_fp8,
    "track_scales": track_scales,
    "unit_scale, then another": lambda model: simulate_fp8(unit_scale(model)),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_an_optimizer_made_before_a_transform_says_so_at_its_first_step(name: str, trained: bool):
    model = plain()
    optimizer = sgd(model)
    if trained:
        step(model, optimizer)
    model = TRANSFORMS[name](model)
    message = f"SGD was made before {name.partition(',')[0]}"
    with pytest.warns(fp8.warnings.OptimizerWarning, match=message) as caught:
        step(model, optimizer)
    assert caught[0].filename == __file__
    step(model, optimizer)  # no second one: warnings are errors here
    step(model, sgd(model))
    model = plain()
    optimizer = sgd(model)
    model = TRANSFORMS[name](model)
    with fp8.strict(), pytest.raises(fp8.warnings.OptimizerWarning, match=message):
        step(model, optimizer)


def test_so_does_that_of_initialize():
    model = plain()
    model, optimizer = fp8.initialize(model, torch.optim.AdamW(model.parameters()), "O1", "tensor")
    model = unit_scale(model)
    with pytest.warns(fp8.warnings.OptimizerWarning, match="made before unit_scale"):
        step(model, optimizer)


def test_the_original_may_be_trained_on():
    """With copies that are evaluated, or trained as well (a student, an average of weights)."""
    model = plain()
    optimizer = sgd(model)
    step(model, optimizer)
    scaled = unit_scale(model)
    uu.verify(scaled, torch.randn(4, 16))
    with torch.no_grad():
        scaled(torch.randn(4, 16))
    step(model, optimizer)
    student = sgd(scaled)
    x = torch.randn(4, 16)
    for _ in range(2):
        (scaled(x) - model(x)).square().sum().backward()
        optimizer.step()
        student.step()
    average = copy.deepcopy(model)
    step(model, optimizer)
    average(x)
    both = torch.optim.SGD([*model.parameters(), *scaled.parameters()], RATE)
    step(scaled, both)


def test_an_optimizer_without_gradients_or_of_another_model_is_none_of_it():
    model, other = plain(), plain()
    optimizer, of_other = sgd(model), sgd(other)
    scaled = unit_scale(model)
    scaled(torch.randn(4, 16))
    optimizer.step()  # nothing has a gradient
    step(other, of_other)
    of_other.zero_grad()
    scaled(torch.randn(4, 16)).sum().backward()
    of_other.step()


def test_nothing_is_kept_alive_by_it():
    model = plain()
    scaled = unit_scale(model)
    step(scaled, sgd(scaled))
    gone = [weakref.ref(each) for each in (model, model[0].weight, scaled, scaled[0].weight)]
    del model, scaled
    gc.collect()
    assert not any(each() for each in gone)


def test_a_transformed_model_may_still_be_converted_by_swapping_its_parameters():
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model = plain()
        compile(unit_scale(model))
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def test_compiled_steps_are_left_alone():
    model = unit_scale(plain())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    compiled = torch.compile(optimizer.step, backend="eager")
    model(torch.randn(4, 16)).sum().backward()
    before = model[0].weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled()
    assert not torch.equal(model[0].weight, before)


# torch's rate on unit-scaled weights

TORCHS: list[Callable[..., torch.optim.Optimizer]] = [
    torch.optim.AdamW,
    torch.optim.SGD,
    torch.optim.NAdam,
    fp8.optim.AdamW,
]
each_optimizer = pytest.mark.parametrize("make", TORCHS)
MODELS: dict[str, Callable[[], nn.Module]] = {
    "transform": lambda: unit_scale(plain()),
    "modules": lambda: nn.Sequential(uu.Linear(16, 32), uu.GELU(), uu.LinearReadout(32, 8)),
}
each_model = pytest.mark.parametrize("of", MODELS)


@each_model
@each_optimizer
def test_torchs_rate_on_unit_scaled_weights_warns_once(
    make: Callable[..., torch.optim.Optimizer], of: str
):
    model = MODELS[of]()
    lr = 1e-4 if make is torch.optim.SGD else 1e-3
    optimizer = make(model.parameters(), lr=lr)
    message = rf"2 unit-scaled weights.*rate of {lr:g}, \d+ times below .* unit_scaling.optim"
    with pytest.warns(fp8.warnings.OptimizerWarning, match=message) as caught:
        step(model, optimizer)
    assert len(caught) == 1
    step(model, optimizer)


@each_model
@each_optimizer
def test_a_rate_that_was_chosen_for_them_does_not(
    make: Callable[..., torch.optim.Optimizer], of: str
):
    """One near the rule's, groups of `scaled_parameters`, rates by group, or a warm-up to such a
    rate."""
    model, is_sgd = MODELS[of](), make is torch.optim.SGD
    rate = 0.5 if is_sgd else 0.1
    step(model, make(model.parameters(), lr=rate))
    rule = "sgd" if is_sgd else "adam"
    step(model, make(uu.optim.scaled_parameters(model.parameters(), rule), lr=1.0))
    rates = [{"params": [p], "lr": rate * (1 + i / 4)} for i, p in enumerate(model.parameters())]
    step(model, make(rates, lr=rate))
    optimizer = make(model.parameters(), lr=rate)
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 1e-3, total_iters=10)
    step(model, optimizer)
    warm.step()
    optimizer = make(model.parameters(), lr=rate)
    for group in optimizer.param_groups:
        group["lr"] = rate * 1e-3
    step(model, optimizer)


@each_model
def test_rates_far_from_the_rule_warn(of: str):
    """Of our optimizers in both directions; far above for Adam alone, as others may multiply
    theirs by a factor of their own."""
    model = MODELS[of]()
    with pytest.warns(
        fp8.warnings.OptimizerWarning, match=r"rate of 4, \d+ times above that of the rule"
    ):
        step(model, torch.optim.NAdam(model.parameters(), lr=4.0))
    step(model, torch.optim.Adagrad(model.parameters(), lr=4.0))
    for lr, message in ((2**-5, "16 times below"), (2**4, "32 times above")):
        model = MODELS[of]()
        with pytest.warns(
            fp8.warnings.OptimizerWarning, match=f"lr={lr:.4g}, {message}.* Leave lr out"
        ):
            step(model, uu.optim.AdamW(model.parameters(), lr=lr))
    for settings in ({}, {"lr": 0.125}, {"lr": 2.0}, {"lr_mult": uu.optim.UMUP}):
        model = MODELS[of]()
        step(model, uu.optim.AdamW(model.parameters(), **settings))


class Container(torch.optim.Optimizer):
    """Of optimizers, as torchtitan's: it has parameters and no rate of its own."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        pass


def test_nor_do_fine_tuning_a_plain_model_and_an_optimizer_without_a_rate():
    """Weights of init="preserve" keep their sizes, and take rates of any size."""
    for make, lr in ((uu.optim.AdamW, 2**-10), (torch.optim.AdamW, 1e-3)):
        model = unit_scale(plain(), init="preserve")
        step(model, make(model.parameters(), lr=lr))
    model = plain()
    step(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    model = unit_scale(plain())
    step(model, Container(model.parameters(), {}))


def test_weights_in_a_scale_of_their_own_take_torchs_rate():
    """Tagged parameters that keep the plain model's values have the plain model's rate."""
    up, down = (uu.Parameter(0.02 * torch.randn(s), "weight") for s in ((16, 32), (32, 8)))
    (torch.randn(4, 16) @ up @ down).sum().backward()
    torch.optim.AdamW([up, down], lr=1e-3).step()


# An eps that gradients are not large against


@pytest.mark.parametrize(
    ("init", "scale", "eps", "warned"),
    [
        ("unit", 1e-9, 1e-8, True),
        ("unit", 1e-9, 1e-16, False),
        ("unit", 1.0, 1e-8, False),
        ("preserve", 1e-9, 1e-8, False),
    ],
)
def test_an_eps_near_the_gradients_is_named_once(init: str, scale: float, eps: float, warned: bool):
    model = unit_scale(plain(), init=init)
    optimizer = torch.optim.Adam(model.parameters(), 2.0**-4, eps=eps)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(model, optimizer, scale=scale)
        step(model, optimizer, scale=scale)
    named = [str(each.message) for each in caught if "its eps of 1e-08" in str(each.message)]
    assert len(named) == warned
