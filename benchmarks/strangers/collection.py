"""The collection: every model, and what is installed of the libraries.

The libraries belong to no extra. In an environment with torch 2.13, transformers and this package:

    pip install --no-deps LIBRARY ...

for each distribution of LIBRARIES and NEEDED, so that none replaces torch. Wheels of torchvision and
torchaudio that are made for GPUs have compiled parts that a CPU build of torch cannot load: delete
`torchaudio/lib/*.so`; those of torchvision are declared by `prepare`. No model here runs them.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import warnings

import torch

from benchmarks.common import Row

from . import audio, graphs, images, language, segmentation, series
from .case import Stranger

__all__ = ["NEEDED", "STRANGERS", "missing", "preload", "prepare", "versions"]

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


#: Library -> modules that the process imports once, before it starts those of the models.
IMPORTS = {
    "timm": ("timm",),
    "torchvision": ("torchvision",),
    "vit-pytorch": ("vit_pytorch",),
    "segmentation_models_pytorch": ("segmentation_models_pytorch",),
    "monai": ("monai.networks.nets", "monai.losses"),
    "diffusers": (
        "diffusers.models.unets.unet_2d_condition",
        "diffusers.models.transformers.transformer_flux",
    ),
    "transformers": ("transformers.modeling_utils",),
    "torch_geometric": ("torch_geometric.nn",),
    "torchaudio": ("torchaudio.models",),
    "asteroid": ("asteroid.models",),
    "open_clip_torch": ("open_clip",),
    "x-transformers": ("x_transformers",),
}


def preload(library: str) -> None:
    """Imports a library, and of torch what its compiler needs, unless that fails: then the models
    of it say why."""
    torch.compiler.reset()
    for module in IMPORTS.get(library, ()):
        with contextlib.suppress(Exception):
            importlib.import_module(module)


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
