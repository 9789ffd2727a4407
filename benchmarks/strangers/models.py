"""The collection: models of other libraries that a name and settings make, rows of models.json.

The libraries belong to no extra of this project. `python -m benchmarks.strangers --install` prints
the command that installs them beside torch and the ``test`` extra, without what they depend on, so
that none replaces torch. It is best given to an environment of its own.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.architectures import WAVE, waves
from benchmarks.common import Row

from .case import Case, Stranger, loss_inside, loss_outside, tokens

WORDS, LENGTH, BATCH = 128, 32, 8
CLASSES, IMAGES = 10, 4

Settings = dict[str, Any]

FILE: dict[str, Any] = json.loads(Path(__file__).with_name("models.json").read_text())
SMALL: Settings = FILE["small"]
"""What configurations of transformers call their sizes, and small ones; each takes those that it
has."""

NEEDED = """
adam-atan2-pytorch assoc-scan axial-positional-embedding beartype colt5-attention
discrete-continuous-embed-readout einx ema-pytorch frozendict gateloop-transformer hl-gauss-pytorch
hyper-connections loguru matscipy mixture-of-experts opt-einsum orjson product-key-memory
rotary-embedding-torch tensordict torch-einops-utils vector-quantize-pytorch x-mlps-pytorch
""".split()
"""What the libraries import, beside what this project's tests do."""


def pictures(size: int) -> Tensor:
    return torch.randn(IMAGES, 3, size, size)


def classified(model: Any, size: int, inside: bool = True) -> Case:
    """A classifier of images with its loss inside or outside."""
    labels = torch.randint(CLASSES, (IMAGES,))
    make = loss_inside if inside else loss_outside
    return make(model, F.cross_entropy, labels, pictures(size))


def text() -> Tensor:
    return tokens(WORDS, BATCH, LENGTH)


def next_token(logits: Any, ids: Tensor) -> Tensor:
    """The usual loss of a language model."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def imported(name: str) -> Any:
    """A class by its module and name."""
    module, _, cls = name.partition(" ")[0].rpartition(".")
    return getattr(importlib.import_module(module), cls)


def _timm(name: str, size: int, settings: Settings) -> Case:
    """name: of timm's registry, or one of its modules with a class. No loss of its own."""
    if "." in name:
        model = imported(f"timm.models.{name}")(num_classes=CLASSES, **settings)
    else:
        import timm

        model = timm.create_model(name, num_classes=CLASSES, **settings)
    return Case(model, (pictures(size),))


def _torchvision(name: str, size: int, settings: Settings) -> Case:
    models = importlib.import_module("torchvision.models")
    model = models.get_model(name, weights=None, num_classes=CLASSES, **settings)
    return classified(model, size, inside=False)


def _torchvision_class(name: str, size: int, settings: Settings) -> Case:
    cls = imported(f"torchvision.models.{name}")
    return classified(cls(num_classes=CLASSES, **settings), size)


def _vit_pytorch(name: str, size: int, settings: Settings) -> Case:
    return classified(imported(f"vit_pytorch.{name}")(**settings), size)


def _x_transformers(name: str, given: None, settings: Settings) -> Case:
    import x_transformers as x

    layers = x.Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, **settings)
    model = x.TransformerWrapper(
        num_tokens=WORDS, max_seq_len=LENGTH, attn_layers=layers
    )
    return Case(x.AutoregressiveWrapper(model), (text(),))


def _language(name: str, given: None, settings: Settings) -> Case:
    """Language models of small packages that take tokens and return logits."""
    ids = text()
    return loss_outside(imported(name)(**settings), next_token, ids, ids)


def shrunk(cls: Any, settings: Settings) -> Any:
    """The configuration of a class with the settings of SMALL that it has, and ``settings``."""
    known = cls().to_dict()
    small = {name: value for name, value in SMALL.items() if name in known}
    for name in ("text_config", "vision_config"):
        if name in known:
            small[name] = shrunk(type(getattr(cls(), name)), {}).to_dict()
    return cls(**{**small, **settings})


def images(*frames: int) -> Settings:
    pixels = torch.randn(IMAGES, *frames, 3, 32, 32)
    return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (IMAGES,))}


def language() -> Settings:
    ids = text()
    return {"input_ids": ids, "labels": ids.clone()}


BATCHES: dict[str, Callable[[], Settings]] = {
    "language": language,
    "wave": waves,
    "pairs": lambda: {
        "input_ids": text(),
        "pixel_values": torch.randn(BATCH, 3, 32, 32),
        "return_loss": True,
    },
    "series": lambda: {
        "past_values": torch.randn(4, 32, 3),
        "future_values": torch.randn(4, 8, 3),
    },
    "image": images,
    "video": lambda: images(4),
}
"""What a model of transformers reads -> its keyword arguments."""


def _transformers(name: str, kind: str, settings: Settings) -> Case:
    cls = imported(f"transformers.{name}")
    given: Settings = dict(WAVE) if kind == "wave" else {}
    if kind in ("image", "video"):
        given = {"num_labels": CLASSES}
    config = shrunk(cls.config_class, {**given, **settings})
    return Case(cls(config), kwargs=BATCHES[kind]())


FAMILIES: dict[str, Callable[[str, Any, Settings], Case]] = {
    "timm": _timm,
    "torchvision": _torchvision,
    "torchvision class": _torchvision_class,
    "vit-pytorch": _vit_pytorch,
    "x-transformers": _x_transformers,
    "language": _language,
    "transformers": _transformers,
}
"""Family of a row -> what builds its models, of the name, the input and the settings."""

WITH_LISTS = ("torchvision class", "transformers")
"""Families whose settings are lists; in others a list of the file is a tuple."""


def _tuples(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _tuples(each) for key, each in value.items()}
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    return value


def stranger(row: Row) -> Stranger:
    """The model of a row."""
    settings = row["settings"]
    if row["family"] not in WITH_LISTS:
        settings = _tuples(settings)
    build = partial(FAMILIES[row["family"]], row["name"], row["input"], settings)
    return Stranger(row["name"], row["library"], build)


STRANGERS: list[Stranger] = [stranger(row) for row in FILE["models"]]


def requirements() -> list[str]:
    """What pip installs with --no-deps."""
    libraries = [s.package for s in STRANGERS if s.package != "transformers"]
    return list(dict.fromkeys([*libraries, *NEEDED]))


def missing(distribution: str) -> str:
    """Why the models of a library cannot be built; empty if it is installed."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return f"{distribution} is not installed"
    return ""


def versions(rows: list[Row]) -> str:
    """The libraries of the rows, with their versions."""
    libraries = dict.fromkeys(row["library"] for row in rows)
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in libraries)
