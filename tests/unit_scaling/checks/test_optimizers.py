"""Optimizers that step the wrong parameters, or unit-scaled ones at torch's rate, say so once."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fp8
import unit_scaling as uu
from unit_scaling.transforms import compile, simulate_fp8, track_scales, unit_scale

RATE = 0.5


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))


def step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(torch.randn(4, 16)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), RATE)


# An optimizer made before the transform

TRANSFORMS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "unit_scale": unit_scale,
    "simulate_fp8": simulate_fp8,
    "track_scales": track_scales,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_an_optimizer_made_before_a_transform_says_so_at_its_first_step(name: str):
    model = plain()
    optimizer = sgd(model)
    model = TRANSFORMS[name](model)
    with pytest.warns(fp8.OptimizerWarning, match=f"SGD was made before {name}") as caught:
        step(model, optimizer)
    assert caught[0].filename == __file__
    step(model, optimizer)  # no second one: warnings are errors here
    after = sgd(model)
    step(model, after)


def test_so_it_does_after_several_transforms_and_when_the_plain_model_was_trained_before():
    model = plain()
    optimizer = sgd(model)
    step(model, optimizer)
    model = simulate_fp8(unit_scale(model))
    with pytest.warns(fp8.OptimizerWarning, match="SGD was made before unit_scale"):
        step(model, optimizer)


def test_so_does_that_of_initialize():
    model = plain()
    model, optimizer = fp8.initialize(model, torch.optim.AdamW(model.parameters()), "O1", "tensor")
    model = unit_scale(model)
    with pytest.warns(fp8.OptimizerWarning, match="made before unit_scale"):
        step(model, optimizer)


def test_strict_raises_at_the_step():
    model = plain()
    optimizer = sgd(model)
    model = unit_scale(model)
    with fp8.strict(), pytest.raises(fp8.OptimizerWarning, match="made before unit_scale"):
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


def test_one_optimizer_may_hold_the_parameters_of_both():
    model = plain()
    scaled = unit_scale(model)
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
    said = rf"2 unit-scaled weights.*rate of {lr:g}, \d+ times below that of the rule"
    with pytest.warns(fp8.OptimizerWarning, match=said) as caught:
        step(model, optimizer)
    assert len(caught) == 1
    assert "unit_scaling.optim" in str(caught[0].message)
    step(model, optimizer)


RATES_BY_RULE = {torch.optim.SGD: 0.5, torch.optim.AdamW: 0.1}


@each_model
@each_optimizer
def test_a_rate_that_was_chosen_for_them_does_not(
    make: Callable[..., torch.optim.Optimizer], of: str
):
    """One near the rule's, groups of `scaled_parameters`, rates by group, or a warm-up to such a
    rate."""
    model, rate = MODELS[of](), RATES_BY_RULE.get(make, 0.1)
    step(model, make(model.parameters(), lr=rate))
    rule = "sgd" if make is torch.optim.SGD else "adam"
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
def test_a_rate_far_above_the_rule_warns_for_adam(of: str):
    """Others may multiply theirs by a factor of their own."""
    model = MODELS[of]()
    with pytest.warns(fp8.OptimizerWarning, match=r"rate of 4, \d+ times above that of the rule"):
        step(model, torch.optim.NAdam(model.parameters(), lr=4.0))
    step(model, torch.optim.Adagrad(model.parameters(), lr=4.0))


@each_model
def test_our_optimizers_rate_far_from_the_rule_warns(of: str):
    model = MODELS[of]()
    for lr, said in ((2**-5, "16 times below"), (2**4, "32 times above")):
        with pytest.warns(fp8.OptimizerWarning, match=f"lr={lr:.4g}, {said}.* Leave lr out"):
            step(model, uu.optim.AdamW(model.parameters(), lr=lr))
    for given in ({}, {"lr": 0.125}, {"lr": 2.0}, {"lr_mult": uu.optim.UMUP}):
        step(MODELS[of](), uu.optim.AdamW(model.parameters(), **given))


def test_nor_does_fine_tuning_or_a_plain_model():
    """Weights of init="preserve" keep their sizes, and take rates of any size."""
    model = unit_scale(plain(), init="preserve")
    step(model, uu.optim.AdamW(model.parameters(), lr=2**-10))
    model = unit_scale(plain(), init="preserve")
    step(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    model = plain()
    step(model, torch.optim.AdamW(model.parameters(), lr=1e-3))


def test_weights_in_a_scale_of_their_own_take_torchs_rate():
    """Tagged parameters that keep the plain model's values have the plain model's rate."""

    def small(shape: tuple[int, ...]) -> nn.Parameter:
        return uu.Parameter(0.02 * torch.randn(shape), "weight")

    model = nn.Module()
    model.up, model.down = small((16, 32)), small((32, 8))
    x: Tensor = torch.randn(4, 16) @ model.up @ model.down
    x.sum().backward()
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()


def test_an_optimizer_without_a_rate():
    """A container of optimizers, as torchtitan's, has parameters and no rate of its own."""

    class Container(torch.optim.Optimizer):
        def step(self, closure: Callable[[], float] | None = None) -> None:
            pass

    model = unit_scale(plain())
    step(model, Container(model.parameters(), {}))


# An eps that gradients are not large against


@pytest.mark.parametrize(("eps", "warned"), [(1e-8, True), (1e-16, False)])
def test_an_eps_near_the_gradients_is_named_once(eps: float, warned: bool):
    model = unit_scale(plain())
    optimizer = torch.optim.Adam(model.parameters(), 2.0**-4, eps=eps)
    (model(torch.randn(4, 16)).square().sum() * 1e-9).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    named = [str(each.message) for each in caught if "its eps of 1e-08" in str(each.message)]
    assert len(named) == warned


def test_an_eps_far_below_the_gradients_and_that_of_a_preserved_model_say_nothing():
    for init, scale in (("unit", 1.0), ("preserve", 1e-9)):
        model = unit_scale(plain(), init=init)
        optimizer = torch.optim.Adam(model.parameters(), 2.0**-4)
        (model(torch.randn(4, 16)).square().sum() * scale).backward()
        optimizer.step()
