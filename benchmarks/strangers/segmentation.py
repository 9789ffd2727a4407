"""Models whose output is an image or a volume: segmentation and diffusion."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .case import Case, Stranger, loss_inside, loss_outside

__all__ = ["STRANGERS"]

Settings = dict[str, Any]


def _mask(*shape: int) -> Tensor:
    return (torch.rand(shape) > 0.5).float()


_SHALLOW: Settings = {"encoder_depth": 3, "decoder_channels": (32, 16, 8)}

#: Class of segmentation_models_pytorch -> encoder, loss of its ``losses``, whether it is inside,
#: and settings.
SMP: dict[str, tuple[str, str, bool, Settings]] = {
    "Unet": ("mobilenet_v2", "DiceLoss", True, _SHALLOW),
    "UnetPlusPlus": ("mobilenet_v2", "JaccardLoss", True, _SHALLOW),
    "FPN": (
        "mobilenet_v2",
        "DiceLoss",
        False,
        {"decoder_pyramid_channels": 32, "decoder_segmentation_channels": 32},
    ),
    "Linknet": ("mobilenet_v2", "TverskyLoss", False, {"encoder_depth": 3}),
    "PSPNet": ("mobilenet_v2", "FocalLoss", True, {"psp_out_channels": 32}),
    "DeepLabV3Plus": ("mobilenet_v2", "LovaszLoss", True, {"decoder_channels": 32}),
    "MAnet": ("mobilenet_v2", "FocalLoss", False, _SHALLOW),
    "Segformer": ("mit_b0", "DiceLoss", True, {"decoder_segmentation_channels": 32}),
    "UPerNet": (
        "mobilenet_v2",
        "SoftBCEWithLogitsLoss",
        True,
        {"decoder_channels": 32},
    ),
}


def _smp(name: str) -> Case:
    import segmentation_models_pytorch as smp

    encoder, loss_name, inside, settings = SMP[name]
    cls = getattr(smp, name)
    model = cls(encoder_name=encoder, encoder_weights=None, classes=1, **settings)
    cls = getattr(smp.losses, loss_name)
    loss = cls() if loss_name.startswith("Soft") else cls("binary")
    case = loss_inside if inside else loss_outside
    return case(model, loss, _mask(2, 1, 64, 64), torch.randn(2, 3, 64, 64))


#: Class of monai.networks.nets -> the size of a volume, and its settings.
MONAI: dict[str, tuple[int, Settings]] = {
    "UNet": (32, {"channels": (8, 16, 32), "strides": (2, 2), "num_res_units": 1}),
    "BasicUNet": (32, {"features": (8, 8, 16, 16, 32, 8)}),
    "AttentionUnet": (32, {"channels": (8, 16, 32), "strides": (2, 2)}),
    "SegResNet": (
        32,
        {"init_filters": 8, "blocks_down": (1, 1, 1), "blocks_up": (1, 1)},
    ),
    "VNet": (32, {}),
    "DynUNet": (
        32,
        {
            "kernel_size": (3, 3, 3),
            "strides": (1, 2, 2),
            "upsample_kernel_size": (2, 2),
            "filters": (8, 16, 32),
        },
    ),
    "UNETR": (
        32,
        {
            "img_size": 32,
            "feature_size": 8,
            "hidden_size": 48,
            "mlp_dim": 96,
            "num_heads": 4,
        },
    ),
    "SwinUNETR": (
        64,
        {"feature_size": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 2, 2)},
    ),
    "HighResNet": (16, {}),
}


def _monai(name: str) -> Case:
    import monai

    size, settings = MONAI[name]
    flat = name in ("SwinUNETR", "VNet")  # in two dimensions, to be small
    dims = 2 if flat else 3
    settings = settings | {"spatial_dims": dims, "in_channels": 1, "out_channels": 2}
    model = getattr(monai.networks.nets, name)(**settings)
    loss = monai.losses.DiceCELoss(to_onehot_y=True, softmax=True)
    volume = (size,) * dims
    batch = torch.randn(2, 1, *volume)
    case = loss_inside if name in ("UNet", "UNETR", "DynUNet") else loss_outside
    return case(model, loss, _mask(2, 1, *volume), batch)


def _diffused(
    cls: str, settings: Settings, args: tuple[Any, ...], given: Settings
) -> Case:
    import diffusers

    return Case(
        getattr(diffusers, cls)(**settings), args, {**given, "return_dict": False}
    )


def _unet2d() -> Case:
    settings = {
        "sample_size": 16,
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
        "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        "norm_num_groups": 8,
    }
    return _diffused(
        "UNet2DModel", settings, (torch.randn(2, 3, 16, 16), torch.tensor([3, 500])), {}
    )


def _unet_condition() -> Case:
    settings = {
        "sample_size": 16,
        "block_out_channels": (32, 64),
        "layers_per_block": 1,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "cross_attention_dim": 32,
        "attention_head_dim": 8,
        "norm_num_groups": 8,
    }
    args = (torch.randn(2, 4, 16, 16), torch.tensor([3, 500]), torch.randn(2, 7, 32))
    return _diffused("UNet2DConditionModel", settings, args, {})


_VAE: Settings = {
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (16, 32),
    "norm_num_groups": 8,
}


def _vae(cls: str) -> Case:
    return _diffused(cls, _VAE, (torch.randn(2, 3, 32, 32),), {})


def _tiny_autoencoder() -> Case:
    settings = {
        "encoder_block_out_channels": (16, 16),
        "decoder_block_out_channels": (16, 16),
        "num_encoder_blocks": (1, 1),
        "num_decoder_blocks": (1, 1),
    }
    return _diffused("AutoencoderTiny", settings, (torch.randn(2, 3, 32, 32),), {})


_DIT: Settings = {
    "num_attention_heads": 4,
    "attention_head_dim": 16,
    "num_layers": 2,
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 4,
}


def _dit() -> Case:
    settings = {**_DIT, "num_embeds_ada_norm": 100, "norm_num_groups": 8}
    given = {"timestep": torch.tensor([3, 50]), "class_labels": torch.tensor([1, 2])}
    return _diffused(
        "DiTTransformer2DModel", settings, (torch.randn(2, 4, 8, 8),), given
    )


def _pixart() -> Case:
    settings = {
        **_DIT,
        "cross_attention_dim": 64,
        "caption_channels": 32,
        "norm_num_groups": 8,
    }
    given = {
        "timestep": torch.tensor([3, 50]),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    return _diffused(
        "PixArtTransformer2DModel", settings, (torch.randn(2, 4, 8, 8),), given
    )


def _sd3() -> Case:
    settings = {
        **_DIT,
        "joint_attention_dim": 32,
        "caption_projection_dim": 64,
        "pooled_projection_dim": 32,
        "pos_embed_max_size": 8,
        "out_channels": 4,
    }
    given = {
        "timestep": torch.tensor([3, 50]),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 32),
    }
    return _diffused(
        "SD3Transformer2DModel", settings, (torch.randn(2, 4, 8, 8),), given
    )


def _flux() -> Case:
    settings = {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": (4, 6, 6),
    }
    given = {
        "encoder_hidden_states": torch.randn(2, 7, 32),
        "pooled_projections": torch.randn(2, 32),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.randint(8, (16, 3)).float(),
        "txt_ids": torch.zeros(7, 3),
    }
    return _diffused(
        "FluxTransformer2DModel", settings, (torch.randn(2, 16, 16),), given
    )


def _prior() -> Case:
    settings = {
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "num_layers": 2,
        "embedding_dim": 32,
        "num_embeddings": 7,
    }
    given = {
        "timestep": torch.tensor([3, 50]),
        "proj_embedding": torch.randn(2, 32),
        "encoder_hidden_states": torch.randn(2, 7, 32),
    }
    return _diffused("PriorTransformer", settings, (torch.randn(2, 32),), given)


def _gaussian_diffusion() -> Case:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    unet = Unet(dim=16, dim_mults=(1, 2), flash_attn=False)
    return Case(
        GaussianDiffusion(unet, image_size=16, timesteps=50),
        (torch.rand(4, 3, 16, 16),),
    )


STRANGERS = [
    *(
        Stranger(name, "segmentation_models_pytorch", partial(_smp, name))
        for name in SMP
    ),
    *(Stranger(name, "monai", partial(_monai, name)) for name in MONAI),
    Stranger("UNet2DModel", "diffusers", _unet2d),
    Stranger("UNet2DConditionModel", "diffusers", _unet_condition),
    Stranger("AutoencoderKL", "diffusers", partial(_vae, "AutoencoderKL")),
    Stranger("VQModel", "diffusers", partial(_vae, "VQModel")),
    Stranger("AutoencoderTiny", "diffusers", _tiny_autoencoder),
    Stranger("DiTTransformer2DModel", "diffusers", _dit),
    Stranger("PixArtTransformer2DModel", "diffusers", _pixart),
    Stranger("SD3Transformer2DModel", "diffusers", _sd3),
    Stranger("FluxTransformer2DModel", "diffusers", _flux),
    Stranger("PriorTransformer", "diffusers", _prior),
    Stranger("GaussianDiffusion", "denoising-diffusion-pytorch", _gaussian_diffusion),
]
