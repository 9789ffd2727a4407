"""Both ends of a model: what it is called with, and what comes after its last product."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8
import unit_scaling as uu
import unit_scaling.functional as U
from tests.transforms.models import Net
from unit_scaling.transforms import unit_scale

WIDTH = 32
Function = Callable[[Net, Tensor], Tensor]


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def model(fn: Function) -> nn.Module:
    torch.manual_seed(0)
    return unit_scale(Net(fn, a=linear(), b=linear()))


def rows(net: nn.Module) -> dict[str, str]:
    return {row.call: f"{row.done}: {row.why}" for row in uu.report(net) if not row.path}


# Results


def with_and_without(end: Callable[[Tensor], Tensor]) -> tuple[nn.Module, nn.Module]:
    """Two equal models, of which one computes ``end`` of its logits."""
    return model(lambda m, x: end(m.b(F.relu(m.a(x))))), model(lambda m, x: m.b(F.relu(m.a(x))))


RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softmax": lambda y: y.softmax(-1),
    "deviation": lambda y: torch.exp(0.5 * y),
    "pixels": lambda y: (torch.tanh(y) + 1) / 2,
    "direction": lambda y: F.normalize(y, dim=-1),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_keep_their_values(name: str) -> None:
    """The gradient alone is scaled: by one factor, as that of an op without constraint."""
    result = RESULTS[name]
    ours, logits = with_and_without(result)
    x = torch.randn(64, WIDTH)
    y, plain = ours(x), result(logits(x))
    torch.testing.assert_close(y, plain)
    cotangent = torch.randn(y.shape)
    mine, theirs = (
        torch.autograd.grad(z, net.b.weight, cotangent)[0]
        for z, net in ((y, ours), (plain, logits))
    )
    torch.testing.assert_close(F.cosine_similarity(mine, theirs, 0), torch.ones(WIDTH))
    assert "keeps its values" in str(rows(ours))


TARGET = torch.linspace(-1, 1, 64)[:, None]

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "squares": lambda y: ((y - TARGET) ** 2).mean(),
    "half of them, weighted": lambda y: (0.5 * TARGET.abs() * (y - TARGET).pow(2)).sum(-1).mean(),
    "in decibels": lambda y: (-10 * torch.log10((y - TARGET).square().mean(-1) + 1e-8)).mean(),
    "a divergence": lambda y: -0.5 * torch.sum(1 + y - y.mean(0).pow(2) - y.exp()),
    "two terms": lambda y: y.abs().mean() + 0.1 * y.norm(dim=-1).mean(),
    "Charbonnier": lambda y: torch.sqrt((y - TARGET) ** 2 + 1e-3).mean(),
    "policy gradient": lambda y: -(y.log_softmax(-1)[:, 0] * TARGET[:, 0]).mean(),
    "a density": lambda y: -torch.distributions.Normal(y, 2.0).log_prob(TARGET).mean(),
    "a category": lambda y: torch.distributions.Categorical(logits=y).entropy().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_written_out_keeps_its_value(name: str) -> None:
    """Its gradient is scaled by one factor at most."""
    loss = LOSSES[name]
    ours, logits = with_and_without(loss)
    x = torch.randn(64, WIDTH)
    mine, theirs = ours(x), loss(logits(x))
    torch.testing.assert_close(mine, theirs)
    mine.backward()
    theirs.backward()
    cosine = F.cosine_similarity(ours.b.weight.grad.ravel(), logits.b.weight.grad.ravel(), 0)
    assert cosine.item() == pytest.approx(1)
    assert not uu.report(ours).left_alone


def test_what_a_loss_is_computed_of_is_scaled() -> None:
    """A product that is spelled out, and what ends in no number, is no term of a loss."""
    ours = model(lambda m, x: ((m.a(x) * m.b(x)).sum(-1) - TARGET[:, 0]).abs().mean())
    ours(torch.randn(64, WIDTH))
    assert rows(ours)["sum"].startswith("scaled")
    assert "loss" not in rows(ours)["sum"]
    assert "loss" in rows(ours)["sub"]
    ours = model(lambda m, x: m.b(m.a(x)) * 3.0)
    ours(torch.randn(64, WIDTH))
    assert rows(ours)["mul"] == "scaled: a number, taken out"


def test_probabilities_go_into_their_loss() -> None:
    ours = model(lambda m, x: F.binary_cross_entropy(torch.sigmoid(m.b(m.a(x))), x))
    assert ours(torch.rand(8, WIDTH)).item() == pytest.approx(0.7, abs=0.1)


def test_a_probability_whose_logarithm_is_taken_keeps_its_gradient() -> None:
    """The logarithm undoes what the softmax does to it: as log_softmax, which has a factor."""
    by_hand = model(lambda m, x: torch.log(m.b(m.a(x)).softmax(-1) + 1e-9))
    y = by_hand(torch.randn(64, WIDTH))
    y.backward(torch.randn(y.shape))
    assert 1 / 4 < by_hand.b.weight.grad.square().mean().sqrt() < 4


@pytest.mark.parametrize(
    "fn",
    [
        lambda m, x: m.b(torch.sigmoid(m.a(x))),
        lambda m, x: m.b(x) * torch.sigmoid(m.a(x)),
        lambda m, x: x + m.b(torch.sigmoid(m.a(x))),
    ],
    ids=["product", "gate", "residual"],
)
def test_what_goes_on_is_no_result(fn: Function) -> None:
    ours = model(fn)
    ours(torch.randn(8, WIDTH))
    assert "keeps its values" not in str(rows(ours))


# What a model is called with


@pytest.mark.parametrize(
    "prepare",
    [
        lambda x: x / 255,
        lambda x: 2 * (x / 255) - 1,
        lambda x: (x - 127.5) / 127.5,
        lambda x: x + x,
    ],
)
def test_what_is_done_to_the_input_stays(prepare: Callable[[Tensor], Tensor]) -> None:
    """It is data: no number is taken out of it, as no operation before has made its scale 1."""
    ours = model(lambda m, x: m.a(prepare(x)))
    x = torch.rand(8, WIDTH) * 255
    torch.testing.assert_close(ours(x), U.linear(prepare(x), ours.a.weight))


def test_the_input_as_target_is_no_second_path() -> None:
    """An autoencoder with its loss inside: its last layer is the readout, its path the only one."""
    ours = model(lambda m, x: F.mse_loss(m.b(torch.tanh(m.a(x))), x))
    x = torch.randn(8, WIDTH)
    ours(x)
    why = {row.path: row.why for row in uu.report(ours) if row.call == "linear"}
    assert why["b"] == "readout: 1/fan_in"
    assert "only path" in rows(ours)["tanh"]


@pytest.mark.parametrize(
    "fn",
    [
        lambda m, x: m.b(torch.tanh(m.a(x))) * x,
        lambda m, x: m.b(torch.tanh(m.a(x - x.mean(1)[:, None]))) + x.mean(1)[:, None],
    ],
    ids=["times it", "its mean"],
)
def test_an_input_that_wants_a_gradient_is_a_path(fn: Function) -> None:
    """Then its gradient is that of what is computed; the values are the same either way."""
    ours = model(fn).double()
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    values = ours(x)
    x.requires_grad_()
    torch.testing.assert_close(ours(x), values)
    torch.autograd.gradcheck(ours, x, fast_mode=True)


def test_a_value_whose_logarithm_needs_its_range_keeps_it() -> None:
    """The density of an action ``tanh(x)``, as in soft actor-critic, while the action goes on."""

    def loss(m: Net, x: Tensor) -> Tensor:
        action = torch.tanh(m.a(x))
        return (torch.log(1 - action.pow(2) + 1e-6).sum(-1) + m.b(action).mean(-1)).mean()

    ours = model(loss)
    ours(torch.randn(64, WIDTH)).backward()
    assert rows(ours)["tanh"].endswith("keeps its values, gradient only")
    assert all(p.grad.isfinite().all() for p in ours.parameters() if p.grad is not None)


# Calls that need no rule


@pytest.mark.parametrize(
    "call",
    [
        lambda y: y + torch.zeros_like(y),
        lambda y: y + y.new_zeros(y.shape),
        lambda y: y * torch.randn_like(y),
        lambda y: y - y.amax(-1, keepdim=True).detach(),
        lambda y: torch.view_as_real(torch.view_as_complex(y.view(-1, 2))),
        lambda y: torch.broadcast_tensors(y, y[:1])[0],
        lambda y: F.pixel_shuffle(y.view(-1, 8, 2, 2), 2),
        lambda y: F.pixel_unshuffle(y.view(-1, 2, 4, 4), 2),
        lambda y: F.unfold(y.view(-1, 2, 4, 4), 2),
        lambda y: y.unfold(1, 4, 2),
        lambda y: torch.hstack((y, y)).tensor_split(2, dim=1)[0].rot90().diagonal(),
        lambda y: torch.zeros_like(y).scatter(0, y.argsort(0), y),
        lambda y: torch.zeros_like(y).index_put((torch.arange(len(y)),), y),
        lambda y: y.masked_select(y > 0).sort().values.nan_to_num().clamp_min(0),
        lambda y: F.max_unpool1d(*F.max_pool1d(y[:, None], 2, return_indices=True), 2),
    ],
)
def test_calls_that_need_no_rule_are_not_left_alone(call: Callable[[Tensor], Tensor]) -> None:
    ours = model(lambda m, x: call(m.a(x)))
    ours(torch.randn(8, WIDTH))
    assert not uu.report(ours).left_alone


def test_what_is_done_to_the_input_needs_no_rule() -> None:
    """No call without a rule either: nothing of it is scaled."""
    ours = model(lambda m, x: m.a(x) * x.norm(dim=-1, keepdim=True).cumsum(0).log())
    ours(torch.randn(8, WIDTH))
    assert not uu.report(ours).left_alone
    assert rows(ours)["norm"] == "unchanged: on what the model is called with"


METHODS: dict[str, Function] = {
    "norm": lambda m, x: m.b(m.a(x) / m.a(x).norm(dim=-1, keepdim=True)),
    "split": lambda m, x: m.b(torch.cat(m.a(x).split(WIDTH // 2, -1), -1)),
    "unflatten": lambda m, x: m.b(m.a(x).unflatten(-1, (2, -1)).flatten(-2)),
}


@pytest.mark.parametrize("recipe", ["", "unit", "block"])
@pytest.mark.parametrize("name", METHODS)
def test_methods_of_tensor_that_are_written_in_python_are_compiled(name: str, recipe: str) -> None:
    """The compiler does not find `Tensor.norm` in a dict of functions, nor follows the ``super()``
    of `Tensor.unflatten`, which a cast by blocks is made with too."""
    torch.compiler.reset()
    ours = model(METHODS[name])
    ours = fp8.convert(ours, recipe) if recipe else ours
    x = torch.randn(8, WIDTH)
    expected = ours(x)
    got = torch.compile(ours, backend="eager", fullgraph=True)(x)
    torch.testing.assert_close(got, expected)


# Functions that cannot be copied or seen


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    return x * torch.erf(x)


class Scripted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return scripted(x)


def test_a_torchscript_function_is_reported_by_name() -> None:
    ours = unit_scale(nn.Sequential(linear(), Scripted(), linear()))
    (row,) = uu.report(ours).left_alone
    assert (row.path, row.call) == ("1", "scripted")


def test_a_torchscript_function_as_attribute_is_refused() -> None:
    net = nn.Sequential(linear())
    net.activation = scripted
    with pytest.raises(TypeError, match="'activation' is a TorchScript function"):
        unit_scale(net)


def test_an_attribute_without_a_rule_is_reported_by_its_name() -> None:
    ours = model(lambda m, x: m.b(m.a(x).data))
    ours(torch.randn(4, WIDTH))
    assert rows(ours)["data"].startswith("left alone: no rule for data")


def test_a_recurrent_layer_of_one_hot_letters_is_no_weight() -> None:
    """Nothing that goes into it but weights is floating-point before the cast."""
    torch.manual_seed(0)
    net = Net(
        lambda m, ids: m.a(F.one_hot(ids, 8).float())[0], a=nn.LSTM(8, WIDTH, batch_first=True)
    )
    ours = unit_scale(net)
    ours(torch.randint(8, (4, 6)))
    assert [row.done for row in uu.report(ours) if row.call == "lstm"] == ["scaled"]


# What meets an input


class Returns(nn.Module):
    """A target of Q-learning: rewards and discounted values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, rewards: Tensor) -> Tensor:
        self.values = self.b(F.relu(self.a(x)))
        return rewards + 0.9 * self.values.amax(1)


def test_what_meets_an_input_has_its_units() -> None:
    torch.manual_seed(0)
    ours, x, rewards = unit_scale(Returns()), torch.randn(16, WIDTH), torch.randn(16)
    result = ours(x, rewards)
    torch.testing.assert_close(result, rewards + 0.9 * ours.values.amax(1))


def test_a_loss_of_what_meets_an_input_has_gradients_of_unit_scale() -> None:
    """A forecast in units of its input, and its squared error, which is written out."""

    def loss(m: Net, x: Tensor) -> Tensor:
        mean = x[:, :1]
        y = m.b(F.relu(m.a(x - mean))) + mean
        return ((y - x.roll(1)) ** 2).mean()

    ours = model(loss)
    rows = uu.verify(ours, torch.randn(64, WIDTH)).rows
    (rms,) = (r.rms for r in rows if r.path == "b" and r.tensor == "gradient of output")
    assert 1 / 2 < rms < 2
