"""Small models of several kinds, each of which a problem of `benchmarks.problems` trains."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 64
CLASSES = 8
SIDE = 16  # of an image
FEATURES = 16  # of a row of a table
NOISES = 32  # of a diffusion


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


class MLP(nn.Module):
    """Four linear layers with residual connections; (logits, labels)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.enter(x)
        for layer in self.hidden:
            x = x + layer(F.gelu(x))
        return self.head(F.gelu(x)), labels


class GRU(nn.Module):
    """A recurrent cell written as two linear layers, step by step; (logits, labels)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.enter = nn.Linear(2, 3 * width)
        self.again = nn.Linear(width, 3 * width)
        self.between = nn.Linear(width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        given = self.enter(x)
        state = given.new_zeros(len(x), self.again.in_features)
        for now in given.unbind(1)[::2]:
            a, b, c = now.chunk(3, -1)
            d, e, f = self.again(state).chunk(3, -1)
            gate = torch.sigmoid(a + d)
            state = gate * state + (1 - gate) * torch.tanh(c + torch.sigmoid(b + e) * f)
        return self.head(F.gelu(self.between(state))), labels


class Convolutions(nn.Module):
    """Convolutions and pooling without norms, as in VGG; (logits, labels)."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 16, 32, 64)
        self.layers = nn.ModuleList(
            nn.Conv2d(a, b, 3, 1, 1) for a, b in itertools.pairwise(widths)
        )
        self.between = nn.Linear(64 * (SIDE // 8) ** 2, 64)
        self.head = nn.Linear(64, CLASSES)
        for layer in (*self.layers, self.between):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            x = F.max_pool2d(F.relu(layer(x)), 2)
        return self.head(F.relu(self.between(x.flatten(1)))), labels


class Denoiser(nn.Module):
    """An MLP with the level of noise as an input: the error of the noise that it finds."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.enter = nn.Linear(2 + NOISES, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor, level: Tensor, noise: Tensor) -> Tensor:
        x = self.enter(torch.cat([x, waves_of(level)], -1))
        for layer in self.hidden:
            x = x + layer(F.silu(x))
        return F.mse_loss(self.head(F.silu(x)), noise)


class UNet(nn.Module):
    """Convolutions down and up with a skip, shifted by the level of noise: the error of the noise
    that it finds."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.level = nn.Linear(NOISES, 2 * width)
        self.enter = nn.Conv2d(1, width, 3, 1, 1)
        self.down = nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.middle = nn.Conv2d(2 * width, 2 * width, 3, 1, 1)
        self.up = nn.Conv2d(3 * width, width, 3, 1, 1)
        self.head = nn.Conv2d(width, 1, 3, 1, 1)

    def forward(self, x: Tensor, level: Tensor, noise: Tensor) -> Tensor:
        high = F.silu(self.enter(x))
        low = self.down(high) + self.level(waves_of(level))[:, :, None, None]
        low = low + self.middle(F.silu(low))
        low = F.interpolate(F.silu(low), scale_factor=2)
        found = self.head(F.silu(self.up(torch.cat([high, low], 1))))
        return F.mse_loss(found, noise)


class DiT(nn.Module):
    """Transformer blocks on patches, modulated by the level of noise (adaLN of arXiv:2212.09748):
    the error of the noise that it finds."""

    PATCH = 4

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        size = self.PATCH**2
        self.positions = nn.Parameter(
            0.02 * torch.randn((SIDE // self.PATCH) ** 2, width)
        )
        self.enter, self.level = nn.Linear(size, width), nn.Linear(NOISES, width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulations = nn.ModuleList(
            nn.Linear(width, 6 * width) for _ in range(layers)
        )
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.mlp = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, size)

    def forward(self, x: Tensor, level: Tensor, noise: Tensor) -> Tensor:
        x = self.enter(self._patches(x)) + self.positions
        level = F.silu(self.level(waves_of(level)))[:, None]
        for modulation, qkv, out, mlp in zip(
            self.modulations, self.qkv, self.out, self.mlp, strict=True
        ):
            a, b, c, d, e, f = modulation(level).chunk(6, -1)
            q, k, v = (
                part.unflatten(-1, (4, -1)).transpose(1, 2)
                for part in qkv(self.norm(x) * (1 + a) + b).chunk(3, -1)
            )
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + c * out(mixed)
            x = x + f * mlp(self.norm(x) * (1 + d) + e)
        return F.mse_loss(self.head(self.norm(x)), self._patches(noise))

    def _patches(self, images: Tensor) -> Tensor:
        return F.unfold(images, self.PATCH, stride=self.PATCH).mT


def waves_of(level: Tensor) -> Tensor:
    """The Fourier features of a number in [0, 1], (..., NOISES)."""
    angles = level[..., None] * torch.logspace(0, 2, NOISES // 2)
    return torch.cat([angles.sin(), angles.cos()], -1)


class GraphAttention(nn.Module):
    """A layer of attention over a node's neighbours (GATv2, arXiv:2105.14491), twice."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.enter = nn.Linear(CLASSES, width)
        self.source = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.toward = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.score = nn.ModuleList(nn.Linear(width, 1) for _ in range(2))
        self.head = nn.Linear(width, CLASSES)

    def forward(
        self, features: Tensor, source: Tensor, to: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = self.enter(features)
        for left, right, score in zip(
            self.source, self.toward, self.score, strict=True
        ):
            said = left(x)[source]
            weight = score(F.leaky_relu(said + right(x)[to], 0.2)).tanh().exp()
            total = torch.zeros_like(x[:, :1]).index_add(0, to, weight)
            x = x + torch.zeros_like(x).index_add(0, to, weight * said) / (total + 1e-6)
        return self.head(F.silu(x)), labels
