"""Image classifiers: timm, torchvision and vit-pytorch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from .case import Case, Stranger, loss_inside, loss_outside

__all__ = ["STRANGERS"]

CLASSES, BATCH = 10, 4

Settings = dict[str, Any]


def pictures(size: int, batch: int = BATCH) -> torch.Tensor:
    return torch.randn(batch, 3, size, size)


def labels() -> torch.Tensor:
    return torch.randint(CLASSES, (BATCH,))


def _timm(name: str, size: int, settings: Settings) -> Case:
    """name: of timm's registry, or one of its modules with a class."""
    import timm

    module, _, cls = name.rpartition(".")
    if module:
        model = getattr(importlib.import_module(f"timm.models.{module}"), cls)
        model = model(num_classes=CLASSES, **settings)
    else:
        model = timm.create_model(name, num_classes=CLASSES, **settings)
    return Case(model, (pictures(size),))


_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
_MLP = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "num_blocks": 2}
_WIDTHS = (16, 32, 48, 64)
_ONES = (1, 1, 1, 1)
_HEADS = (2, 2, 4, 4)
_STAGES: Settings = {"depths": _ONES, "dims": _WIDTHS}

#: Name of timm -> the size of its images, and its settings; without a loss of its own.
TIMM: dict[str, tuple[int, Settings]] = {
    "vit_tiny_patch16_224": (32, _VIT),
    "deit3_small_patch16_224": (32, _VIT),
    "beitv2_base_patch16_224": (32, _VIT),
    "cait_xxs24_224": (32, _VIT),
    "xcit_nano_12_p16_224": (32, {**_VIT, "patch_size": 16}),
    "eva02_tiny_patch14_224": (32, {**_VIT, "embed_dim": 96, "num_heads": 3}),
    "mlp_mixer.MlpMixer": (32, _MLP),
    "swin_tiny_patch4_window7_224": (
        32,
        {
            "img_size": 32,
            "patch_size": 2,
            "window_size": 4,
            "embed_dim": 32,
            "depths": (2, 2),
            "num_heads": (2, 4),
        },
    ),
    "convnext_atto": (64, _STAGES),
    "inception_next_tiny": (64, _STAGES),
    "focalnet.FocalNet": (64, {"embed_dim": 16, "depths": _ONES}),
    "davit_tiny": (
        32,
        {"depths": _ONES, "embed_dims": _WIDTHS, "num_heads": _HEADS, "window_size": 4},
    ),
    "pvt_v2.PyramidVisionTransformerV2": (
        64,
        {"depths": _ONES, "embed_dims": _WIDTHS, "num_heads": _HEADS},
    ),
    "twins.Twins": (
        64,
        {
            "img_size": 64,
            "depths": _ONES,
            "embed_dims": _WIDTHS,
            "num_heads": _HEADS,
            "wss": (2, 2, 2, 2),
        },
    ),
    "metaformer.MetaFormer": (64, _STAGES),
    "edgenext.EdgeNeXt": (
        64,
        {
            "depths": _ONES,
            "dims": _WIDTHS,
            "heads": _HEADS,
            "kernel_sizes": (3, 5, 7, 9),
            "global_block_counts": (0, 1, 1, 1),
            "d2_scales": (2, 2, 3, 4),
        },
    ),
    "levit.Levit": (
        64,
        {
            "img_size": 64,
            "embed_dim": (32, 48, 64),
            "key_dim": 16,
            "depth": (1, 1, 1),
            "num_heads": (2, 3, 4),
        },
    ),
    "mobilevit_xxs": (64, {}),
    "mobilenetv3_small_050": (64, {}),
    "ghostnet_050": (64, {}),
    "resnet10t": (64, {"channels": _WIDTHS}),
    "seresnextaa101d_32x8d": (
        64,
        {"layers": _ONES, "channels": _WIDTHS, "cardinality": 4, "base_width": 32},
    ),
    "starnet_s1": (64, {"base_dim": 8, "depths": _ONES}),
    "efficientformer_v2.EfficientFormerV2": (
        64,
        {"img_size": 64, "depths": _ONES, "embed_dims": _WIDTHS},
    ),
    "sequencer.Sequencer2d": (
        32,
        {"img_size": 32, "embed_dims": (32, 32, 32, 32), "layers": _ONES},
    ),
    "hiera.Hiera": (
        64,
        {"img_size": (64, 64), "embed_dim": 32, "num_heads": 1, "stages": _ONES},
    ),
    "volo.VOLO": (
        64,
        {
            "img_size": 64,
            "layers": (1, 1),
            "embed_dims": (32, 64),
            "num_heads": (2, 4),
            "downsamples": (True, False),
            "outlook_attention": (True, False),
            "mlp_ratio": 2,
        },
    ),
}

#: Builder of torchvision -> the size of its images, and its settings; the loss is outside.
TORCHVISION: dict[str, tuple[int, Settings]] = {
    "mnasnet0_5": (64, {}),
    "mobilenet_v2": (64, {"width_mult": 0.5}),
    "mobilenet_v3_small": (64, {"width_mult": 0.5}),
    "shufflenet_v2_x0_5": (64, {}),
    "squeezenet1_1": (64, {}),
}


def _torchvision(name: str, size: int, settings: Settings) -> Case:
    import torchvision

    model = torchvision.models.get_model(
        name, weights=None, num_classes=CLASSES, **settings
    )
    return loss_outside(model, F.cross_entropy, labels(), pictures(size))


_TORCHVISION_VIT: Settings = {
    "image_size": 32,
    "patch_size": 8,
    "num_layers": 2,
    "num_heads": 4,
    "hidden_dim": 64,
    "mlp_dim": 128,
}
_TORCHVISION_SWIN: Settings = {
    "patch_size": [2, 2],
    "embed_dim": 32,
    "depths": [2, 2],
    "num_heads": [2, 4],
    "window_size": [4, 4],
}


def _vision_class(name: str, size: int, settings: Settings) -> Case:
    """A class of torchvision.models with its loss inside."""
    import torchvision

    cls = getattr(torchvision.models, name)
    model = cls(num_classes=CLASSES, **settings)
    return loss_inside(model, F.cross_entropy, labels(), pictures(size))


#: Class of torchvision -> the size of its images, and its settings; the loss is inside.
VISION_CLASSES: dict[str, tuple[int, Settings]] = {
    "VisionTransformer": (32, _TORCHVISION_VIT),
    "SwinTransformer": (32, _TORCHVISION_SWIN),
    "DenseNet": (64, {"growth_rate": 16, "block_config": (2, 2, 2)}),
}


def _raft() -> Case:
    from torchvision.models.optical_flow import raft_small

    flow = torch.randn(1, 2, 128, 128)

    def loss(output: Any) -> torch.Tensor:
        return sum(0.8**i * (o - flow).abs().mean() for i, o in enumerate(output[::-1]))

    frames = (pictures(128, 1), pictures(128, 1))
    return Case(raft_small(weights=None), frames, {"num_flow_updates": 2}, loss)


_P: Settings = {"image_size": 32, "patch_size": 8, "num_classes": CLASSES}
_P2: Settings = {**_P, "dim": 64, "depth": 2, "heads": 4, "mlp_dim": 128}
_FOUR: Settings = {"num_classes": CLASSES}

#: Module and class of vit-pytorch -> the size of its images, and its settings.
VIT_PYTORCH: dict[str, tuple[int, Settings]] = {
    "vit.ViT": (32, _P2),
    "simple_vit.SimpleViT": (32, _P2),
    "deepvit.DeepViT": (32, _P2),
    "cait.CaiT": (32, {**_P2, "cls_depth": 1}),
    "vit_for_small_dataset.ViT": (32, _P2),
    "simple_vit_with_register_tokens.SimpleViT": (32, _P2),
    "parallel_vit.ViT": (32, _P2),
    "rvt.RvT": (32, _P2),
    "look_vit.LookViT": (
        32,
        {
            **_P,
            "dim": 64,
            "depth": 2,
            "heads": 4,
            "highres_patch_size": 4,
            "mlp_factor": 2,
        },
    ),
    "cct.CCT": (
        32,
        {
            "img_size": 32,
            "embedding_dim": 64,
            "n_conv_layers": 1,
            "num_layers": 2,
            "num_heads": 4,
            "mlp_ratio": 2,
            "num_classes": CLASSES,
        },
    ),
    "pit.PiT": (
        32,
        {**_P, "patch_size": 4, "dim": 32, "depth": (1, 1), "heads": 4, "mlp_dim": 64},
    ),
    "xcit.XCiT": (32, {**_P2, "cls_depth": 1}),
    "scalable_vit.ScalableViT": (
        64,
        {
            "num_classes": CLASSES,
            "dim": 32,
            "heads": (2, 4),
            "depth": (1, 1),
            "ssa_dim_key": (16, 16),
            "reduction_factor": (2, 1),
            "window_size": (8, None),
        },
    ),
    "nest.NesT": (
        32,
        {
            "image_size": 32,
            "patch_size": 4,
            "dim": 32,
            "heads": 2,
            "num_hierarchies": 2,
            "block_repeats": (1, 1),
            "num_classes": CLASSES,
        },
    ),
}


def _vit_pytorch(name: str, size: int, settings: Settings) -> Case:
    module, _, cls = name.partition(".")
    made = getattr(importlib.import_module(f"vit_pytorch.{module}"), cls)(**settings)
    return loss_inside(made, F.cross_entropy, labels(), pictures(size))


def table(
    library: str,
    rows: Mapping[str, tuple[Any, Settings]],
    build: Callable[[str, Any, Settings], Case],
) -> list[Stranger]:
    """The models of one table, all built by one function."""
    return [
        Stranger(name, library, partial(build, name, shape, settings))
        for name, (shape, settings) in rows.items()
    ]


STRANGERS = [
    *table("timm", TIMM, _timm),
    *table("torchvision", TORCHVISION, _torchvision),
    *table("torchvision", VISION_CLASSES, _vision_class),
    Stranger("raft_small", "torchvision", _raft),
    *table("vit-pytorch", VIT_PYTORCH, _vit_pytorch),
]
