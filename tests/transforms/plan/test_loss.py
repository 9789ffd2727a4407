"""A loss of several parts: each weighs what it does in the model as it was."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from tests.transforms.gradients import check_true, exponent
from unit_scaling.transforms import unit_scale

WIDTH, ROWS = 32, 64
TARGET = torch.linspace(-1, 1, 2 * ROWS)[:, None].expand(-1, WIDTH)
CLASSES = torch.arange(2 * ROWS) % WIDTH
SOME = CLASSES.masked_fill(CLASSES % 4 > 0, -100)
Part = Callable[[Tensor, Tensor], Tensor]


class Net(nn.Module):
    """A hidden value h and a head's y, of which a loss has parts with weights."""

    def __init__(self, *parts: Part, join: Callable[[list[Tensor]], Tensor] | None = None) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.parts, self.weights, self.join = parts, [1.0] * len(parts), join or sum

    def forward(self, x: Tensor) -> Tensor:
        self.h = F.tanh(self.a(x))
        self.y = self.b(self.h)
        parts = [part(self.h, self.y) for part in self.parts]
        return self.join([w * part for w, part in zip(self.weights, parts, strict=True)])


def growths(net: Net, x: Tensor) -> list[float]:
    """How much larger the gradient of each part is at h than that of the part by itself.

    They are parallel, or this fails.
    """
    found = []
    for chosen in range(len(net.parts)):
        net.weights[:] = [float(i == chosen) for i in range(len(net.parts))]
        value = net(x)
        (ours,) = torch.autograd.grad(value, net.h)
        h, plain = net.h.detach().requires_grad_(), net.h.detach() @ net.b.weight.detach().T
        scale = (net.y.norm() / plain.norm()).item()
        part = net.parts[chosen](h, h @ net.b.weight.detach().T * scale)
        torch.testing.assert_close(value, part)
        (theirs,) = torch.autograd.grad(part, h)
        assert F.cosine_similarity(ours.ravel(), theirs.ravel(), 0) > 0.9999
        found.append((ours.norm() / theirs.norm()).item())
    net.weights[:] = [1.0] * len(net.parts)
    return found


def mse(h: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(y, TARGET[: len(y)].to(y))


def entropy(h: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(y, CLASSES[: len(y)])


def likelihood(h: Tensor, y: Tensor) -> Tensor:
    return -torch.distributions.Normal(y, 2.0).log_prob(TARGET[: len(y)]).mean()


def clipped(h: Tensor, y: Tensor) -> Tensor:
    """The objective of PPO: a clip that means something by its range."""
    chosen = y.log_softmax(-1).gather(1, CLASSES[: len(y), None])[:, 0]
    ratio = torch.exp(chosen - chosen.detach() + 0.1)
    advantage = TARGET[: len(y), 0]
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def contrast(h: Tensor, y: Tensor) -> Tensor:
    return F.triplet_margin_loss(h, TARGET[: len(h)], h.roll(1, 0))


LOSSES: dict[str, tuple[Part, ...]] = {
    "a penalty": (mse, lambda h, y: h.pow(2).mean()),
    "a sum that comes first": (lambda h, y: h.abs().sum(), mse),
    "two of torch": (entropy, lambda h, y: F.mse_loss(h, TARGET[: len(h)])),
    "of torch, summed and averaged": (
        lambda h, y: F.kl_div(
            y.log_softmax(-1), TARGET[: len(y)].softmax(-1), None, None, "batchmean"
        ),
        lambda h, y: F.l1_loss(h, TARGET[: len(h)], reduction="sum"),
    ),
    "labels to ignore": (lambda h, y: F.cross_entropy(y, SOME[: len(y)]), mse),
    "z-loss": (entropy, lambda h, y: y.logsumexp(-1).square().mean()),
    "an autoencoder": (
        lambda h, y: F.binary_cross_entropy(y.sigmoid(), TARGET[: len(y)].abs(), reduction="sum"),
        lambda h, y: -0.5 * torch.sum(1 + h - h.pow(2) - h.exp()),
    ),
    "an actor": (
        clipped,
        lambda h, y: (h.mean(-1) - TARGET[: len(h), 0]).pow(2).mean(),
        lambda h, y: (y.softmax(-1) * y.log_softmax(-1)).sum(-1).mean(),
    ),
    "a balance of experts": (
        entropy,
        lambda h, y: WIDTH * torch.sum(h.softmax(-1).mean(0) * TARGET[:WIDTH, 0].abs()),
    ),
    "a norm and a spread": (lambda h, y: y.norm(), lambda h, y: h.std(), likelihood),
    "no rule": (contrast, mse, lambda h, y: F.poisson_nll_loss(y, TARGET[: len(y)].abs())),
}
JOINS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "in place": lambda parts: parts[0].add_(parts[1]),
    "stacked": lambda parts: torch.stack(parts).sum(),
    "the mean of a list": lambda parts: torch.stack(parts).mean() * len(parts),
    "halves": lambda parts: (parts[0] + parts[1]) / 2 * 2,
}


@pytest.mark.parametrize("name", LOSSES)
def test_parts_of_a_loss_keep_their_weights(name: str) -> None:
    """Their values too; the largest gradient is near unit scale. A larger batch changes nothing."""
    torch.manual_seed(0)
    net, x = unit_scale(Net(*LOSSES[name])), torch.randn(2 * ROWS, WIDTH)
    net(x[:ROWS])
    assert not uu.report(net).left_alone
    for batch in (x[:ROWS], x):
        found = growths(net, batch)
        assert found == pytest.approx([found[0]] * len(found), rel=1e-3)
    net(x).backward()
    assert 1 / 32 < net.a.weight.grad.square().mean().sqrt() < 8


@pytest.mark.parametrize("name", JOINS)
def test_parts_may_be_joined_in_any_way(name: str) -> None:
    torch.manual_seed(0)
    net = unit_scale(Net(*LOSSES["a penalty"], join=JOINS[name]))
    one, other = growths(net, torch.randn(ROWS, WIDTH))
    assert one == pytest.approx(other, rel=1e-3)


def test_parts_may_be_returned_one_by_one() -> None:
    """They are added up outside, with the weights of the model as it was."""
    torch.manual_seed(0)
    net = unit_scale(Net(*LOSSES["labels to ignore"], join=tuple))
    first, second = net(torch.randn(ROWS, WIDTH))
    for value in (first, second):
        value.backward(retain_graph=True)
    why = {row.call: row.why for row in uu.report(net) if row.call.endswith(("entropy", "loss"))}
    assert len(why) == 2
    assert len(set(why.values())) == 1


def test_a_single_loss_is_no_part() -> None:
    net = unit_scale(Net(mse))
    net(torch.randn(ROWS, WIDTH))
    (row,) = [row for row in uu.report(net) if row.call == "mse_loss"]
    assert "part" not in row.why


class Weighed(nn.Module):
    """Learned weights of two losses (Kendall et al. 2018), and a penalty on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.s = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(F.tanh(self.a(x)))
        self.y = y.detach()
        fit = torch.exp(-self.s) * F.mse_loss(y, TARGET[: len(y)].to(y)) + self.s
        return fit + 0.1 * y.abs().mean() + 1e-3 * sum(p.pow(2).sum() for p in self.parameters())


def test_parameters_in_a_loss_are_parts_of_it() -> None:
    """The gradient of a number is the true one times a power of two, as that of a value."""
    torch.manual_seed(0)
    plain, x = Weighed(), torch.randn(ROWS, WIDTH)
    net = unit_scale(plain)
    net(x).backward()
    expected = 1 - torch.exp(-net.s) * F.mse_loss(net.y, TARGET[:ROWS]) + 2e-3 * net.s
    exponent(net.s.grad.double(), expected.double(), rtol=1e-5)
    check_true(unit_scale(plain.double()), lambda m: m(x.double()))


def test_half_precision_holds_the_gradients() -> None:
    """A growth of 1e5 is too large for float16, the gradients that it brings to 1 are not."""
    torch.manual_seed(0)
    plain, x = Net(mse, lambda h, y: h.pow(2).mean()), torch.randn(ROWS, WIDTH)
    net = unit_scale(plain)
    net(x).backward()
    half = unit_scale(plain).half()
    value = half(x.half())
    assert value.dtype == torch.float16
    value.backward()
    torch.testing.assert_close(half.a.weight.grad.float(), net.a.weight.grad, rtol=0.05, atol=0.02)


def test_the_function_of_a_pretrained_model_stays() -> None:
    torch.manual_seed(0)
    plain, x = Net(*LOSSES["z-loss"]), torch.randn(ROWS, WIDTH)
    kept = unit_scale(plain, init="preserve")
    torch.testing.assert_close(kept(x), plain(x))
    ours, theirs = (torch.autograd.grad(n(x), n.y)[0] for n in (kept, plain))
    assert F.cosine_similarity(ours.ravel(), theirs.ravel(), 0) > 0.9999


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_parts_compile(dynamic: bool) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    net, x = unit_scale(Weighed()), torch.randn(2 * ROWS, WIDTH)
    net(x[:ROWS])
    fast = torch.compile(net, backend="eager", fullgraph=True, dynamic=dynamic)
    for batch in (x[:ROWS], x):
        ours, theirs = (torch.autograd.grad(n(batch), net.a.weight)[0] for n in (fast, net))
        torch.testing.assert_close(ours, theirs)


def test_the_balance_of_experts_in_a_model_of_transformers():
    """Sums over layers, divided by numbers: they keep their value, and the gradients their size."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2,
        output_router_logits=True, router_aux_loss_coef=0.02, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    model, ids = unit_scale(transformers.MixtralForCausalLM(config)), torch.randint(64, (4, 32))
    found = model(input_ids=ids, labels=ids)
    balance = load_balancing_loss_func(found.router_logits, 4, 2)
    torch.testing.assert_close(found.aux_loss, balance)
    logits, labels = found.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    torch.testing.assert_close(found.loss, F.cross_entropy(logits, labels) + 0.02 * balance)
    assert uu.verify(model, {"input_ids": ids, "labels": ids}).share("gradient") > 0.8


def softened(h: Tensor, y: Tensor) -> Tensor:
    """Distillation, at a temperature of its own."""
    target = torch.linspace(-1, 1, WIDTH).expand_as(y).softmax(-1)
    return 16.0 * F.kl_div(F.log_softmax(y / 4.0, -1), target, reduction="batchmean")


def dice(h: Tensor, y: Tensor) -> Tensor:
    """The overlap of a segmentation over the size of both: a quotient of sums."""
    p, target = y.softmax(-1), F.one_hot(CLASSES[: len(y)], WIDTH).to(y)
    overlap = 2 * (p * target).sum(0)
    return 1 - ((overlap + 1e-6) / (p.sum(0) + target.sum(0) + 1e-6)).mean()


@pytest.mark.parametrize("part", [softened, dice])
def test_a_temperature_and_a_quotient_in_a_part_are_what_they_were(part: Part) -> None:
    """The values stay, and the growth is that of the entropy, up to what is not known of a part."""
    x, found = torch.randn(ROWS, WIDTH), []
    for other in (entropy, part):
        net = unit_scale(Net(entropy, other))
        net(x)  # with all weights
        found.append(growths(net, x))
    (alone, _), (first, second) = found
    assert second == pytest.approx(first, rel=1e-3)
    assert first > alone / 8  # a quotient of sums over 64 rows has no larger gradient than a mean


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has it")
def test_a_loss_that_contains_the_readout_is_the_readout_and_the_loss() -> None:
    """The readout has its factor: the loss of a new model is about that of equal logits."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 50, bias=False)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.linear_cross_entropy(F.relu(self.inner(x)), self.head.weight, y)

    torch.manual_seed(0)
    x, y = torch.randn(ROWS, WIDTH), torch.arange(ROWS) % 50
    net = unit_scale(Model())
    assert net(x, y).item() == pytest.approx(math.log(50), rel=0.1)
    check_true(unit_scale(Model().double()), lambda m: m(x.double(), y))
