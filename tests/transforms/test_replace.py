"""``unit_scale(model, replace=...)``: other functions in place of torch's, in whatever way a model
calls them, and beside the other transforms."""

import operator
import re
from copy import deepcopy

import torch
from torch import nn
from torch.nn import functional as F

import fp8
import unit_scaling as uu
import unit_scaling.functional as U
from tests.shared import (
    Net,
    assert_close,
    assert_same,
    in_one_graph,
    linears,
    parametrize,
    pickled,
    refuses,
    seeded,
)
from tests.transforms.models import hooks_of
from unit_scaling.transforms import compile, simulate_fp8, track_scales, unit_scale

X = torch.randn(4, 8, generator=seeded(1))


def constant(*args, **kwargs):
    return torch.full((4, 8), -7.0)


def fullgraph(model, x):
    return in_one_graph(model)(x)


def exported(model, x):
    return torch.export.export(model, (x,)).module()(x)


WAYS = {
    "eager": lambda model, x: model(x),
    "fullgraph": fullgraph,
    "export": exported,
    "copy": lambda model, x: deepcopy(model)(x),
}

SPELLINGS = {
    "function": (F.relu, F.relu),
    "function, by keywords": (F.relu, lambda x: F.relu(input=x, inplace=False)),
    "function of torch": (torch.relu, torch.relu),
    "method": (torch.Tensor.relu, lambda x: x.relu()),
    "module": (F.relu, nn.ReLU()),
    "module with settings": (F.softmax, nn.Softmax(-1)),
    "linear": (F.linear, nn.Linear(8, 8)),
    "+": (torch.Tensor.add, lambda x: x + x),
    "@": (torch.Tensor.matmul, lambda x: x @ x.mT),
    "**": (torch.Tensor.__pow__, lambda x: x**2),
    "number - x": (torch.Tensor.__rsub__, lambda x: 1 - x),
    "operator.mul": (operator.mul, lambda x: x * 2),
    "operator.matmul": (operator.matmul, lambda x: x @ x.mT),
}


@parametrize("way", WAYS)
@parametrize("name", SPELLINGS)
def test_spellings(name, way):
    function, call = SPELLINGS[name]
    net = Net(lambda m, x: m.call(x))
    net.call = call
    model = unit_scale(net, {function: constant}, batch=X)
    assert_same(WAYS[way](model, X), constant())
    assert not torch.equal(net(X), constant())  # the model itself is as it was


def written(m, x):
    """In place, of which the argument is read afterwards."""
    x = x * 1
    m.write(x)
    return x + 0


IN_PLACE = {
    "inplace=True": (F.relu, lambda x: F.relu(x, inplace=True)),
    "by position": (F.relu, lambda x: F.relu(x, True)),
    "by keywords": (F.relu, lambda x: F.relu(inplace=True, input=x)),
    "method": (torch.Tensor.relu_, lambda x: x.relu_()),
    "module": (F.silu, lambda x: nn.SiLU(inplace=True)(x)),
    "operator.iadd": (operator.iadd, lambda x: operator.iadd(x, 1)),
}


def negated(input, *args):
    return -input


@parametrize("way", ["eager", "fullgraph"])
@parametrize("name", IN_PLACE)
def test_in_place(name, way):
    function, call = IN_PLACE[name]
    net = Net(written)
    net.write = call
    model = unit_scale(net, {function: negated}, batch=X)
    assert_same(WAYS[way](model, X), -X)


@parametrize(
    "other",
    [U.gelu, torch.relu, torch.tanh, lambda x: -x, lambda x, inplace=False: 3 * x],
)
@parametrize("inplace", [False, True])
def test_what_takes_no_argument_inplace_gets_none(other, inplace):
    """`nn.ReLU` gives it by name, which a replacement need not know."""
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=inplace))
    model = unit_scale(net, replace={F.relu: other})
    model(X)
    expected = other(model[0](X))
    for run in (model, deepcopy(model)):
        assert_same(run(X), expected)
    assert_close(fullgraph(model, X), expected)


def test_modules_of_torch_and_of_uu():
    """Each call inside of them is one of the model; those inside of a replacement are not."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    x = X[:, None].expand(-1, 3, -1).contiguous()
    model = unit_scale(layer, {F.relu: F.silu}, batch=x)
    reference = nn.TransformerEncoderLayer(8, 2, 16, 0.0, F.silu, batch_first=True)
    reference.load_state_dict(model.state_dict(), strict=True)
    assert_close(model(x), reference(x))
    assert_close(fullgraph(model, x), reference(x))
    inner = lambda x, *args, **kwargs: 2 * F.gelu(x)  # noqa: E731
    model = unit_scale(
        nn.Sequential(nn.Identity(), uu.GELU()), {F.gelu: inner}, batch=X
    )
    assert_close(model(X), 2 * uu.GELU()(X))


def test_numbers_are_those_of_what_runs():
    """A replacement is a part of the passes: its result is the operand of the next product."""
    net = linears(8, 64, nn.ReLU, 64, 4)
    large = lambda x: 100 * F.relu(x)  # noqa: E731
    for model in (
        unit_scale(net, {F.relu: large}, batch=X),
        unit_scale(net, {F.relu: large}),
    ):
        model(X)
        assert (
            model[2].weight.mup_scale
            < unit_scale(net, batch=X)[2].weight.mup_scale / 32
        )
        assert not hooks_of(model)


def relu_squared(x):
    return F.relu(x) ** 2


def plain():
    torch.manual_seed(0)
    return linears(8, 16, nn.ReLU, 16, nn.ReLU, 4)


def by_hand():
    """The model with the replacement in it."""
    model = plain()
    model[1] = model[3] = Net(lambda m, x: relu_squared(x))
    return model


def converted(model):
    return fp8.convert(model, "tensor", backend="simulate")


ORDERS = {
    "simulated before": lambda model, scale: scale(simulate_fp8(model)),
    "converted after": lambda model, scale: converted(scale(model)),
    "converted before": lambda model, scale: scale(converted(model)),
    "tracked": lambda model, scale: track_scales(scale(model)),
    "compiled": lambda model, scale: compile(scale(model)),
    "compiled before": lambda model, scale: scale(compile(model)),
}


@parametrize("batch", [None, X], ids=["pending", "batch"])
@parametrize("name", ORDERS)
def test_beside_the_other_transforms(name, batch, no_code):
    """As the model that was written with the other function, in its first call and later."""
    ours = ORDERS[name](
        plain(), lambda m: unit_scale(m, {F.relu: relu_squared}, batch=batch)
    )
    theirs = ORDERS[name](by_hand(), lambda m: unit_scale(m, batch=batch))
    for _ in range(3):
        found = []
        for model in (ours, theirs):
            model.zero_grad()
            y = model(X)
            y.square().mean().backward()
            found.append([y.detach(), *(p.grad for p in model.parameters())])
        assert_close(*found, rtol=1e-5, atol=1e-6)


def test_copies_and_pickles():
    model = unit_scale(plain(), {F.relu: relu_squared})
    others = [deepcopy(model), pickled(model)]
    expected = model(X)
    written = by_hand()
    written.load_state_dict(model.state_dict(), strict=True)
    assert_same(written(X), expected)
    for other in (*others, deepcopy(model), pickled(model)):
        assert_same(other(X), expected)
    assert repr(model).splitlines()[1].strip() == "replace"
    assert isinstance(model, nn.Sequential)


REFUSED = [
    ({constant: constant}, ValueError, "calls of <function constant"),
    (
        {F.tanh: constant},
        ValueError,
        "replace the method of torch.Tensor that it calls",
    ),
    ({F.relu: "gelu"}, TypeError, "must be callable, got"),
    ([F.relu], TypeError, "a dict of torch function -> function, got"),
]


@parametrize("replace, error, match", REFUSED)
def test_what_is_refused(replace, error, match):
    with refuses(re.escape(match), error):
        unit_scale(nn.Linear(2, 2), replace)
