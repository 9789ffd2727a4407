"""Image classifiers and other models of images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .case import Case, Stranger

__all__ = ["STRANGERS"]

CLASSES, BATCH = 10, 4


def _cross_entropy() -> Callable[[Any], Tensor]:
    labels = torch.randint(CLASSES, (BATCH,))
    return lambda output: F.cross_entropy(output[0] if isinstance(output, tuple) else output, labels)


def _timm(name: str, size: int, **settings: Any) -> Stranger:
    """settings: of the class of the model."""

    def build() -> Case:
        import timm

        model = timm.create_model(name, num_classes=CLASSES, **settings)
        return Case(model, (torch.randn(BATCH, 3, size, size),))

    return Stranger(name, "timm", build)


VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}

#: Name of timm -> the size of its images, and its settings.
TIMM: dict[str, tuple[int, dict[str, Any]]] = {
    "vit_tiny_patch16_224": (32, VIT),
    "resnet10t": (64, {}),
    "mixer_s16_224": (32, {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 64}),
    "convnext_atto": (64, {"depths": (1, 1, 1, 1), "dims": (16, 32, 48, 64)}),
}


def _torchvision(name: str, size: int, **settings: Any) -> Stranger:
    def build() -> Case:
        import torchvision

        model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **settings)
        return Case(model, (torch.randn(BATCH, 3, size, size),), loss=_cross_entropy())

    return Stranger(name, "torchvision", build)


TORCHVISION: dict[str, tuple[int, dict[str, Any]]] = {
    "squeezenet1_1": (64, {}),
    "shufflenet_v2_x0_5": (64, {}),
}

STRANGERS = [
    *(_timm(name, size, **settings) for name, (size, settings) in TIMM.items()),
    *(_torchvision(name, size, **settings) for name, (size, settings) in TORCHVISION.items()),
]
