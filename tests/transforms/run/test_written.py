"""A call that writes in place: its first argument and its result are one tensor, whatever factors
the call has, so a model may read either."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F

from tests.transforms.gradients import check_slopes, gradients
from unit_scaling.transforms import unit_scale

WRITES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "a residual add": lambda m, y: y.add_(m.b(y.relu())),
    "+=": lambda m, y: y.__iadd__(m.b(y.relu())),
    "a number": lambda _, y: y.mul_(-2.0),
    "/= a number": lambda _, y: y.__itruediv__(-4.0),
    "a pattern": lambda _, y: y.mul_(y.sigmoid()),
    "a sum": lambda _, y: y.sub_(y.relu()),
    "an argument": lambda _, y: F.relu(input=y, inplace=True),
    "replaced": lambda _, y: F.silu(y, inplace=True),
}


class Net(nn.Module):
    def __init__(self, written: str, reads: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 32)
        self.c, self.head = nn.Linear(32, 16), nn.Linear(16, 3)
        self.written, self.reads = written, reads

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        z = WRITES[self.written](self, y)
        return self.head(self.c(y if self.reads == "the argument" else z).relu())


def loss(model: Callable[[Tensor], Tensor]) -> Tensor:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return model(x).square().mean()


def made(written: str, reads: str, init: str) -> nn.Module:
    torch.manual_seed(0)
    return unit_scale(Net(written, reads).double(), {F.silu: torch.tanh}, init=init)


@pytest.mark.parametrize("init", ["unit", "preserve"])
@pytest.mark.parametrize("written", WRITES)
def test_the_argument_is_the_result(written: str, init: str) -> None:
    by_result, by_argument = (made(written, r, init) for r in ("the result", "the argument"))
    assert torch.equal(loss(by_result), loss(by_argument))
    assert check_slopes(by_argument, loss)


@pytest.mark.parametrize("written", ["a residual add", "/= a number", "replaced"])
def test_compiled(written: str) -> None:
    model = made(written, "the result", "unit")
    wanted = loss(model)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(loss(compiled), wanted)


class Filled(nn.Module):
    """Its result is written by ``x[i] = y``, which returns nothing, and may be read or kept too."""

    def __init__(self, reads: bool, keeps: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 3)
        self.reads, self.keeps = reads, keeps
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.b(self.a(x).relu())
        filled = torch.zeros_like(x)
        filled[:, 1::2] = y[:, 1::2]
        if self.keeps:
            self.kept = filled
        return (y if self.keeps else filled), (self.c(filled) if self.reads else y)


def filled_loss(model: nn.Module) -> Tensor:
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    first, second = model(x)
    kept: Tensor | None = model.kept  # type: ignore[assignment]
    rest = 0 if kept is None else kept.square().mean()
    return 100 * first.square().mean() + second.square().mean() + rest


@pytest.mark.parametrize("init", ["unit", "preserve"])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("reads", [False, True])
def test_a_result_that_is_filled(reads: bool, keeps: bool, init: str) -> None:
    torch.manual_seed(0)
    model = Filled(reads, keeps).double()
    scaled = unit_scale(model, init=init)
    powers = check_slopes(scaled, filled_loss)
    assert len(powers) == (6 if reads else 4)
    if init == "preserve":
        assert set(powers.values()) == {0}


@pytest.mark.parametrize("reads", [False, True])
def test_a_result_that_is_filled_compiled(reads: bool) -> None:
    torch.manual_seed(0)
    model = unit_scale(Filled(reads, keeps=False).double())
    for _ in range(3):
        filled_loss(model).backward()
    model.zero_grad()
    filled_loss(model).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    with warnings.catch_warnings():
        if torch.__version__ >= (2, 14):  # whose compiler shows no mode ``x[i] = y``: runs eagerly
            warnings.filterwarnings("ignore", "torch.compile cannot compile the forward pass")
        filled_loss(torch.compile(model, backend="aot_eager")).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(found) == len(expected)
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


LAST: dict[str, Callable[[Tensor], object]] = {
    "a method": lambda y: y.mul_(0.5),
    "a part": lambda y: y[:, :2].mul_(0.5),
}


class WrittenLast(nn.Module):
    """The last call writes the result, which is read by the name of the argument."""

    def __init__(self, written: str) -> None:
        super().__init__()
        self.a, self.b, self.written = nn.Linear(8, 32), nn.Linear(32, 4), written

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).relu())
        LAST[self.written](y)
        return y


@pytest.mark.parametrize("init", ["unit", "preserve"])
@pytest.mark.parametrize("written", LAST)
def test_gradients_that_arrive_at_an_argument(written: str, init: str) -> None:
    """Compiled and under torch.func, gradients at results have no hooks."""
    torch.manual_seed(0)
    model = unit_scale(WrittenLast(written).double(), init=init)
    loss(model).backward()
    _, expected = gradients(model, loss)
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    functional = grad(lambda p: loss(lambda x: functional_call(model, p, (x,))))(parameters)
    torch.testing.assert_close(functional, expected)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(model, lambda _: loss(compiled))[1], expected)


def _zeroed(x: Tensor) -> Tensor:
    x[:, 0] = 0.0
    return x


INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "a method": lambda x: x.add_(1.0),
    "a part": _zeroed,
}


@pytest.mark.parametrize("init", ["unit", "preserve"])
@pytest.mark.parametrize("written", INPUTS)
def test_an_input_that_is_no_leaf_may_be_written(written: str, init: str) -> None:
    class Model(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(INPUTS[written](x))

    torch.manual_seed(0)
    model, x = unit_scale(Model("a number", "the result").double(), init=init), torch.randn(16, 8)
    x = x.double().requires_grad_()

    def function(x: Tensor) -> Tensor:
        return model(2 * x).square().mean()

    for _ in range(2):
        (found,) = torch.autograd.grad(function(x), x)
        torch.testing.assert_close(found, grad(function)(x.detach()))
