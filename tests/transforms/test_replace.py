"""``unit_scale(model, replace=...)``: other functions in place of torch's, in whatever way a model
calls them, and beside the other transforms."""

from __future__ import annotations

import copy
import operator
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8
import unit_scaling as uu
import unit_scaling.functional as U
from tests.transforms.models import Net, hooks_of
from unit_scaling.transforms import compile, simulate_fp8, track_scales, unit_scale

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def constant(*args: Any, **kwargs: Any) -> Tensor:
    return torch.full((4, 8), -7.0)


def fullgraph(model: nn.Module, x: Tensor) -> Tensor:
    torch.compiler.reset()
    return torch.compile(model, backend="aot_eager", fullgraph=True)(x)


def exported(model: nn.Module, x: Tensor) -> Tensor:
    return torch.export.export(model, (x,)).module()(x)


WAYS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "eager": lambda model, x: model(x),
    "fullgraph": fullgraph,
    "export": exported,
    "copy": lambda model, x: copy.deepcopy(model)(x),
}

SPELLINGS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "function": (F.relu, F.relu),
    "function, by keywords": (F.relu, lambda x: F.relu(input=x, inplace=False)),
    "function of torch": (torch.relu, torch.relu),
    "method": (torch.Tensor.relu, lambda x: x.relu()),
    "module": (F.relu, nn.ReLU()),
    "module with settings": (F.softmax, nn.Softmax(-1)),
    "linear": (F.linear, nn.Linear(8, 8)),
    "+": (torch.Tensor.add, lambda x: x + x),
    "-": (torch.Tensor.sub, lambda x: x - x),
    "@": (torch.Tensor.matmul, lambda x: x @ x.mT),
    "**": (torch.Tensor.__pow__, lambda x: x**2),
    "number - x": (torch.Tensor.__rsub__, lambda x: 1 - x),
    "operator.mul": (operator.mul, lambda x: x * 2),
    "operator.truediv": (operator.truediv, lambda x: x / 2),
    "operator.matmul": (operator.matmul, lambda x: x @ x.mT),
    "of a module of uu": (F.hardswish, lambda x: F.hardswish(x)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str, way: str) -> None:
    function, call = SPELLINGS[name]
    layers = {"call": call} if isinstance(call, nn.Module) else {}
    net = Net(lambda m, x: 2 * call(x) if not layers else 2 * m.call(x), **layers)
    two = {operator.mul, torch.Tensor.mul}
    if function in two:
        net.fn = lambda m, x: call(x)
    model = unit_scale(net, {function: constant}, batch=X)
    factor = 1 if function in two else 2
    assert torch.equal(WAYS[way](model, X), factor * constant())
    assert not torch.equal(net(X), factor * constant())  # the model itself is as it was


def written(m: Any, x: Tensor) -> Tensor:
    """In place, of which the argument is read afterwards."""
    x = x * 1
    m.write(x)
    return x + 0


IN_PLACE: dict[str, tuple[Any, Callable[[Tensor], Any]]] = {
    "inplace=True": (F.relu, lambda x: F.relu(x, inplace=True)),
    "by position": (F.relu, lambda x: F.relu(x, True)),
    "by keywords": (F.relu, lambda x: F.relu(inplace=True, input=x)),
    "method": (torch.Tensor.relu_, lambda x: x.relu_()),
    "module": (F.silu, lambda x: nn.SiLU(inplace=True)(x)),
    "operator.iadd": (operator.iadd, lambda x: operator.iadd(x, 1)),
}


def negated(input: Tensor, *args: Any) -> Tensor:
    return -input


@pytest.mark.parametrize("way", ["eager", "fullgraph"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(name: str, way: str) -> None:
    function, call = IN_PLACE[name]
    net = Net(written)
    net.write = call
    model = unit_scale(net, {function: negated}, batch=X)
    assert torch.equal(WAYS[way](model, X), -X)


@pytest.mark.parametrize(
    "other", [U.gelu, torch.relu, torch.tanh, lambda x: -x, lambda x, inplace=False: 3 * x]
)
@pytest.mark.parametrize("inplace", [False, True])
def test_what_takes_no_argument_inplace_gets_none(other: Any, inplace: bool) -> None:
    """`nn.ReLU` gives it by name, which a replacement need not know."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=inplace))
    model = unit_scale(net, replace={F.relu: other})
    expected = other(model[0](X)) if model(X) is not None else None
    for run in (model, copy.deepcopy(model)):
        assert torch.equal(run(X), other(model[0](X)))
    assert expected is not None
    torch.testing.assert_close(fullgraph(model, X), expected)


def test_modules_of_torch_and_of_uu() -> None:
    """Each call inside of them is one of the model; those inside of a replacement are not."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    x = X[:, None].expand(-1, 3, -1).contiguous()
    model = unit_scale(layer, {F.relu: F.silu}, batch=x)
    reference = nn.TransformerEncoderLayer(8, 2, 16, 0.0, F.silu, batch_first=True)
    reference.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(model(x), reference(x))
    torch.testing.assert_close(fullgraph(model, x), reference(x))
    calls: list[int] = []

    def gelu(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(1)
        return F.gelu(x)

    model = unit_scale(nn.Sequential(nn.Linear(8, 8), uu.GELU()), {F.gelu: gelu}, batch=X)
    calls.clear()
    model(X)
    assert len(calls) == 1


def test_numbers_are_those_of_what_runs() -> None:
    """A replacement is a part of the passes: its result is the operand of the next product."""
    net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 4))
    large = lambda x: 100 * F.relu(x)  # noqa: E731
    for model in (unit_scale(net, {F.relu: large}, batch=X), unit_scale(net, {F.relu: large})):
        model(X)
        assert model[2].weight.mup_scale < unit_scale(net, batch=X)[2].weight.mup_scale / 32
        assert not hooks_of(model)


def relu_squared(x: Tensor) -> Tensor:
    return F.relu(x) ** 2


def plain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
    )


def by_hand() -> nn.Module:
    """The model with the replacement in it."""
    model: Any = plain()
    model[1] = model[3] = Net(lambda m, x: relu_squared(x))
    return model


ORDERS: dict[str, Callable[[nn.Module, Any], nn.Module]] = {
    "simulated after": lambda model, scale: simulate_fp8(scale(model)),
    "simulated before": lambda model, scale: scale(simulate_fp8(model)),
    "converted after": lambda model, scale: fp8.convert(scale(model), "tensor", backend="simulate"),
    "converted before": lambda model, scale: scale(
        fp8.convert(model, "tensor", backend="simulate")
    ),
    "tracked": lambda model, scale: track_scales(scale(model)),
    "compiled": lambda model, scale: compile(scale(model)),
    "compiled before": lambda model, scale: scale(compile(model)),
}


@pytest.mark.parametrize("batch", [None, X], ids=["pending", "batch"])
@pytest.mark.parametrize("name", ORDERS)
def test_beside_the_other_transforms(name: str, batch: Tensor | None) -> None:
    """As the model that was written with the other function, in its first call and later."""
    torch.compiler.reset()
    ours = ORDERS[name](plain(), lambda m: unit_scale(m, {F.relu: relu_squared}, batch=batch))
    theirs = ORDERS[name](by_hand(), lambda m: unit_scale(m, batch=batch))
    for _ in range(3):
        found = []
        for model in (ours, theirs):
            model.zero_grad()
            y = model(X)
            y.square().mean().backward()
            found.append([y.detach(), *(p.grad for p in model.parameters())])
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_copies_and_pickles() -> None:
    model = unit_scale(plain(), {F.relu: relu_squared})
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    expected = model(X)
    assert torch.equal(by_values(model)(X), expected)
    for other in (*others, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(X), expected)
    assert repr(model).splitlines()[1].strip() == "replace"
    assert isinstance(model, nn.Sequential)


def by_values(model: nn.Module) -> nn.Module:
    """The model with the replacement in it, and the values of another."""
    made = by_hand()
    made.load_state_dict(model.state_dict(), strict=True)
    return made


REFUSED: list[tuple[Any, type[Exception], str]] = [
    ({constant: constant}, ValueError, "calls of <function constant"),
    ({F.tanh: constant}, ValueError, "replace the method of torch.Tensor that it calls"),
    ({F.sigmoid: constant}, ValueError, "replace the method of torch.Tensor that it calls"),
    ({F.relu: "gelu"}, TypeError, "must be callable, got"),
    ([F.relu], TypeError, "a dict of torch function -> function, got"),
]


@pytest.mark.parametrize(("replace", "error", "match"), REFUSED)
def test_what_is_refused(replace: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=re.escape(match)):
        unit_scale(nn.Linear(2, 2), replace)
