"""Models whose output is an image: segmentation and diffusion."""

from __future__ import annotations

import torch

from .case import Case, Stranger

__all__ = ["STRANGERS"]


def _unet2d() -> Case:
    from diffusers import UNet2DModel

    model = UNet2DModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=8,
    )
    return Case(model, (torch.randn(2, 3, 16, 16), torch.tensor([3, 500])))


STRANGERS = [Stranger("UNet2DModel", "diffusers", _unet2d)]
