"""init="preserve" leaves a model as it is: its parameters, checkpoints, gradients and function."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional as F

import fp8
import unit_scaling as uu
from tests.launch import run_ranks
from tests.transforms.models import GPT, Net, batch, gpt
from unit_scaling.transforms import unit_scale


def trained() -> GPT:
    """Far from its initialisation, so that a lost factor shows."""
    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(5):
        optimizer.zero_grad()
        model(*batch())[1].backward()
        optimizer.step()
    return model


def preserved(model: nn.Module) -> Any:
    return unit_scale(model, init="preserve")


def loss(model: Any) -> float:
    return model(*batch())[1].item()


# Checkpoints


def through_dcp(state: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    dcp.save(dict(state), checkpoint_id=folder)
    loaded = {name: torch.zeros_like(t) for name, t in state.items()}
    dcp.load(loaded, checkpoint_id=folder)
    return loaded


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
@pytest.mark.parametrize("how", ["load", "assign", "dcp"])
@pytest.mark.parametrize(
    ("source", "target"), [(preserved, preserved), (preserved, copy.copy), (copy.copy, preserved)]
)
def test_a_state_dict_goes_anywhere(source, target, how, tmp_path):
    plain = trained()
    state, model = source(plain).state_dict(), target(gpt(seed=3))
    assert all(map(torch.equal, state.values(), plain.state_dict().values()))
    assert list(state) == list(plain.state_dict())
    if how == "load":
        loss(model)
    if how == "dcp":
        state = through_dcp(state, tmp_path)
    model.load_state_dict(state, assign=how == "assign")
    assert loss(model) == pytest.approx(loss(plain), rel=1e-6)
    if target is preserved:
        assert all(p.mup_scale < 1 for p in model.parameters() if p.dim() > 1)


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch is built without gloo")
def test_sharded(tmp_path):
    """FSDP2: the same gradients and steps as in one process, the plain state_dict in and out."""
    run_ranks(Path(__file__).with_name("preserve_worker.py"), 2, tmp_path / "store")


# Casts


def unit_weight(model: nn.Module, name: str) -> Tensor:
    """The weight as the recipe "unit" casts it."""
    p: Any = model.get_parameter(name)
    assert 0.7 < (p.square().mean().sqrt() / p.mup_scale).item() < 1.42
    return fp8.quantize(p, "e4m3", scale=p.mup_scale)


WEIGHT = fp8.Recipe(name="weight", input=fp8.Cast(format="e4m3"), weight=fp8.Cast(format="e4m3"))

PRODUCTS: dict[str, tuple[nn.Module, Callable[[Any, Tensor], Tensor]]] = {
    "linear": (nn.Linear(16, 16), lambda m, x: m.layer(x)),
    "conv": (nn.Conv1d(4, 16, 3), lambda m, x: m.layer(x.reshape(-1, 4, 4))),
    "matmul": (nn.Linear(16, 16), lambda m, x: x @ m.layer.weight.t()),
    "einsum": (nn.Linear(16, 16), lambda m, x: torch.einsum("bi,oi->bo", x, m.layer.weight)),
    "addmm": (
        nn.Linear(16, 16),
        lambda m, x: torch.addmm(m.layer.bias, x, m.layer.weight.transpose(0, 1)),
    ),
    "part": (nn.Linear(16, 32), lambda m, x: F.linear(x, m.layer.weight.chunk(2)[1])),
}


COMPILED = ("linear", "conv", "part")


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("name", "compiled"),
    [*((name, False) for name in PRODUCTS), *((name, True) for name in COMPILED)],
)
def test_weights_are_cast_at_their_own_scale(name, compiled):
    """However a product is written, and whatever view of the weight is in it: the result is that of
    the rounded weight, and the input of RMS 1 is rounded as it is."""
    torch.compiler.reset()
    torch.manual_seed(0)
    layer, forward = PRODUCTS[name]
    layer = copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight.normal_().mul_(2.0**-11)
    x = fp8.quantize(torch.randn(8, 16), "e4m3")
    plain = Net(forward, layer=layer)
    model = preserved(plain)
    assert torch.equal(model(x), plain(x))  # and is recorded
    expected = copy.deepcopy(plain)
    with torch.no_grad():
        expected.layer.weight.copy_(unit_weight(model, "layer.weight"))

    def call(x: Tensor) -> Tensor:
        with fp8.autocast(WEIGHT):
            return model(x)

    got = torch.compile(call, backend="eager")(x) if compiled else call(x)
    torch.testing.assert_close(got, expected(x), rtol=1e-5, atol=1e-7)
    assert not torch.allclose(got, plain(x), rtol=1e-3, atol=1e-6)


def test_computed_weights_are_cast_at_the_scale_they_have():
    torch.manual_seed(0)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(64, 64, bias=False))
    with torch.no_grad():
        layer.parametrizations.weight.original0.mul_(2.0**-9)
    x, plain = torch.randn(32, 64), copy.deepcopy(layer)
    model = preserved(nn.Sequential(layer))
    assert torch.equal(model(x), plain(x))
    with fp8.autocast(fp8.Recipe(name="weight", weight=fp8.Cast(format="e4m3"))):
        got = model(x)
    assert (got - plain(x)).norm() < 2.0**-4 * plain(x).norm()


def test_layers_converted_before_and_after_the_transform():
    plain, results = trained(), []
    with torch.no_grad():
        plain.blocks[0].up.weight.mul_(2.0**-8)
    before = preserved(fp8.convert(copy.deepcopy(plain), "unit"))
    for model in (before, fp8.convert(preserved(plain), "unit")):
        results.append(model(*batch())[0])
        assert model.head.weight is model.tokens.weight
    assert torch.equal(*results)
    unscaled = fp8.convert(copy.deepcopy(plain), "unit")(*batch())[0]
    exact = plain(*batch())[0]
    assert (results[0] - exact).norm() < (unscaled - exact).norm()


# Optimizers


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (uu.optim.AdamW, {"weight_decay": 1e-3, "eps": 1e-30}),
        (uu.optim.Adam, {"eps": 1e-30}),
        (uu.optim.SGD, {"momentum": 0.9, "weight_decay": 1e-3}),
    ],
)
def test_steps_are_those_of_weights_at_unit_scale(cls, settings):
    """w = f u moves as u, an independent weight of RMS 1 with the learning rate of its rule."""
    torch.manual_seed(0)
    model: Any = preserved(nn.Sequential(nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 8)).double())
    scales = [p.mup_scale for p in model.parameters()]
    assert len(set(scales)) > 1
    u = [
        uu.Parameter(p.detach() / f, p.mup_type)
        for p, f in zip(model.parameters(), scales, strict=True)
    ]
    x, y = torch.randn(2, 16, 64, dtype=torch.float64)
    ours, theirs = cls(model.parameters(), lr=0.1, **settings), cls(u, lr=0.1, **settings)

    def grads(weights: list[Tensor]) -> tuple[Tensor, ...]:
        hidden = F.gelu(F.linear(x, *weights[:2]))
        return torch.autograd.grad((F.linear(hidden, *weights[2:]) - y[:, :8]).square().sum(), u)

    for _ in range(3):
        ours.zero_grad()
        (model(x) - y[:, :8]).square().sum().backward()
        for q, g in zip(u, grads([f * q for f, q in zip(scales, u, strict=True)]), strict=True):
            q.grad = g
        ours.step()
        theirs.step()
    for p, q, f in zip(model.parameters(), u, scales, strict=True):
        torch.testing.assert_close(p.detach(), f * q.detach(), rtol=1e-6, atol=1e-9)
