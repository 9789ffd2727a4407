"""The code of a model with its scales: names, lines and numbers."""

import re
import sys

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import unit_scaling.functional as U
from tests.shared import Net, assert_close, linears, refuses
from unit_scaling.scale import scale_bwd, scale_fwd
from unit_scaling.utils import (
    ScalePair,
    ScaleTracker,
    ScaleTrackingInterpreter,
    analyse_module,
)


def without_scales(code):
    return re.sub(r"\(-> [^,]+, <- [^)]+\)", "(_)", code).splitlines()


def scales(code, line):
    (found,) = [text for text in code.splitlines() if text.strip().startswith(line)]
    forward, backward = re.search(r"\(-> ([^,]+), <- ([^)]+)\)", found).groups()
    return float(forward), float(backward)


def test_scale_pair():
    assert str(ScalePair()) == "(-> n/a, <- n/a)"
    assert str(ScalePair(1.2345, 0.5)) == "(-> 1.23, <- 0.5)"


def test_scale_tracker_is_the_identity():
    x, pair = torch.randn(64, requires_grad=True), ScalePair()
    y = ScaleTracker.track(x, pair)
    assert pair == ScalePair(pytest.approx(x.std().item()))
    (3 * y).square().sum().backward()
    assert torch.equal(y, x)
    assert_close(x.grad, 18 * x.detach())
    assert pair.backward == pytest.approx(x.grad.std().item())
    ScaleTracker.track(torch.ones(1), pair)
    assert pair.forward == 0.0


def test_interpreter():
    net = linears(8, 8, nn.ReLU)
    interpreter = ScaleTrackingInterpreter(fx.symbolic_trace(net))
    x = torch.randn(4, 8, requires_grad=True)
    interpreter.run(x).sum().backward()
    assert list(interpreter.scales) == "input_1 _0 _1 output".split()
    assert interpreter.scales["_0"].forward == pytest.approx(net[0](x).std().item())
    assert interpreter.scales["input_1"].backward == pytest.approx(x.grad.std().item())


class Shifted(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = (
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width, bias=False),
        )
        self.register_buffer("shift", torch.ones(width))

    def forward(self, x, mask):
        y = self.fc2(F.relu(self.fc1(x)).masked_fill(mask, 0.0)) + self.shift
        return torch.stack(y.split([2, y.shape[1] - 2], dim=1)[1:] * 2).mT[0]


def test_every_line():
    x, mask = torch.randn(32, 16), torch.rand(32, 64) < 0.5
    net = Shifted(16)
    backward = torch.randn(14, 32)
    code = analyse_module(net, (x, mask), backward, syntax_highlight=False)
    assert without_scales(code) == [
        "def forward(self, x, mask):  (_)",
        "    fc1_weight = self.fc1.weight;  (_)",
        "    fc1_bias = self.fc1.bias;  (_)",
        "    linear = F.linear(x, fc1_weight, fc1_bias);  (_)",
        "    relu = F.relu(linear, inplace=False);  (_)",
        "    masked_fill = relu.masked_fill(mask, 0.0);  (_)",
        "    fc2_weight = self.fc2.weight;  (_)",
        "    linear_1 = F.linear(masked_fill, fc2_weight, None);  (_)",
        "    shift = self.shift;  (_)",
        "    add = linear_1 + shift;  (_)",
        "    split = add.split([2, 14], dim=1)",
        "    getitem = split[0];  (_)",
        "    getitem_1 = split[1];  (_)",
        "    stack = torch.stack((getitem_1, getitem_1));  (_)",
        "    getattr_1 = stack.mT;  (_)",
        "    getitem_2 = getattr_1[0];  (_)",
        "    return getitem_2",
    ]
    assert x.grad is None
    assert all(p.grad is None for p in net.parameters())
    copies = x.clone().requires_grad_()
    net(copies, mask).backward(backward)
    three_digits = {"rel": 0.006}
    expected = x.std().item(), copies.grad.std().item()
    assert scales(code, "def forward") == pytest.approx(expected, **three_digits)
    expected = net.fc2.weight.std().item(), net.fc2.weight.grad.std().item()
    assert scales(code, "fc2_weight") == pytest.approx(expected, **three_digits)
    assert "shift = self.shift;  (-> 0.0, <- n/a)" in code


def test_one_line_for_a_module():
    """Also for one that returns a dict."""
    inner = Net(lambda m, x: {"double": 2 * x})
    forward = lambda m, x: m.inner(m.layer(x))["double"].relu()  # noqa: E731
    model = Net(forward, inner=inner, layer=nn.Linear(2, 2))
    code = analyse_module(model, torch.ones(2), torch.ones(2), False, False)
    assert without_scales(code)[1:] == [
        "    layer = self.layer(x);  (_)",
        "    inner = self.inner(layer)",
        "    getitem = inner['double'];  (_)",
        "    relu = getitem.relu();  (_)",
        "    return relu",
    ]


def test_residual_connections_and_scales_are_a_line_each_with_their_gradients():
    """What an autograd function does inside has no gradient of its own to show."""

    def forward(m, x):
        branch, skip = U.residual_split(x, 0.5)
        branch = scale_fwd(scale_bwd(branch, 2.0).relu(), 3.0)
        return U.residual_add(branch, skip, 0.5)

    x, backward = torch.randn(64, 64), torch.randn(64, 64)
    code = analyse_module(Net(forward), x, backward, syntax_highlight=False)
    assert without_scales(code)[1:] == [
        "    residual_split = U.residual_split(x, 0.5)",
        "    getitem = residual_split[0];  (_)",
        "    getitem_1 = residual_split[1];  (_)",
        "    scale_bwd = scale_bwd(getitem, 2.0);  (_)",
        "    relu = scale_bwd.relu();  (_)",
        "    scale_fwd = scale_fwd(relu, 3.0);  (_)",
        "    residual_add = U.residual_add(scale_fwd, getitem_1, 0.5);  (_)",
        "    return residual_add",
    ]
    assert "n/a" not in code
    stream = pytest.approx(backward.std().item(), rel=0.006)
    assert scales(code, "getitem_1")[1] == stream
    assert scales(code, "scale_fwd =")[1] == stream
    inside = scales(code, "scale_bwd")[1]
    assert scales(code, "getitem =")[1] == pytest.approx(2 * inside, rel=0.01)


def test_colours_are_optional(monkeypatch):
    arguments = (nn.ReLU(), torch.ones(2), torch.ones(2))
    plain = analyse_module(*arguments, syntax_highlight=False)
    monkeypatch.setitem(sys.modules, "pygments", None)
    assert analyse_module(*arguments) == plain
    monkeypatch.undo()
    pytest.importorskip("pygments")
    coloured = analyse_module(*arguments)
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured).strip() == plain


def test_what_is_refused():
    with refuses(r"needs an nn\.Module, got function", TypeError):
        analyse_module(F.relu, torch.ones(2))
    with refuses("grad can be implicitly created only for scalar", RuntimeError):
        analyse_module(nn.ReLU(), torch.ones(2))
