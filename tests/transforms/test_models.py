"""One small model of each kind, and what holds of every one of them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unit_scaling as uu
from tests.transforms.gradients import check_true, gradients
from tests.transforms.models import KINDS, loss_of, moved
from unit_scaling.transforms import simulate_fp8, unit_scale

every_kind = pytest.mark.parametrize("name", KINDS)


def plain(name: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[name].make().double()


def losses(model: nn.Module, x: Tensor) -> list[Tensor]:
    """In training and in evaluation."""
    buffers = copy.deepcopy(dict(model.named_buffers()))
    found = [loss_of(model.train(mode), x).detach() for mode in (True, False)]
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    return found


def same(ours: Any, theirs: Any) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@every_kind
def test_gradients_are_slopes(name: str) -> None:
    model, x = unit_scale(plain(name)), KINDS[name].batch()
    loss_of(model, x)
    moved(model)
    if KINDS[name].smooth:
        check_true(model.eval(), lambda m: loss_of(m, x))


def loaded(model: nn.Module, name: str) -> nn.Module:
    other = unit_scale(moved(plain(name)))
    other.load_state_dict(model.state_dict())
    return other


COPIES: dict[str, Callable[[nn.Module, str], nn.Module]] = {
    "copied": lambda model, _: copy.deepcopy(model),
    "pickled": lambda model, _: pickle.loads(pickle.dumps(model)),
    "loaded": loaded,
    "frozen": lambda model, _: copy.deepcopy(model).requires_grad_(False),
}


@every_kind
@pytest.mark.filterwarnings("ignore:unit_scale. the model looks trained")
def test_one_function(name: str) -> None:
    """In training and evaluation, of a copy made before the first call or later."""
    kind, x = KINDS[name], KINDS[name].batch()
    model = unit_scale(plain(name))
    early = copy.deepcopy(model)
    loss_of(model, x).backward()
    moved(model)
    expected = losses(model, x)
    if kind.modes:
        assert torch.equal(*expected)
    for how, made in COPIES.items():
        if (name, how) == ("parametrized", "pickled"):
            continue  # torch refuses
        found = losses(made(model, name), x)
        assert all(map(torch.equal, found, expected)), how
    with torch.no_grad():
        early.eval()(kind.batch(1))  # of other values
    early.load_state_dict({n: v for n, v in model.state_dict().items() if "extra" not in n})
    same(losses(early, x), expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.whole])
def test_compiled(name: str) -> None:
    torch.compiler.reset()
    model, x = unit_scale(plain(name)), KINDS[name].batch()
    loss_of(model, x).backward()
    expected = gradients(model, lambda m: loss_of(m, x))
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    value, grads = gradients(compiled, lambda m: loss_of(m, x))
    same((value, {n.removeprefix("_orig_mod."): g for n, g in grads.items()}), expected)


@pytest.mark.filterwarnings("ignore:cdist stays in high precision:fp8.warnings.RecipeWarning")
@pytest.mark.proves("unit-scaling", "simulate_fp8(model)", how="own")
@every_kind
def test_it_learns_at_unit_scale_in_fp8(name: str) -> None:
    """Each operand is cast at an RMS in [1/4, 4], and each gradient near that of the first call at
    its place: a loop, as of a recurrent cell, has one scale for all of its passes."""
    model, x = simulate_fp8(unit_scale(plain(name).float())), KINDS[name].batch()
    x = x.float() if x.is_floating_point() else x
    assert not uu.report(model).left_alone
    first = loss_of(model, x)
    optimizer = uu.optim.AdamW(model.parameters(), lr=2**-3)
    for _ in range(20):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
    assert loss_of(model, x) < 0.995 * first
    fresh = simulate_fp8(unit_scale(plain(name).float()))
    result = uu.verify(fresh, x, loss=lambda y: y if not y.dim() else y.square().mean())
    assert all(row.kind == "gradient" and 1 / 16 < row.rms < 16 for row in result.outside)


class Image(Tensor):
    """As MONAI and torchvision have. Results have its class."""

    def new_empty(self, size: tuple[int, ...], **options: object) -> Tensor:
        return self.as_subclass(Tensor).new_empty(size=size, **options)


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("name", ["ResNet", "ConvNeXt"])
def test_inputs_of_a_subclass_of_tensor(name: str, simulated: bool) -> None:
    """Values and gradients are the same, and what follows may write into a result. In float64, as
    sums of convolutions depend on where their operands lie in memory."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        output = model(x.clone())
        assert type(output) is type(x)
        return output.as_subclass(Tensor).square().mean()

    x, steps = KINDS[name].batch(), []
    for each in (x, x.as_subclass(Image)):
        model = unit_scale(plain(name))
        model = simulate_fp8(model) if simulated else model
        steps.append([gradients(model, lambda m, x=each: loss(m, x)) for _ in range(3)])
    same(steps[1], steps[0])
