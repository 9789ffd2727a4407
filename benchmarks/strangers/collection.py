"""The collection: every model, and what is installed of the libraries.

The libraries belong to no extra. In an environment with torch 2.13, transformers and this package:

    pip install --no-deps LIBRARY ...

for each distribution of LIBRARIES and NEEDED, so that none replaces torch. Wheels of torchvision and
torchaudio that are made for GPUs have compiled parts that a CPU build of torch cannot load: delete
`torchaudio/lib/*.so`; those of torchvision are declared by `prepare`. No model here runs them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import warnings

import torch

from benchmarks.common import Row

from . import audio, graphs, images, language, segmentation, series
from .case import Stranger

__all__ = ["NEEDED", "STRANGERS", "missing", "prepare", "versions"]

STRANGERS: list[Stranger] = [
    *images.STRANGERS,
    *segmentation.STRANGERS,
    *language.STRANGERS,
    *audio.STRANGERS,
    *graphs.STRANGERS,
    *series.STRANGERS,
]

NEEDED = ()
"""What the libraries import, beside what this project's tests do."""

_DECLARED = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def prepare() -> None:
    """Lets torchvision be imported where its compiled parts do not load, and nothing be downloaded.

    torchvision registers functions for these operations when it is imported.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    warnings.simplefilter("ignore")
    library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _DECLARED:
        with contextlib.suppress(RuntimeError):
            library.define(schema)
    _KEPT.append(library)


_KEPT: list[torch.library.Library] = []
"""A library that is collected takes its operations with it."""


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
