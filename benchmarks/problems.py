"""What `benchmarks.preflight` trains: twenty small models of five kinds, each with a task that it
learns in a hundred steps."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import drifting
from benchmarks.architectures import VOCABULARY, ZOO
from fp8.lab.preflight.demo import SOURCES, text_batches
from fp8.lab.preflight.training import Setup

__all__ = ["PROBLEMS", "Problem", "text"]

BATCH, LENGTH = 8, 32
IMAGES, SIDE = 32, 16
FEATURES = 16  # of a row of a table
MASKED = 0.15  # of the tokens: BERT (arXiv:1810.04805), section 3.1
MASK = 1  # a byte that no text has
NOISES = 32  # of a diffusion
APART = 1_000_003
"""Between the batches of seeds, which are numbered."""


@dataclass(frozen=True)
class Problem:
    """A model and its task. build: makes the model. batch: number -> batch, the same whenever
    asked. library: whose code the model is. lr: of AdamW, by default 2e-3."""

    name: str
    kind: str
    library: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any], Tensor] | None = None
    lr: float = 2e-3

    def __call__(self, seed: int) -> Setup:
        """The setup of a seed: its own weights, and endless batches."""
        model = self.build()
        batches = map(self.batch, itertools.count(1 + APART * seed))
        return Setup(
            model, batches, self.loss, torch.optim.AdamW(model.parameters(), lr=self.lr)
        )


# Batches


@cache
def text() -> bytes:
    """The source of some of Python's standard library, in VOCABULARY symbols."""
    text = "".join(inspect.getsource(import_module(name)) for name in SOURCES).encode()
    return bytes(min(byte, VOCABULARY - 1) for byte in text)


def _windows(number: int, length: int, rows: int = BATCH) -> Tensor:
    """Windows of the text, (rows, length)."""
    return text_batches(text(), rows, length - 1, 1, number)[0]


def read(number: int) -> dict[str, Tensor]:
    """Text to continue, for a model that shifts its labels."""
    ids = _windows(number, LENGTH)
    return {"input_ids": ids, "labels": ids}


def masked(number: int, rows: int = BATCH) -> dict[str, Tensor]:
    """Text of which some letters are masked and asked for."""
    ids = _windows(number, LENGTH, rows)
    hidden = torch.rand(ids.shape, generator=_generator(number)) < MASKED
    return {
        "input_ids": ids.masked_fill(hidden, MASK),
        "labels": ids.masked_fill(~hidden, -100),
    }


def answered(number: int) -> dict[str, Tensor]:
    """Text, and what follows it."""
    ids = _windows(number, 2 * LENGTH)
    return {"input_ids": ids[:, :LENGTH], "labels": ids[:, LENGTH:].contiguous()}


def followed(number: int) -> tuple[Tensor, Tensor]:
    """Text, and at each letter the next."""
    ids = _windows(number, LENGTH + 1)
    return ids[:, :-1], ids[:, 1:]


def gratings(number: int) -> tuple[Tensor, Tensor]:
    """Noisy images of waves; the class is the direction."""
    generator = _generator(number)
    labels = torch.randint(drifting.CLASSES, (IMAGES,), generator=generator)
    angles = labels * torch.pi / drifting.CLASSES
    phase = torch.rand(IMAGES, 1, 1, generator=generator)
    at = torch.arange(SIDE, dtype=torch.float32)
    along = at * angles.cos()[:, None, None] + at[:, None] * angles.sin()[:, None, None]
    waves = torch.sin(along + 2 * torch.pi * phase)
    return (waves + 1.5 * torch.randn(waves.shape, generator=generator))[
        :, None
    ], labels


def seen(number: int) -> dict[str, Tensor]:
    """The waves by name."""
    images, labels = gratings(number)
    return {"pixel_values": images, "labels": labels}


def tabled(number: int) -> tuple[Tensor, Tensor]:
    """Rows of a table with columns of different sizes, labelled by a fixed random network."""
    x = torch.randn(128, FEATURES, generator=_generator(number))
    fixed = _generator(0)
    first = torch.randn(FEATURES, 32, generator=fixed) / FEATURES**0.5
    second = torch.randn(32, drifting.CLASSES, generator=fixed)
    sizes = torch.logspace(-1, 1, FEATURES)
    return x * sizes, (torch.tanh(2 * x @ first) @ second).argmax(-1)


def series(number: int) -> tuple[Tensor, Tensor]:
    """Noisy waves in time, two channels; the class is the frequency."""
    generator = _generator(number)
    labels = torch.randint(drifting.CLASSES, (IMAGES,), generator=generator)
    phase, noise = (torch.rand(IMAGES, 1, 2, generator=generator) for _ in range(2))
    angle = torch.arange(LENGTH)[:, None] * (0.2 + 0.2 * labels[:, None, None])
    waves = torch.sin(angle + 6.28 * phase)
    return waves + noise * torch.randn(waves.shape, generator=generator), labels


def forecast(number: int) -> dict[str, Tensor]:
    """Waves in time, and what follows."""
    waves, _ = series(number)
    return {"past_values": waves[:, :24], "future_values": waves[:, 24:]}


def diffused(number: int, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy data, the level of noise, and the noise: a ring in two dimensions, or waves."""
    generator = _generator(number)
    if len(shape) == 1:
        angle = 6.28 * torch.rand(256, generator=generator)
        data = torch.stack([angle.cos(), angle.sin()], -1)
    else:
        data = gratings(number)[0]
    level = torch.rand(len(data), generator=generator)
    noise = torch.randn(data.shape, generator=generator)
    mix = level.reshape(-1, *[1] * (data.dim() - 1)) * torch.pi / 2
    return mix.cos() * data + mix.sin() * noise, level, noise


def _generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def cross_entropy(output: tuple[Tensor, Tensor]) -> Tensor:
    """Of (logits, labels)."""
    return F.cross_entropy(*output)


# Models


def zoo(name: str, **settings: Any) -> nn.Module:
    """A model of the transformers library, in the configuration of `benchmarks.zoo` but for
    ``settings``, without dropout."""
    transformers = import_module("transformers")
    entry = ZOO[name]
    return _configured(
        getattr(transformers, entry.model), **{**entry.settings, **settings}
    )


def _configured(cls: Any, **settings: Any) -> nn.Module:
    config = cls.config_class(**settings)
    for key, value in config.to_dict().items():
        if isinstance(value, float) and ("drop" in key or "pdrop" in key):
            setattr(config, key, 0.0)
    return cls(config)


VIEW = {
    "image_size": SIDE,
    "num_channels": 1,
    "patch_size": 4,
    "num_labels": drifting.CLASSES,
}

SMALL_RESNET: dict[str, Any] = {
    "hidden_sizes": [32, 64],
    "depths": [2, 1],
    "layer_type": "basic",
}


def mixer() -> nn.Module:
    """A mixer of patches of series."""
    cls = import_module("transformers").PatchTSMixerForPrediction
    return _configured(
        cls,
        context_length=24,
        prediction_length=8,
        patch_length=4,
        patch_stride=4,
        num_input_channels=2,
        d_model=32,
        num_layers=3,
    )


class MLP(nn.Module):
    """Four linear layers with residual connections; (logits, labels)."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.enter = nn.Linear(FEATURES, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, drifting.CLASSES)

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
        self.head = nn.Linear(width, drifting.CLASSES)

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
        self.head = nn.Linear(64, drifting.CLASSES)
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
        self.enter = nn.Linear(drifting.CLASSES, width)
        self.source = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.toward = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.score = nn.ModuleList(nn.Linear(width, 1) for _ in range(2))
        self.head = nn.Linear(width, drifting.CLASSES)

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


def _language(
    name: str, kind: str = "decoder", batch: Any = read, **settings: Any
) -> Problem:
    return Problem(
        name, kind, "transformers", partial(zoo, name, **settings), batch, lr=1e-3
    )


def _vision(name: str, kind: str, **settings: Any) -> Problem:
    return Problem(
        name, kind, "transformers", partial(zoo, name, **{**VIEW, **settings}), seen
    )


def _own(
    name: str, kind: str, build: Any, batch: Any, loss: Any = cross_entropy
) -> Problem:
    return Problem(name, kind, "ours", build, batch, loss)


def _lstm() -> nn.Module:
    return drifting.LSTM(VOCABULARY)


_ROWS = (
    _language("GPT-2"),
    _language("Llama"),
    _language("GPT-NeoX"),
    _language("Mixtral"),
    _language("BERT", "encoder", masked),
    _language("T5", "encoder", answered, num_layers=1, num_decoder_layers=1),
    _vision("ViT", "encoder"),
    _vision("ConvNeXt", "convolutional", layer_scale_init_value=1.0),
    _vision("ResNet", "convolutional", **SMALL_RESNET),
    Problem(
        "VGG", "convolutional", "ours", Convolutions, gratings, cross_entropy, lr=1e-3
    ),
    _own("residual", "convolutional", drifting.ResNet, gratings),
    _own("MLP", "recurrent and tabular", MLP, tabled),
    _own("GRU", "recurrent and tabular", GRU, series),
    _own("LSTM", "recurrent and tabular", _lstm, followed, None),
    Problem("PatchTSMixer", "recurrent and tabular", "transformers", mixer, forecast),
    _own("graph network", "graph and diffusion", drifting.GraphNetwork, drifting.graph),
    _own("graph attention", "graph and diffusion", GraphAttention, drifting.graph),
    _own(
        "diffusion MLP",
        "graph and diffusion",
        Denoiser,
        partial(diffused, shape=(2,)),
        None,
    ),
    _own(
        "UNet",
        "graph and diffusion",
        UNet,
        partial(diffused, shape=(1, SIDE, SIDE)),
        None,
    ),
    _own(
        "DiT",
        "graph and diffusion",
        DiT,
        partial(diffused, shape=(1, SIDE, SIDE)),
        None,
    ),
)
PROBLEMS = {problem.name: problem for problem in _ROWS}
"""Name -> problem."""
