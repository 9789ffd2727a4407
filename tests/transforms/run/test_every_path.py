"""One function and one set of gradients of a transformed model on every path: copied, loaded, in
evaluation, without gradients, frozen in part, under torch.func, recomputed, compiled."""

from __future__ import annotations

import copy
import functools
import pickle
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import unit_scaling as uu
from tests.transforms.gradients import check_slopes, check_true, gradients
from tests.transforms.models import Net
from unit_scaling.transforms import ModelPlan, simulate_fp8, unit_scale

WIDTH, VOCABULARY = 16, 12


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).transpose(1, 2)


def attention(m: nn.Module, x: Tensor) -> Tensor:
    """One head composed, one fused."""
    q, k, v = map(heads, m.first(x).chunk(3, -1))
    composed = (q[:, :1] @ k[:, :1].mT * 0.35).softmax(-1) @ v[:, :1]
    fused = F.scaled_dot_product_attention(q[:, 1:], k[:, 1:], v[:, 1:], is_causal=True)
    return x + m.last(torch.cat([composed, fused], 1).transpose(1, 2).flatten(2))


def linear_attention(m: nn.Module, x: Tensor) -> Tensor:
    q, k, v = m.first(x).chunk(3, -1)
    q, k = F.elu(q) + 1, F.elu(k) + 1
    return x + m.last(q @ (k.mT @ v) / (q @ k.sum(1, keepdim=True).mT))


def gated(m: nn.Module, x: Tensor) -> Tensor:
    gate, y, _ = m.first(x).chunk(3, -1)
    return x + m.last(F.silu(gate) * y)


def twice(m: nn.Module, x: Tensor) -> Tensor:
    return x + m.last(torch.tanh(m.last(x)) * m.first(x)[..., :WIDTH])


def in_place(m: nn.Module, x: Tensor) -> Tensor:
    y = m.first(x)[..., :WIDTH].relu_()
    y = m.last(y)
    y += x
    return y.mul_(0.5)


def filled(m: nn.Module, x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    a, b, c = m.first(x).chunk(3, -1)
    y[:, ::2], y[:, 1::2] = a[:, ::2], b[:, 1::2]
    mask = (torch.arange(x.shape[1]) % 3 == 0)[:, None]
    return x + m.last(torch.where(mask, y, c.masked_fill(mask, 0.0)))


def scanned(m: nn.Module, x: Tensor) -> Tensor:
    gate, y, _ = m.first(x).chunk(3, -1)
    state, states = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        a = gate[:, t].sigmoid()
        state = a * state + (1 - a) * y[:, t]
        states.append(state)
    return x + m.last(torch.stack(states, 1))


def experts(m: nn.Module, x: Tensor) -> Tensor:
    """Two slices of one weight, each for the tokens that choose it."""
    scores = m.last(x)[..., :2].softmax(-1)
    y = torch.zeros_like(x)
    for number, weight in enumerate(m.first.weight.chunk(3)[:2]):
        chosen = scores.argmax(-1) == number
        y[chosen] = F.linear(x[chosen], weight) * scores[chosen][:, number, None]
    return x + y


def dropped(m: nn.Module, x: Tensor) -> Tensor:
    return x + F.dropout(m.last(F.gelu(m.first(x)[..., :WIDTH])), 0.2, m.training)


def convolved(m: nn.Module, x: Tensor) -> Tensor:
    kernel = m.first.weight.unflatten(0, (WIDTH, 3)).mT
    return x + m.last(F.gelu(F.conv1d(x.mT, kernel, padding=1).mT))


PARTS: tuple[Callable[[nn.Module, Tensor], Tensor], ...] = (
    attention,
    linear_attention,
    gated,
    twice,
    in_place,
    filled,
    scanned,
    experts,
    dropped,
    convolved,
)


BREAKS = (scanned, experts)
"""The numbers of their calls depend on lengths and values: no graph has them in one piece."""


class Model(nn.Module):
    """Parts, recomputed or not, and a head that is tied or not, with the loss inside or outside."""

    def __init__(self, choose: random.Random, whole: bool) -> None:
        super().__init__()
        parts = [part for part in PARTS if not (whole and part in BREAKS)]
        self.chosen = [choose.choice(parts) for _ in range(1 if whole else choose.randint(1, 3))]
        self.parts = nn.ModuleList(
            Net(part, first=nn.Linear(WIDTH, 3 * WIDTH), last=nn.Linear(WIDTH, WIDTH))
            for part in self.chosen
        )
        self.embedding, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.recomputed = choose.random() < 0.3 and not whole
        self.result = choose.choice(["logits", "loss", "both", "written"])
        if choose.random() < 0.3:
            self.head.weight = self.embedding.weight
        if choose.random() < 0.3:
            nn.init.zeros_(self.parts[0].last.weight)

    @property
    def is_random(self) -> bool:
        return dropped in self.chosen

    def forward(self, tokens: Tensor) -> Tensor | dict[str, Tensor]:
        x = self.embedding(tokens[:, :-1])
        for part in self.parts:
            x = checkpoint(part, x, use_reentrant=False) if self.recomputed else part(x)
        logits = self.head(self.norm(x))
        if self.result == "written":
            logits.mul_(0.5)
        if self.result in ("logits", "written"):
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        return loss if self.result == "loss" else {"logits": logits, "loss": loss}


def batch(seed: int = 0, size: int = 2, length: int = 7) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (size, length), generator=draw)


def loss_of(model: Callable[[Tensor], object], tokens: Tensor | None = None) -> Tensor:
    tokens = batch() if tokens is None else tokens
    torch.manual_seed(0)
    result = model(tokens)
    if isinstance(result, dict):
        return result["loss"] + result["logits"].square().mean()
    assert isinstance(result, Tensor)
    if not result.dim():
        return result
    return F.cross_entropy(result.flatten(0, 1), tokens[:, 1:].flatten()) * 0.1


def loss_of_part(model: Model, number: int, x: Tensor) -> Tensor:
    torch.manual_seed(0)
    return model.parts[number](x).square().mean()


Run = Callable[[Tensor], object]
Found = tuple[Tensor, dict[str, Tensor]]


def found(model: nn.Module, run: Run | None = None, tokens: Tensor | None = None) -> Found:
    """The loss and all gradients."""
    return gradients(model, lambda m: loss_of(m if run is None else run, tokens))


def same(ours: Found, theirs: Found, rtol: float = 1e-9) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-10, atol=0)
    assert ours[1].keys() == theirs[1].keys()
    least = 1e-13 * max(
        wanted.norm() for wanted in theirs[1].values()
    )  # of gradients that are zero
    for name, wanted in theirs[1].items():
        assert (ours[1][name] - wanted).norm() <= rtol * wanted.norm() + least, name


def made(seed: int, whole: bool = False) -> tuple[Model, Model, dict[str, str]]:
    """A model, transformed and with a plan, the plain one, and options. whole: in one graph."""
    choose = random.Random(seed)
    torch.manual_seed(seed)
    plain = Model(choose, whole).double()
    options = {"init": choose.choice(["unit", "unit", "preserve"])}
    if options["init"] == "unit":
        options["residual"] = choose.choice(["fixed", "umup"])
    model = unit_scale(plain, **options)
    found(model)
    found(model)
    return model, plain, options


def evaluated(model: Model) -> Model:
    """At other lengths, and sizes of the batch, than in training."""
    model.eval()
    with torch.no_grad():
        loss_of(model, batch(1, 3, 15))
        loss_of(model, batch(1, 1, 15))
        if not model.is_random:
            expected = loss_of(copy.deepcopy(model).train())
            torch.testing.assert_close(loss_of(model), expected, rtol=1e-10, atol=0)
    return model.train()


def frozen(model: Model) -> Model:
    """For one step, in part."""
    for parameter in [*model.parameters()][::2]:
        parameter.requires_grad_(False)
    found(model)
    return model.requires_grad_(True)


def loaded(model: Model, plain: Model) -> Model:
    other = unit_scale(plain)
    other.load_state_dict(model.state_dict())
    return other


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(60))
def test_a_model(seed: int) -> None:
    model, plain, options = made(seed)
    expected = found(model)
    plan = ModelPlan.from_json(uu.plan(model).to_json())
    others = {
        "copied": copy.deepcopy(model),
        "pickled": pickle.loads(pickle.dumps(model)),
        "planned": unit_scale(plain, plan=plan),
        "evaluated": evaluated(copy.deepcopy(model)),
        "frozen": frozen(copy.deepcopy(model)),
    }
    if options["init"] == "unit":
        others["loaded"] = loaded(model, plain)
    else:
        same(found(plain), expected)
    for other in others.values():
        same(found(other), expected)
    hidden = torch.randn(2, 6, WIDTH, dtype=torch.float64)
    for number in range(len(model.parts)):
        alone = functools.partial(loss_of_part, number=number, x=hidden)
        check_true(copy.deepcopy(model), alone)
        for other in others.values():
            same(gradients(other, alone), gradients(copy.deepcopy(model), alone))
    first, second = found(model), found(model, tokens=batch(2, 3, 9))
    both = gradients(model, lambda m: loss_of(m) + loss_of(m, batch(2, 3, 9)))
    same(both, (first[0] + second[0], {n: g + second[1][n] for n, g in first[1].items()}))
    powers = check_true(model, loss_of)
    if not (model.is_random or experts in model.chosen):
        assert check_slopes(model, loss_of, rtol=1e-3).items() <= powers.items()
    if not model.recomputed:  # torch.func refuses checkpoints
        parameters = {n: model.get_parameter(n).detach() for n in expected[1]}
        functional = grad(lambda p: loss_of(lambda x: functional_call(model, p, (x,))))(parameters)
        same((expected[0], functional), expected)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(60))
def test_a_simulated_model(seed: int) -> None:
    """In any order, and copied."""
    model, plain, _ = made(seed)
    plan = ModelPlan.from_json(uu.plan(model).to_json())
    simulated = simulate_fp8(model)
    expected = found(simulated)
    for other in (unit_scale(simulate_fp8(plain), plan=plan), copy.deepcopy(simulated)):
        same(found(other), expected, rtol=1e-6)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("seed", range(20))
def test_a_compiled_model(seed: int) -> None:
    model, _, _ = made(seed, whole=True)
    expected = [found(model, tokens=tokens) for tokens in (None, batch(2, 3, 9))]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for tokens, wanted in zip((None, batch(2, 3, 9)), expected, strict=True):
        same(found(model, compiled, tokens), wanted)
