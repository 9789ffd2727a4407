"""The collection: every model, and what is installed of the libraries.

The libraries belong to no extra of this project. `python -m benchmarks.strangers --install` prints
the command that installs them beside torch 2.13 and the ``test`` extra, without what they depend
on, so that none replaces torch. It is best given to an environment of its own. Wheels of
torchaudio that are made for GPUs have compiled parts that a CPU build of torch cannot load: delete
``torchaudio/lib/*.so``. Those of torchvision are declared by `prepare`. No model here runs them.
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

__all__ = [
    "NEEDED",
    "STRANGERS",
    "missing",
    "preload",
    "prepare",
    "requirements",
    "versions",
]

STRANGERS: list[Stranger] = [
    *images.STRANGERS,
    *segmentation.STRANGERS,
    *language.STRANGERS,
    *audio.STRANGERS,
    *graphs.STRANGERS,
    *series.STRANGERS,
]

NEEDED = """
adam-atan2-pytorch ase assoc-scan asteroid-filterbanks axial-positional-embedding beartype cffi
cloudpickle colt5-attention dirsync discrete-continuous-embed-readout einx ema-pytorch fairscale
frozendict ftfy gateloop-transformer hl-gauss-pytorch hyper-connections hyperpyyaml
importlib-metadata joblib julius loguru matscipy mixture-of-experts narwhals opt-einsum
opt-einsum-fx orjson product-key-memory pycparser pytorch-ranger pyvers rotary-embedding-torch
ruamel.yaml scikit-base scikit-learn scipy sentencepiece soundfile tensordict threadpoolctl
torch-einops-utils vector-quantize-pytorch x-mlps-pytorch xxhash zipp
""".split()
"""What the libraries import, beside what this project's tests do."""

PINNED = {"torchvision": "0.28.0", "torchaudio": "2.11.0"}
"""The versions that are made for torch 2.13, or last before it."""


def requirements() -> list[str]:
    """What pip installs with --no-deps."""
    libraries = dict.fromkeys(
        s.package for s in STRANGERS if s.package != "transformers"
    )
    names = dict.fromkeys([*libraries, *NEEDED])
    return [f"{name}=={PINNED[name]}" if name in PINNED else name for name in names]


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
