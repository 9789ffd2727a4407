"""Gradients that are collected: of gates, shifts, nodes of graphs, values of many queries."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from unit_scaling.transforms import plan, unit_scale

BATCH, WIDTH, SIZE, CLASSES = 16, 32, 8, 8


def image(batch: int = BATCH) -> Tensor:
    return torch.randn(batch, 3, SIZE, SIZE)


def labels(count: int = BATCH) -> Tensor:
    return torch.arange(count) % CLASSES


class Gated(nn.Module):
    """Squeeze and excitation, in place or not; the average keeps its dimensions or not."""

    def __init__(self, keepdim: bool = False, inplace: bool = False) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, WIDTH, 3, padding=1), nn.BatchNorm2d(WIDTH)
        self.squeeze, self.excite = nn.Conv2d(WIDTH, 16, 1), nn.Conv2d(16, WIDTH, 1)
        self.project, self.head = nn.Conv2d(WIDTH, WIDTH, 1), nn.Linear(WIDTH, CLASSES)
        self.keepdim, self.inplace = keepdim, inplace

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.silu(self.norm(self.stem(x)))
        pooled = x.mean((2, 3), keepdim=True) if self.keepdim else F.adaptive_avg_pool2d(x, 1)
        gate = self.excite(F.relu(self.squeeze(pooled))).sigmoid()
        if self.inplace:
            x = x.clone()
            x *= gate
        else:
            x = x * gate
        return F.cross_entropy(self.head(self.project(x).mean((2, 3))), y)

    @staticmethod
    def batch() -> tuple[Tensor, ...]:
        return image(), labels()


class Timed(nn.Module):
    """Residual blocks of a U-Net: an embedding of the time is added to all positions."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.stem = nn.Linear(16, WIDTH), nn.Conv2d(3, WIDTH, 3, padding=1)
        self.times = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.first = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.second = nn.ModuleList(nn.Conv2d(WIDTH, WIDTH, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.GroupNorm(4, WIDTH) for _ in range(4))
        self.head = nn.Conv2d(WIDTH, 3, 3, padding=1)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        t, x, norms = F.silu(self.time(t)), self.stem(x), iter(self.norms)
        for time, first, second in zip(self.times, self.first, self.second, strict=True):
            h = first(F.silu(next(norms)(x))) + time(t)[:, :, None, None]
            x = x + second(F.silu(next(norms)(h)))
        return F.mse_loss(self.head(x), y)

    @staticmethod
    def batch() -> tuple[Tensor, ...]:
        return image(), torch.randn(BATCH, 16), image()


class Modulated(nn.Module):
    """Blocks of a diffusion transformer: a layer's shifts, scales and gates come from a class."""

    def __init__(self, depth: int = 1, width: int = 64) -> None:
        super().__init__()
        self.inp, self.out = nn.Linear(12, width), nn.Linear(width, 12)
        self.embed, self.time = nn.Embedding(CLASSES, width), nn.Linear(16, width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        sizes = {"ada": 6 * width, "qkv": 3 * width, "o": width, "up": 4 * width}
        for name, size in sizes.items():
            setattr(self, name, nn.ModuleList(nn.Linear(width, size) for _ in range(depth)))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.last = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, t: Tensor, c: Tensor, y: Tensor) -> Tensor:
        x, c = self.inp(x), self.time(t) + self.embed(c)
        for ada, qkv, o, up, down in zip(
            self.ada, self.qkv, self.o, self.up, self.down, strict=True
        ):
            a, b, g, a2, b2, g2 = (p[:, None] for p in ada(F.silu(c)).chunk(6, -1))
            h = self.norm(x) * (1 + a) + b
            q, k, v = (p.unflatten(-1, (4, -1)).transpose(1, 2) for p in qkv(h).chunk(3, -1))
            x = x + g * o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + g2 * down(F.gelu(up(self.norm(x) * (1 + a2) + b2)))
        a, b = (p[:, None] for p in self.last(F.silu(c)).chunk(2, -1))
        return F.mse_loss(self.out(self.norm(x) * (1 + a) + b), y)

    @staticmethod
    def batch() -> tuple[Tensor, ...]:
        x = torch.randn(2 * BATCH, 64, 12)
        return x, torch.randn(2 * BATCH, 16), labels(2 * BATCH), x.roll(1, -1)


class Messages(nn.Module):
    """A graph whose nodes have 8 neighbours on average; each sends a message."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.inp, self.head = nn.Linear(8, 64), nn.Linear(64, CLASSES)
        self.message = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.itself = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.form = form

    def forward(self, x: Tensor, source: Tensor, to: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.inp(x))
        for message, itself in zip(self.message, self.itself, strict=True):
            sums = gathered(self.form, torch.zeros_like(h), to, message(h[source]))
            h = torch.tanh(itself(h) + sums)
        return F.cross_entropy(self.head(h), y)

    @staticmethod
    def batch() -> tuple[Tensor, ...]:
        return torch.randn(200, 8), *torch.randint(200, (2, 1600)), labels(200)


class Strided(nn.Module):
    """Attention to an average over each 8 positions, and a mean over all: 64 queries, 8 keys."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.norm, self.head = nn.Linear(12, 64), nn.LayerNorm(64), nn.Linear(64, CLASSES)
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inp(x)
        h = self.norm(x)
        few = F.avg_pool1d(h.transpose(1, 2), 8).transpose(1, 2)
        parts = self.q(h), self.k(few), self.v(few)
        q, k, v = (p.unflatten(-1, (4, -1)).transpose(1, 2) for p in parts)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return F.cross_entropy(self.head(x.mean(1)), y)

    @staticmethod
    def batch() -> tuple[Tensor, ...]:
        return torch.randn(BATCH, 64, 12), labels()


class Points(nn.Module):
    """PointNet: each point is turned by a matrix that the largest features of all points give."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.hidden, self.turn = nn.Linear(3, 16), nn.Linear(64, 32), nn.Linear(32, 256)
        self.up, self.up2 = nn.Linear(16, 64), nn.Linear(16, 64)
        self.norm, self.norm2 = nn.BatchNorm1d(32), nn.BatchNorm1d(64)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.relu(self.inp(x))
        most = F.relu(self.up(x)).amax(1)
        turn = self.turn(F.relu(self.norm(self.hidden(most)))).view(-1, 16, 16)
        return F.cross_entropy(self.head(self.norm2(F.relu(self.up2(x @ turn)).amax(1))), y)

    @staticmethod
    def batch() -> tuple[Tensor, ...]:
        return torch.randn(BATCH, 64, 3), labels()


def gathered(form: str, zeros: Tensor, to: Tensor, rows: Tensor) -> Tensor:
    if form == "index_add":
        return zeros.index_add(0, to, rows)
    if form == "index_add_":
        zeros.index_add_(0, to, rows)
        return zeros
    places = to[:, None].expand_as(rows)
    if form == "scatter_add_":
        return zeros.scatter_add_(0, places, rows)
    return zeros.scatter_reduce(0, places, rows, form, include_self=False)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gated": Gated,
    "gated, keepdim": lambda: Gated(keepdim=True),
    "gated, in place": lambda: Gated(inplace=True),
    "timed": Timed,
    "modulated": Modulated,
    "messages": lambda: Messages("index_add"),
    "strided": Strided,
    "points": Points,
}


def build(name: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = MODELS[name]()
    batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in model.batch())
    return unit_scale(model.to(dtype)), batch


@pytest.mark.parametrize("name", MODELS)
def test_gradients_have_unit_scale(name: str) -> None:
    """85 % of them, as `uu.verify` counts; without gauges 31 % to 69 % (the messages: all)."""
    model, batch = build(name)
    model(*batch)
    found = uu.verify(model, batch)
    assert found.share("gradient") >= 0.85, found
    assert any("collected" in row.why for row in uu.report(model))


def test_a_maximum_hands_on_the_share_of_one() -> None:
    """The gradient of 1 in 64 points is taken for that: as one of all, 0.27 would be left of it."""
    model, batch = build("points")
    rows = {(r.path, r.tensor): r.rms for r in uu.verify(model, batch).rows}
    assert all(rows[path, "gradient of output"] > 0.5 for path in ("inp", "up", "hidden")), rows


def gradients(name: str) -> tuple[Tensor, dict[str, Tensor]]:
    model, batch = build(name, torch.float64)
    (x, *rest) = batch
    x.requires_grad_()
    loss = model(x, *rest)
    loss.backward()
    assert x.grad is not None
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss, {"the input": x.grad, **found}


@pytest.mark.parametrize("name", MODELS)
def test_a_gauge_changes_no_gradient_but_those_inside(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those are a power of 2 as large, to the last bit of float64: no sum has terms of another
    gauge.
    """
    loss, ours = gradients(name)
    monkeypatch.setattr(plan, "fixed_calls", lambda flow, *_: set(range(len(flow.nodes))))
    same, plain = gradients(name)
    assert torch.equal(loss, same)
    ratios = {}
    for key, grad in plain.items():
        ratio = (ours[key] * grad).sum() / grad.square().sum()
        ratios[key] = 2.0 ** round(math.log2(ratio.item()))
        torch.testing.assert_close(ours[key], ratios[key] * grad, rtol=0, atol=0)
    assert ratios["the input"] == 1
    assert len(set(ratios.values())) > 1


@pytest.mark.parametrize("form", ["index_add", "index_add_", "scatter_add_", "sum", "mean"])
def test_rows_that_are_summed_have_unit_scale(form: str) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: Tensor, to: Tensor) -> Tensor:
            return self.layer(gathered(form, x.new_zeros(100, 64), to, x))

    torch.manual_seed(0)
    model = unit_scale(Net())
    x = torch.randn(1600, 64, requires_grad=True)
    batch = x, torch.randint(100, (1600,))
    rows = uu.verify(model, batch).rows
    (rms,) = (r.rms for r in rows if r.tensor == "input")
    assert 0.9 < rms < 1.1
    assert not any(row.left_alone for row in uu.report(model))


def test_rows_that_are_added_to_values_are_left_alone() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor, to: Tensor) -> Tensor:
            values = self.a(x).index_add(0, to, self.b(x))
            return self.c(values.scatter_reduce(0, to[:, None].expand_as(x), self.b(x), "amax"))

    model = unit_scale(Net())
    model(torch.randn(4, 8), torch.arange(4)).sum().backward()
    assert [row.call for row in uu.report(model) if row.left_alone] == [
        "index_add",
        "scatter_reduce",
    ]


@pytest.mark.parametrize(("layers", "expected"), [(1, 1.0), (2, 1 / SIZE)])
def test_a_mean_that_keeps_its_dimensions(layers: int, expected: float) -> None:
    """It is a value where products alone read it, a statistic where it meets other values."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = nn.Conv2d(3, 64, 1), nn.Conv2d(3, 64, 1)

        def forward(self, x: Tensor) -> Tensor:
            pooled = x.mean((2, 3), keepdim=True)
            y = self.layer(pooled)
            return y + self.other(x - pooled.abs()) if layers == 2 else y

    torch.manual_seed(0)
    rows = uu.verify(unit_scale(Net()), (image(128),)).rows
    rms = next(r.rms for r in rows if r.path == "layer" and r.tensor == "input")
    assert 0.8 < rms / expected < 1.25


def test_a_call_that_has_no_place_for_a_factor() -> None:
    """A gate that a function beyond the table of kinds reads, which no plan can scale."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.gate = nn.Linear(8, 64), nn.Linear(64, 64)
            self.head = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            gate = torch.cumprod(self.gate(x.mean(1)), -1)
            return self.head(x * gate[:, None])

    torch.manual_seed(0)
    model, x = unit_scale(Net()), torch.randn(8, 64, 8)
    model(x).square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_preserve_has_no_gauges() -> None:
    torch.manual_seed(0)
    model = unit_scale(Gated(), init="preserve")
    model(*Gated.batch())
    assert not any("collected" in row.why for row in uu.report(model))


def test_a_gauge_is_compiled() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.gate, self.head = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.head(x * self.gate(x.mean(1))[:, None])

    torch.manual_seed(0)
    model, x, y = unit_scale(Net()), torch.randn(4, 64, 8), torch.randn(4, 64, 8)
    found = []
    for forward in (model, torch.compile(model, backend="eager", fullgraph=True)):
        model.zero_grad()
        forward(x).backward(y)
        found.append([p.grad for p in model.parameters()])
    assert any("collected" in row.why for row in uu.report(model))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_a_gate_may_be_computed_in_place() -> None:
    """MobileNetV3's: what is scaled on the way back is no tensor to write into."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Conv2d(8, 64, 1), nn.Conv2d(64, 8, 1)
            self.gate, self.out = nn.Linear(64, 8), nn.Linear(8, 64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.up(x)
            y = y * (F.relu6(y + 3, inplace=True) / 6)
            gate = self.out(F.relu(self.gate(y.mean((2, 3))), inplace=True))
            y = y * (F.relu6(gate + 3, inplace=True) / 6)[:, :, None, None]
            return self.down(F.relu(y, inplace=True))

    model = unit_scale(Gated())
    model(torch.randn(2, 8, 8, 8)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
