"""A submodule that is called on its own, after the whole model has run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import unit_scaling as uu
from tests.transforms.gradients import gradients
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


def part_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model.image(x).sin().mean()


def test_inputs_of_a_part_receive_the_true_gradients() -> None:
    model, x, _ = made("unit")
    x.requires_grad_()
    assert torch.autograd.gradcheck(model.head, (x[:2],))


def test_a_compiled_part() -> None:
    model, x, _ = made("unit")
    wanted = gradients(model, lambda m: part_loss(m, x))[1]
    torch.compile(model.image, backend="aot_eager", fullgraph=True)(x).sin().mean().backward()
    for name, p in model.image.named_parameters():
        torch.testing.assert_close(p.grad, wanted[f"image.{name}"])


class Deep(nn.Module):
    """Three residual branches, whose weights depend on their number, and a product over
    positions."""

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
    model = unit_scale(plain)
    x = torch.randn(3, 6, 8, dtype=torch.float64)
    for _ in range(2):
        model(x).square().mean().backward()
    other = loaded(how, model, plain)
    losses = [lambda m: m(x).square().mean()]
    losses += [lambda m, i=i: m.parts[i](x).square().mean() for i in range(3)]
    for loss in losses:
        found = [gradients(m, loss) for m in (model, other)]
        torch.testing.assert_close(found[1], found[0])


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
