"""Positions that agree: gradients of weights, averages, what many branches read."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from unit_scaling.transforms import unit_scale

BATCH, LENGTH, WIDTH, CLASSES = 16, 64, 64, 16


class Pooled(nn.Module):
    """Two layers at each position, and their mean over positions is classified."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head, self.activation = nn.Linear(WIDTH, CLASSES), getattr(F, activation)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.activation(self.second(self.activation(self.first(x))))
        return F.cross_entropy(self.head(x.mean(1)), y)


class Block(nn.Module):
    """Attention and a feed-forward part. memory: where the keys are from, if not from x."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.causal = causal

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        h = self.norm(x)
        keys = h if memory is None else memory
        q, k, v = (
            layer(t).unflatten(-1, (4, -1)).transpose(1, 2)
            for layer, t in ((self.q, h), (self.k, keys), (self.v, keys))
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=1 / 16)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """loss: of the mean over positions ("pooled"), of each position ("tokens"), or "ctc"."""

    def __init__(self, loss: str, causal: bool = False) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList()
        self.blocks.extend(Block(causal) for _ in range(2))
        self.norm, self.head, self.loss = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES), loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = F.gelu(self.embed(x))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if self.loss == "pooled":
            return F.cross_entropy(self.head(x.mean(1)), y[:, 0])
        logits = self.head(x)
        if self.loss == "tokens":
            return F.cross_entropy(logits.flatten(0, 1), y.flatten())
        lengths = torch.full((BATCH,), LENGTH), torch.full((BATCH,), 8)
        return F.ctc_loss(logits.log_softmax(-1).transpose(0, 1), y[:, :8] % 15 + 1, *lengths)


class Decoders(nn.Module):
    """Blocks that all read the same encoded sequence."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.encode, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks, self.head = nn.ModuleList(), nn.Linear(WIDTH, CLASSES)
        self.blocks.extend(Block() for _ in range(depth))

    def forward(self, memory: Tensor, x: Tensor, y: Tensor) -> Tensor:
        memory = self.norm(self.encode(memory))
        for block in self.blocks:
            x = block(x, memory)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


class Decoder(nn.Sequential):
    """The end of an autoencoder: pixels in a range, and their squared error."""

    def __init__(self) -> None:
        layers = nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 3, 3, padding=1)
        super().__init__(*layers)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(torch.tanh(self[1](F.relu(self[0](x)))), y)


def values() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH)


def labels(*shape: int) -> Tensor:
    return torch.randint(CLASSES, shape)


def gradients(model: nn.Module, batch: tuple[Tensor, ...]) -> dict[str, float]:
    """Path -> the RMS of the gradient of its weight for outputs with a gradient of RMS 1; queries
    and keys left out.
    """
    rows = uu.verify(model, batch).rows
    output = {r.path: r.rms for r in rows if r.tensor == "gradient of output"}
    weight = [r for r in rows if r.tensor == "gradient of weight" and r.kind == "gradient"]
    return {r.path: r.rms / output[r.path] for r in weight}


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "softplus"])
def test_weights_before_an_average_have_gradients_of_unit_scale(activation: str) -> None:
    """Positions of a sample have the same gradient: without a factor, sqrt(1 + 63/pi) = 4.6 for the
    second layer after a relu, and more after a softplus.
    """
    torch.manual_seed(0)
    model, batch = unit_scale(Pooled(activation)), (values(), labels(BATCH))
    model(*batch)
    found = gradients(model, batch)
    assert 0.4 < found["second"] < 2.5, found
    assert [row.path for row in uu.report(model) if "gradient of the weight" in row.why]


@pytest.mark.parametrize("loss", ["pooled", "ctc"])
def test_weights_of_attention_have_gradients_of_unit_scale(loss: str) -> None:
    """Without a factor those of values and outputs reach 3 to 11."""
    torch.manual_seed(0)
    found = gradients(unit_scale(Encoder(loss)), (values(), labels(BATCH, LENGTH)))
    assert len(found) >= 8
    assert all(1 / 4 <= rms <= 4 for rms in found.values()), found


def test_what_a_regression_asks_of_a_range_has_independent_gradients() -> None:
    """The gradient of tanh is smallest where it has most in common with its value: as one that
    agrees with it by a half, that of the weight would be divided by 8, for 1 to 2 that it grows by.
    """
    torch.manual_seed(0)
    model = unit_scale(Decoder())
    found = gradients(model, (torch.randn(8, 16, 16, 16), torch.randn(8, 3, 16, 16)))
    assert found["1"] > 0.5, found


@pytest.mark.parametrize("causal", [False, True])
def test_a_loss_of_each_position_agrees_as_its_output_does(causal: bool) -> None:
    """The errors of positions have the share in common that is of the output: in the last block."""
    torch.manual_seed(0)
    model, batch = unit_scale(Encoder("tokens", causal)), (values(), labels(BATCH, LENGTH))
    model(*batch)
    calls = {row.path for row in uu.report(model) if "gradient of the weight" in row.why}
    assert {f"blocks.1.{part}" for part in ("v", "o", "down")} == calls
    found = {
        r.path: r.rms for r in uu.verify(model, batch).rows if r.tensor == "gradient of weight"
    }
    assert all(1 / 2 < found[path] < 2 for path in found if path[-2:] not in (".q", ".k")), found


def test_the_gradients_keep_their_direction() -> None:
    """A chain of products and relus is what it was but for numbers, and so are its gradients."""
    torch.manual_seed(0)
    model, (x, y) = Pooled("relu").double(), (values().double(), labels(BATCH))
    for layer in (model.first, model.second, model.head):
        nn.init.zeros_(layer.bias)
        nn.init.normal_(layer.weight, std=1e-3)  # logits near 0, where the loss is linear in them
    ours = unit_scale(copy.deepcopy(model))
    ours.head.weight.data.mul_(1e-3)
    for each in (model, ours):
        each(x, y).backward()
    for name in ("first", "second"):
        a, b = (each.get_submodule(name).weight.grad.flatten() for each in (model, ours))
        assert F.cosine_similarity(a, b, dim=0) > 0.999


@pytest.mark.parametrize("size", [4, 32])
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "hardswish"])
def test_an_average_of_what_agrees(activation: str, size: int) -> None:
    """RMS 1 within sqrt(2) whatever the size of the window; independent, it would be 2 to 20."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 256, 1), nn.Linear(256, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = F.adaptive_avg_pool2d(getattr(F, activation)(self.conv(x)), 1)
            return self.head(x.flatten(1))

    torch.manual_seed(0)
    rows = uu.verify(unit_scale(Net()), torch.randn(8, 3, size, size)).rows
    (rms,) = (r.rms for r in rows if r.path == "head" and r.tensor == "input")
    assert 0.5 < rms < 1.6


@pytest.mark.parametrize("depth", [1, 6])
def test_what_many_branches_read_has_a_gradient_of_unit_scale(depth: int) -> None:
    """Without it, that of 6 blocks, each with keys and values, is 3 times as large."""
    torch.manual_seed(0)
    batch = values(), values(), labels(BATCH, LENGTH)
    rows = uu.verify(unit_scale(Decoders(depth)), batch).rows
    (rms,) = (r.rms for r in rows if r.path == "encode" and r.tensor == "gradient of output")
    assert 0.4 < rms < 1.6
