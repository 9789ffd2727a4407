"""A state that a loop carries is computed as the model computes it, whatever the loop's length."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from tests.transforms.gradients import exponent
from unit_scaling.transforms import unit_scale

BATCH, LENGTH, WIDTH = 4, 12, 8
Loop = Callable[..., Tensor]


def ema(decay: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, states = torch.zeros_like(k[:, 0]), []
    for t in range(k.shape[1]):
        state = 0.9 * state + 0.1 * v[:, t]
        states.append(state)
    return torch.stack(states, 1)


def in_place(decay: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, result = torch.zeros_like(k[:, 0]), torch.zeros_like(v)
    for t in range(k.shape[1]):
        state.mul_(0.9).add_(v[:, t])
        result[:, t] = state
    return result


def interpolated(decay: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, states = v[:, 0], []
    for t in range(k.shape[1]):
        state = state.lerp(v[:, t], 0.1)
        states.append(state)
    return torch.stack(states, 1)


def learned(decay: Tensor, k: Tensor, v: Tensor) -> Tensor:
    state, states = torch.zeros_like(k[:, 0]), []
    for t in range(k.shape[1]):
        state = state * decay + v[:, t]
        states.append(state)
    return torch.stack(states, 1)


def computed(decay: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return learned(torch.exp(-torch.exp(decay)), k, v)


def gated(decay: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """minGRU: the gate is made before the loop."""
    z = torch.sigmoid(k)
    state, states = torch.zeros_like(k[:, 0]), []
    for t in range(k.shape[1]):
        state = (1 - z[:, t]) * state + z[:, t] * v[:, t]
        states.append(state)
    return torch.stack(states, 1)


def mamba(decay: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The selective scan, discretised before the loop, for a state of one number a channel."""
    step = F.softplus(k)
    gates = torch.exp(-torch.exp(decay) * step)
    return _scan(gates, v)


def _scan(gates: Tensor, values: Tensor) -> Tensor:
    state, states = torch.zeros_like(values[:, 0]), []
    for t in range(values.shape[1]):
        state = gates[:, t] * state + values[:, t]
        states.append(state)
    return torch.stack(states, dim=1)


def rwkv(decay: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """wkv with its running maximum, for the exponentials not to overflow."""
    result = torch.zeros_like(v)
    above, below, most = (torch.zeros_like(k[:, 0]) for _ in range(3))
    most = most - 1e38
    slope = -torch.exp(decay)
    for t in range(k.shape[1]):
        top = torch.maximum(most, k[:, t] + decay)
        old, new = torch.exp(most - top), torch.exp(k[:, t] + decay - top)
        result[:, t] = (old * above + new * v[:, t]) / (old * below + new)
        top = torch.maximum(most + slope, k[:, t])
        old, new = torch.exp(most + slope - top), torch.exp(k[:, t] - top)
        above, below, most = old * above + new * v[:, t], old * below + new, top
    return result


def delta_rule(decay: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A matrix that forgets what it held for a key; keys of length 1."""
    k = k * torch.rsqrt(k.square().sum(-1, keepdim=True))
    state, results = torch.zeros(len(k), WIDTH, WIDTH), []
    for t in range(k.shape[1]):
        key = k[:, t].unsqueeze(-1)
        held = (state * key).sum(-2)
        state = state + key * (v[:, t] - held).unsqueeze(-2)
        results.append(state[:, 0])
    return torch.stack(results, 1)


LOOPS: dict[str, Loop] = {
    f.__name__: f
    for f in (ema, in_place, interpolated, learned, computed, gated, mamba, rwkv, delta_rule)
}


class Layer(nn.Module):
    """Keys and values by linear layers, then a loop over positions."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.key, self.value = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.decay = nn.Parameter(torch.linspace(0.1, 0.9, WIDTH))
        self.loop = loop

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        k, v = self.key(x), self.value(x)
        y = self.loop(self.decay, k, v)
        return k, v, y, self.out(y)


def unit(loop: Loop) -> tuple[Layer, Tensor]:
    """(a scaled layer, its decays as they were)."""
    torch.manual_seed(0)
    plain = Layer(loop)
    return unit_scale(plain), plain.decay.detach()


@pytest.mark.parametrize("name", LOOPS)
def test_the_states_are_those_of_the_loop(name: str) -> None:
    """Times one power of two, and up to rounding, which 12 passes of a few operations each add
    up."""
    model, decay = unit(LOOPS[name])
    factors = set()
    for length in (LENGTH, 1, 2 * LENGTH):
        k, v, y, _ = model(torch.randn(BATCH, length, WIDTH))
        assert k.std() > 0.5
        factors.add(exponent(y.double(), LOOPS[name](decay, k, v).double(), 1e-5))
    assert len(factors) == 1


@pytest.mark.parametrize("name", LOOPS)
def test_the_report_names_the_loop(name: str) -> None:
    """One row, or one for each pass where each has a result of its own."""
    model, _ = unit(LOOPS[name])
    model(torch.randn(BATCH, LENGTH, WIDTH))
    rows = [row for row in uu.report(model) if "value carried by a loop" in row.why]
    assert len(rows) == (LENGTH if name == "rwkv" else 1)
    assert {row.done for row in rows} <= {"scaled", "unchanged"}
    unit_scale(Layer(LOOPS[name]), strict=True)(torch.randn(BATCH, LENGTH, WIDTH))


def test_gradients_are_those_of_the_loop() -> None:
    """Times a power of two: no product is in the loop."""
    model, decay = unit(gated)
    made: list[Tensor] = []
    for layer in (model.key, model.value):
        layer.register_forward_hook(lambda module, args, y: made.append(y))
    x = torch.randn(BATCH, LENGTH, WIDTH)
    model(x)
    made.clear()
    *_, y, _ = model(x)
    seed = torch.randn_like(y)
    ours = torch.autograd.grad(y, made, seed)
    leaves = [t.detach().requires_grad_() for t in made]
    theirs = torch.autograd.grad(gated(decay, *leaves), leaves, seed)
    powers = {exponent(a.double(), b.double(), 1e-5) for a, b in zip(ours, theirs, strict=True)}
    assert len(powers) == 1


def test_a_copy_knows_the_loop_for_one_position() -> None:
    model, decay = unit(gated)
    model(torch.randn(BATCH, LENGTH, WIDTH))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        k, v, y, _ = twin.eval()(torch.randn(BATCH, 1, WIDTH))
        exponent(y.double(), gated(decay, k, v).double(), 1e-5)


class Cell(nn.Module):
    """A recurrent cell: products in the loop."""

    def __init__(self) -> None:
        super().__init__()
        self.input, self.hidden = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros_like(x[:, 0])
        for t in range(x.shape[1]):
            h = torch.tanh(self.input(x[:, t]) + self.hidden(h))
        return self.head(h)


class Shared(nn.Module):
    """A layer that is its own successor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = x + F.gelu(self.layer(x))
        return self.head(x)


class Filled(nn.Module):
    """A result that is written part by part carries nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y, joined = torch.zeros_like(x), self.layer(x[:, :1])
        for t in range(x.shape[1]):
            y[:, t] = F.gelu(self.layer(x[:, t]))
            joined = torch.cat([joined, F.gelu(self.layer(x[:, t : t + 1]))], 1)
        return self.head(y + joined[:, 1:])


@pytest.mark.parametrize("module", [Cell, Shared, Filled])
def test_a_loop_around_products_is_scaled(module: type[nn.Module]) -> None:
    model = unit_scale(module())
    model(torch.randn(BATCH, 3, WIDTH))
    rows = uu.report(model)
    assert not any(row.left_alone for row in rows)
    kinds = {"add": 3, "tanh": 3} if module is Cell else {"add": 3, "gelu": 3}
    kinds = {"gelu": 6} if module is Filled else kinds
    for kind, count in kinds.items():
        calls = [row for row in rows if row.call in (kind, f"__{kind}__") and row.done == "scaled"]
        assert len(calls) == count


class Heads(nn.Module):
    """The sum of independent terms, in a loop or by `sum`."""

    def __init__(self, count: int, loop: bool) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(count))
        self.out = nn.Linear(256, 256)
        self.loop = loop

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if not self.loop:
            total = sum(head(x) for head in self.heads)
            return total, self.out(total)
        total = torch.zeros_like(x)
        for head in self.heads:
            total = total + head(x)
        return total, self.out(total)


@pytest.mark.parametrize("loop", [True, False])
def test_the_terms_of_a_running_sum_have_one_weight(loop: bool) -> None:
    """It stays the sum of its terms."""
    torch.manual_seed(0)
    model = unit_scale(Heads(8, loop))
    x = torch.randn(256, 256)
    y, _ = model(x)
    assert y.square().mean().sqrt().item() == pytest.approx(8**0.5, rel=0.05)
    (row,) = [row for row in uu.report(model) if "carried" in row.why]
    assert row.done == "unchanged"
    y.sum().backward()
    first, *others = [head.weight.grad for head in model.heads]
    for other in others:
        torch.testing.assert_close(first, other)


class Losses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return sum(F.cross_entropy(head(x), y) for head in self.heads)


def test_a_sum_of_losses_stays_their_sum() -> None:
    torch.manual_seed(0)
    model = unit_scale(Losses())
    x, y = torch.randn(BATCH, WIDTH), torch.randint(3, (BATCH,))
    parts = []
    for head in model.heads:
        head.register_forward_hook(lambda _, __, out: parts.append(F.cross_entropy(out, y)))
    loss = model(x, y)
    torch.testing.assert_close(loss, sum(parts[-4:]))


def partial(decay: Tensor, k: Tensor, v: Tensor) -> Tensor:
    total, totals = v[:, 0], []
    for t in range(1, k.shape[1]):
        total = total + v[:, t]
        totals.append(total)
    return torch.stack(totals, 1)


def scattered(decay: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As mixtures of experts add up: each writes into some of the rows."""
    total = torch.zeros_like(v)
    for t in range(k.shape[1]):
        total[:, t:] += v[:, : k.shape[1] - t]
    return total


@pytest.mark.parametrize("loop", [partial, scattered])
def test_the_terms_of_a_running_sum_in_parts_keep_their_weights(loop: Loop) -> None:
    model, decay = unit(loop)
    k, v, y, _ = model(torch.randn(BATCH, LENGTH, WIDTH))
    torch.testing.assert_close(y, loop(decay, k, v), rtol=1e-5, atol=1e-5)
    (row,) = [row for row in uu.report(model) if "carried" in row.why]
    assert row.done == "unchanged"
