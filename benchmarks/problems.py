"""What `benchmarks.preflight` trains: twenty small models of five kinds, each with a task that it
learns in a hundred steps."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import small_models
from benchmarks.architectures import VOCABULARY, ZOO
from benchmarks.small_models import CLASSES, FEATURES, SIDE
from fp8.lab.preflight.demo import SOURCES, text_batches
from fp8.lab.preflight.training import Setup

__all__ = ["PROBLEMS", "Problem", "text"]

BATCH, LENGTH = 8, 32
IMAGES = 32
NODES, EDGES = 256, 1024  # of a graph
MASKED = 0.15  # of the tokens: BERT (arXiv:1810.04805), section 3.1
MASK = 1  # a byte that no text has
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
    labels = torch.randint(CLASSES, (IMAGES,), generator=generator)
    angles = labels * torch.pi / CLASSES
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
    second = torch.randn(32, CLASSES, generator=fixed)
    sizes = torch.logspace(-1, 1, FEATURES)
    return x * sizes, (torch.tanh(2 * x @ first) @ second).argmax(-1)


def series(number: int) -> tuple[Tensor, Tensor]:
    """Noisy waves in time, two channels; the class is the frequency."""
    generator = _generator(number)
    labels = torch.randint(CLASSES, (IMAGES,), generator=generator)
    phase, noise = (torch.rand(IMAGES, 1, 2, generator=generator) for _ in range(2))
    angle = torch.arange(LENGTH)[:, None] * (0.2 + 0.2 * labels[:, None, None])
    waves = torch.sin(angle + 6.28 * phase)
    return waves + noise * torch.randn(waves.shape, generator=generator), labels


def forecast(number: int) -> dict[str, Tensor]:
    """Waves in time, and what follows."""
    waves, _ = series(number)
    return {"past_values": waves[:, :24], "future_values": waves[:, 24:]}


def ring_noise(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """`diffused` points of a ring in two dimensions."""
    generator = _generator(number)
    angle = 6.28 * torch.rand(256, generator=generator)
    return diffused(torch.stack([angle.cos(), angle.sin()], -1), generator)


def image_noise(number: int) -> tuple[Tensor, Tensor, Tensor]:
    """`diffused` waves."""
    return diffused(gratings(number)[0], _generator(number))


def diffused(data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Noisy data, the level of noise, and the noise."""
    level = torch.rand(len(data), generator=generator)
    noise = torch.randn(data.shape, generator=generator)
    mix = level.reshape(-1, *[1] * (data.dim() - 1)) * torch.pi / 2
    return mix.cos() * data + mix.sin() * noise, level, noise


def graph(number: int) -> tuple[Tensor, ...]:
    """A random graph; the class of a node is the largest feature of it and its neighbours, summed
    and passed on twice."""
    generator = _generator(number)
    features = torch.randn(NODES, CLASSES, generator=generator)
    source, to = torch.randint(NODES, (2, EDGES), generator=generator)
    summed = features
    for _ in range(2):
        summed = summed + torch.zeros_like(summed).index_add(0, to, summed[source])
    return features, source, to, summed.argmax(-1)


def _generator(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def cross_entropy(output: tuple[Tensor, Tensor]) -> Tensor:
    """The loss of (logits, labels)."""
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


VIEW = {"image_size": SIDE, "num_channels": 1, "patch_size": 4, "num_labels": CLASSES}
"""The images of `gratings`, as configurations of transformers say it."""

SMALL_RESNET: dict[str, Any] = {"hidden_sizes": [32, 64], "depths": [2, 1]}


def mixer() -> nn.Module:
    """A mixer of patches of series."""
    cls = import_module("transformers").PatchTSMixerForPrediction
    lengths = {"context_length": 24, "prediction_length": 8}
    patches = {"patch_length": 4, "patch_stride": 4, "num_input_channels": 2}
    return _configured(cls, **lengths, **patches, d_model=32, num_layers=3)


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


LSTM = partial(small_models.LSTM, VOCABULARY)
CONVOLUTIONAL, RECURRENT = "convolutional", "recurrent and tabular"
DIFFUSION = "graph and diffusion"
MIXER = Problem("PatchTSMixer", RECURRENT, "transformers", mixer, forecast)

_ROWS = (
    _language("GPT-2"),
    _language("Llama"),
    _language("GPT-NeoX"),
    _language("Mixtral"),
    _language("BERT", "encoder", masked),
    _language("T5", "encoder", answered, num_layers=1, num_decoder_layers=1),
    _vision("ViT", "encoder"),
    _vision("ConvNeXt", CONVOLUTIONAL, layer_scale_init_value=1.0),
    _vision("ResNet", CONVOLUTIONAL, **SMALL_RESNET, layer_type="basic"),
    replace(_own("VGG", CONVOLUTIONAL, small_models.Convolutions, gratings), lr=1e-3),
    _own("residual", CONVOLUTIONAL, small_models.ResNet, gratings),
    _own("MLP", RECURRENT, small_models.MLP, tabled),
    _own("GRU", RECURRENT, small_models.GRU, series),
    _own("LSTM", RECURRENT, LSTM, followed, None),
    MIXER,
    _own("graph network", DIFFUSION, small_models.GraphNetwork, graph),
    _own("graph attention", DIFFUSION, small_models.GraphAttention, graph),
    _own("diffusion MLP", DIFFUSION, small_models.Denoiser, ring_noise, None),
    _own("UNet", DIFFUSION, small_models.UNet, image_noise, None),
    _own("DiT", DIFFUSION, small_models.DiT, image_noise, None),
)
PROBLEMS = {problem.name: problem for problem in _ROWS}
"""Name -> problem."""
