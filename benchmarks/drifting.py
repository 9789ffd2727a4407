"""Small models of several kinds, and endless batches for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BATCH = 16
WIDTH = 64
CLASSES = 8
SIDE = 16  # of an image
NODES, EDGES = 256, 1024  # of a graph

Batch = tuple[Tensor, ...]


class LSTM(nn.Module):
    """Two recurrent layers between an embedding and a readout; returns the loss."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, WIDTH)
        self.lower = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.between = nn.Linear(WIDTH, WIDTH)
        self.upper = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, vocab)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x, _ = self.lower(self.tokens(idx))
        x, _ = self.upper(F.gelu(self.between(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


class Residual(nn.Module):
    """Two convolutions with batch norms beside a skip, as in ResNet."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, out, 3, out // width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.second = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.skip = (
            nn.Identity() if out == width else nn.Conv2d(width, out, 1, 2, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.first(x)))
        return F.relu(self.skip(x) + self.norm2(self.second(y)))


class ResNet(nn.Module):
    """Images to (logits, labels)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, 1, 1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(
            Residual(16, 16), Residual(16, 32), Residual(32, 64)
        )
        self.head = nn.Linear(64, CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.blocks(F.relu(self.norm(self.stem(images))))
        return self.head(x.mean((2, 3))), labels


class Messages(nn.Module):
    """The mean of what a node's neighbours say, added to the node."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.say = nn.Linear(2 * width, width)
        self.hear = nn.Linear(width, width)

    def forward(self, x: Tensor, source: Tensor, to: Tensor) -> Tensor:
        y = self.norm(x)
        said = F.silu(self.say(torch.cat([y[source], y[to]], -1)))
        count = torch.ones_like(x[:, :1]).index_add(0, to, torch.ones_like(said[:, :1]))
        heard = torch.zeros_like(x).index_add(0, to, said) / count
        return x + self.hear(heard)


class GraphNetwork(nn.Module):
    """Features and edges to (logits, labels) of nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(CLASSES, WIDTH)
        self.layers = nn.ModuleList(Messages(WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(
        self, features: Tensor, source: Tensor, to: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = self.enter(features)
        for layer in self.layers:
            x = layer(x, source, to)
        return self.head(F.silu(x)), labels


def gratings(step: int) -> Batch:
    """Noisy images of waves; the class is the direction."""
    generator = torch.Generator().manual_seed(step)
    labels = torch.randint(CLASSES, (4 * BATCH,), generator=generator)
    angles = labels * torch.pi / CLASSES
    frequency, phase = torch.rand(2, 4 * BATCH, 1, 1, generator=generator)
    at = torch.arange(SIDE, dtype=torch.float32)
    along = at * angles.cos()[:, None, None] + at[:, None] * angles.sin()[:, None, None]
    waves = torch.sin(along * (0.5 + frequency) + 2 * torch.pi * phase)
    noise = torch.randn(waves.shape, generator=generator)
    return (waves + 2 * noise)[:, None], labels


def graph(step: int) -> Batch:
    """A random graph; the class of a node is the largest feature of it and its neighbours, summed
    and passed on twice."""
    generator = torch.Generator().manual_seed(step)
    features = torch.randn(NODES, CLASSES, generator=generator)
    source, to = torch.randint(NODES, (2, EDGES), generator=generator)
    summed = features
    for _ in range(2):
        summed = summed + torch.zeros_like(summed).index_add(0, to, summed[source])
    return features, source, to, summed.argmax(-1)
