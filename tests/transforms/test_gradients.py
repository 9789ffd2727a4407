"""Every gradient is that of the function that a model computes, however it is used.

That is a plain model with the same weights whose layers multiply their results by the factors of
the plan (`by_hand`), on which no transform runs. Each use is compared in its first call, which
makes the plan, and with a plan.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import unit_scaling as uu
from tests.transforms.uses import IN, ROWS, USES, Use, flat
from unit_scaling.transforms import simulate_fp8, unit_scale
from unit_scaling.transforms.install import find_scope
from unit_scaling.transforms.run.transform import UnitScale

# torch's own, once a process
pytestmark = pytest.mark.filterwarnings("ignore:Sparse (invariant checks|CSR):UserWarning")


def outcome(use: Use, model: nn.Module) -> dict[str, Tensor]:
    """What a use returns, and all gradients that it leaves."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, IN, dtype=torch.float64, requires_grad=True)
    found = {f"result {i}": t.detach().clone() for i, t in enumerate(flat(use.run(model, x)))}
    grads = {name: p.grad for name, p in [*model.named_parameters(), ("x", x)]}
    return found | {name: g.detach().clone() for name, g in grads.items() if g is not None}


def by_hand(plain: nn.Module, planned: nn.Module) -> nn.Module:
    """The plain model that computes what a unit-scaled one does. A use may have edited that."""
    model = copy.deepcopy(plain)
    with torch.no_grad():
        for parameter, tagged in zip(model.parameters(), planned.parameters(), strict=True):
            parameter.div_(getattr(tagged, "mup_divisor", None) or 1.0)
    scope: Any = find_scope(planned, UnitScale)
    for (path, _, _), (step, *others) in scope.plan.steps.items():
        if step is not None and step.op:
            assert path
            assert not others
            layer = model.get_submodule(path)
            cls: Any = type(layer)
            layer.__class__ = type(cls.__name__, (cls,), {"forward": _times(cls, step.factor)})
    return model


def _times(cls: Any, factor: float) -> Any:
    return lambda self, *args: factor * cls.forward(self, *args)


def check(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    assert any(t.any() for t in theirs.values())
    for name, wanted in theirs.items():
        error = (ours[name] - wanted).norm()
        assert error <= 1e-9 * wanted.norm() + 1e-13, (name, (error / wanted.norm()).item())


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = USES[name].make().double()
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)  # as unit_scale does
    return model


@pytest.mark.parametrize("name", USES)
def test_unit_scaled(name: str) -> None:
    plain = made(name)
    model = unit_scale(plain)
    first = copy.deepcopy(model)
    found = outcome(USES[name], first)
    expected = outcome(USES[name], by_hand(plain, first))
    check(found, expected)
    check(outcome(USES[name], model), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo's
@pytest.mark.parametrize("name", [name for name, use in USES.items() if use.graph])
def test_compiled(name: str) -> None:
    torch.compiler.reset()
    model = unit_scale(made(name))
    outcome(USES[name], copy.deepcopy(model))
    expected = outcome(USES[name], copy.deepcopy(model))
    model.compile(backend="aot_eager")
    check(outcome(USES[name], model), expected)


@pytest.mark.filterwarnings("ignore:.*sparse operands have no cast:fp8.warnings.RecipeWarning")
@pytest.mark.parametrize("name", [name for name in USES if "sparse" in name])
def test_sparse_tensors_are_simulated_and_verified(name: str) -> None:
    torch.manual_seed(0)
    model, x = unit_scale(USES[name].make()), torch.randn(ROWS, IN)
    simulated = simulate_fp8(model)
    for _ in range(2):
        simulated(x).square().mean().backward()
    assert all(p.grad.isfinite().all() for p in simulated.parameters() if p.grad is not None)
    assert uu.verify(model, x).share("activation") > 0.7
