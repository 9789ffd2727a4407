"""A submodule that is called on its own, after the whole model has run."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import unit_scaling as uu
from fp8.common.pitfalls import PitfallWarning
from tests.transforms.gradients import exponent, gradients, without_gauges
from unit_scaling.transforms import unit_scale

INITS = ("unit", "preserve")


class TwoTowers(nn.Module):
    """Its losses call the model, a method of it, and its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.text = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 32))
        self.head = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.image(x) * self.text(y))

    def similarity(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cosine_similarity(self.image(x), self.text(y))


def made(init: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A transformed model that has trained a step, and a batch."""
    torch.manual_seed(0)
    model = unit_scale(TwoTowers().double(), init=init)
    x, y = torch.randn(2, 16, 32, dtype=torch.float64).unbind()
    model(x, y).square().mean().backward()
    model.zero_grad()
    return model, x, y


LOSSES = {
    "model": lambda model, x, y: model(x, y).square().mean(),
    "part": lambda model, x, y: model.image(x).sin().mean(),
    "method": lambda model, x, y: model.similarity(x, y).mean(),
    "last part": lambda model, x, y: model.head(x).exp().mean(),
    "all": lambda model, x, y: sum(LOSSES[name](model, x, y) for name in ("model", "method")),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("init", INITS)
def test_gradients_have_the_powers_of_two_of_the_whole_model(init: str, name: str) -> None:
    """So they can be added to those of the whole model: with init="preserve" all are 1."""
    model, x, y = made(init)
    plain = without_gauges(model)
    powers = []
    for loss in (LOSSES["model"], LOSSES[name]):
        values, found = zip(
            *(gradients(each, lambda m, f=loss: f(m, x, y)) for each in (model, plain)),
            strict=True,
        )
        assert torch.equal(*values)
        powers.append({n: exponent(grad, found[1][n]) for n, grad in found[0].items()})
    assert powers[1].items() <= powers[0].items()
    assert powers[1]
    assert init == "unit" or set(powers[1].values()) == {0}


@pytest.mark.parametrize("init", INITS)
def test_inputs_receive_the_true_gradients(init: str) -> None:
    model, x, _ = made(init)
    x.requires_grad_()
    assert torch.autograd.gradcheck(model.head, (x[:2],))


def test_after_loading() -> None:
    model, x, y = made("unit")
    other = unit_scale(TwoTowers().double())
    other.load_state_dict(model.state_dict())
    found = [gradients(m, lambda m: LOSSES["part"](m, x, y)) for m in (model, other)]
    assert torch.equal(found[0][0], found[1][0])
    for name, grad in found[0][1].items():
        assert torch.equal(grad, found[1][1][name])


def test_without_gradients_nothing_is_tracked() -> None:
    model, x, _ = made("unit")
    with torch.no_grad():
        wanted = copy.deepcopy(model).eval().image(x)
    assert torch.equal(model.image(x), wanted)


def test_a_compiled_part_is_warned_of() -> None:
    model, x, y = made("unit")
    wanted = gradients(model, lambda m: LOSSES["part"](m, x, y))[1]
    model.zero_grad()
    with pytest.warns(PitfallWarning, match="'image' is called on its own in training"):
        torch.compile(model.image, backend="aot_eager")(x).sin().mean().backward()
    for name, p in model.image.named_parameters():
        torch.testing.assert_close(p.grad, wanted[f"image.{name}"])


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> tuple[Tensor, SimpleNamespace]:
        hidden = F.gelu(self.a(x))
        return self.b(hidden), SimpleNamespace(layers=[hidden])


class Headed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part, self.head = Hidden(), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(x)[0].tanh())


@pytest.mark.parametrize("init", INITS)
def test_a_loss_of_what_objects_among_the_results_of_a_part_hold(init: str) -> None:
    torch.manual_seed(0)
    model, x = unit_scale(Headed().double(), init=init), torch.randn(16, 32, dtype=torch.float64)

    def of_part(model: nn.Module) -> Tensor:
        y, held = model.part(x)
        return y.square().mean() + held.layers[0].sin().mean()

    powers = []
    for loss in (lambda m: m(x).square().mean(), of_part):
        _, found = gradients(model, loss)
        _, true = gradients(without_gauges(model), loss)
        powers.append({name: exponent(grad, true[name]) for name, grad in found.items()})
    assert powers[1].items() <= powers[0].items()


class Deep(nn.Module):
    """Three residual branches, whose weights depend on those before under "umup", and a product
    over positions."""

    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)) for _ in "abc"
        )
        self.parts = nn.ModuleList(map(Part, self.blocks))
        self.head, self.recomputed = nn.Linear(8, 4), recomputed

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False) if self.recomputed else part(x)
        return self.head(x)


class Part(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.key = block, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.block(x)
        return x @ (self.key(x).mT @ x)


def loaded(how: str, model: nn.Module, plain: nn.Module) -> nn.Module:
    if how == "plan":
        return unit_scale(plain, plan=uu.transforms.ModelPlan.from_json(uu.plan(model).to_json()))
    other = unit_scale(plain)  # with the default options
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.parametrize("how", ["plan", "state_dict"])
@pytest.mark.parametrize("recomputed", [False, True])
def test_parts_of_a_loaded_model_have_the_factors_of_the_whole(how: str, recomputed: bool) -> None:
    torch.manual_seed(0)
    plain = Deep(recomputed).double()
    model = unit_scale(plain, residual="umup", context_length=32)
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    for _ in range(2):
        model(x).square().mean().backward()
    other = loaded(how, model, plain)
    losses = [lambda m: m(x).square().mean()]
    losses += [lambda m, i=i: m.parts[i](x).square().mean() for i in range(3)]
    for loss in losses:
        found = [gradients(m, loss) for m in (model, other)]
        torch.testing.assert_close(found[1], found[0])


def test_other_forms_of_a_loaded_model_have_its_options() -> None:
    torch.manual_seed(0)
    plain = Deep().double()
    model = unit_scale(plain, residual="umup")
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    expected = model(x)
    torch.testing.assert_close(loaded("state_dict", model, plain).eval()(x), expected)


def test_products_over_positions_have_one_factor_for_any_number() -> None:
    """That of the first call, in every form of call."""
    torch.manual_seed(0)
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    model = unit_scale(Deep().double())
    model(x).square().mean().backward()
    expected = model(x), model(x[:1])
    for longer in (x.tile(1, 4, 1), x[:1].tile(1, 4, 1)):  # the first in evaluation
        other = copy.deepcopy(model).eval()
        other(longer)
        torch.testing.assert_close((other(x), other(x[:1])), expected)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = Part(nn.Linear(8, 8)), Part(nn.Linear(8, 8)), nn.Linear(8, 4)

    def forward(self, x: Tensor, b: bool) -> Tensor:
        return self.head(checkpoint(self.b if b else self.a, x, use_reentrant=False))


@pytest.mark.parametrize("init", INITS)
def test_two_forms_of_call_before_one_backward_pass(init: str) -> None:
    """The parts of the first one are recomputed after the second one, which does not call them."""
    torch.manual_seed(0)
    model = unit_scale(Branches().double(), init=init)
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    for b in (False, True, False):
        model(x, b).square().mean().backward()
    first, second, both = (
        gradients(model, lambda m, forms=forms: sum(m(x, b).square().mean() for b in forms))[1]
        for forms in ([False], [True], [False, True])
    )
    for name, grad in both.items():
        torch.testing.assert_close(grad, first.get(name, 0) + second.get(name, 0))
