"""Architectures of the transformers library in small configurations, rows of architectures.json,
and a batch for each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["WAVE", "ZOO", "Entry", "waves"]

LENGTH, VOCABULARY = 32, 128

Settings = dict[str, Any]

FILE: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
"""Settings that architectures share, under their names, and the rows."""

WAVE: Settings = FILE["wave"]


@dataclass(frozen=True)
class Entry:
    """A model: its class, what kind it is, settings of its configuration, and its batch."""

    model: str
    kind: str
    settings: Mapping[str, Any]
    batch: Callable[[], Settings]


def text(settings: Settings) -> Settings:
    tokens = torch.randint(3, VOCABULARY, (8, LENGTH))
    return {"input_ids": tokens, "labels": tokens.clone()}


def classified(name: str, inputs: Tensor) -> Settings:
    return {name: inputs, "labels": torch.randint(10, (len(inputs),))}


def images(settings: Settings) -> Settings:
    size = settings["image_size"]
    return classified("pixel_values", torch.randn(8, 3, size, size))


def waves() -> Settings:
    samples = torch.randn(4, 1024)
    return {"input_values": samples, "labels": torch.randint(1, 32, (4, 8))}


def transcribed(settings: Settings) -> Settings:
    features = torch.randn(4, settings["num_mel_bins"], 2 * LENGTH)
    labels = torch.randint(3, VOCABULARY, (4, LENGTH))
    return {"input_features": features, "labels": labels}


def captioned(settings: Settings) -> Settings:
    tokens = torch.randint(3, VOCABULARY, (8, LENGTH))
    pictures = torch.randn(8, 3, 32, 32)
    return {"input_ids": tokens, "pixel_values": pictures, "return_loss": True}


BATCHES: dict[str, Callable[[Settings], Settings]] = {
    "text": text,
    "image": images,
    "wave": lambda settings: waves(),
    "spectrum": lambda settings: classified("input_values", torch.randn(4, 64, 16)),
    "mel": transcribed,
    "pairs": captioned,
}
"""What a model reads -> its keyword arguments, of the settings."""


def entry(row: Settings) -> Entry:
    """The model of a row: its own settings take precedence over those that it shares."""
    settings: Settings = {}
    for name in row["shared"]:
        settings |= FILE[name]
    settings |= row["settings"]
    batch = partial(BATCHES[row["batch"]], settings)
    return Entry(row["model"], row["kind"], settings, batch)


ZOO: dict[str, Entry] = {row["name"]: entry(row) for row in FILE["architectures"]}
"""Name -> model."""
