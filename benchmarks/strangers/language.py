"""Models of text, and what else the transformers library has that `benchmarks.zoo` does not."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.architectures import WAVE

from .case import Case, Stranger, loss_outside, tokens

__all__ = ["STRANGERS"]

WORDS, LENGTH, BATCH = 128, 32, 8

Settings = dict[str, Any]


def next_token(logits: Any, ids: Tensor) -> Tensor:
    """The usual loss of a language model."""
    logits = logits[0] if isinstance(logits, tuple) else logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def text(length: int = LENGTH) -> Tensor:
    return tokens(WORDS, BATCH, length)


# x-transformers

#: Name -> settings of the layers.
DECODERS: dict[str, Settings] = {
    "Decoder": {},
    "Decoder rotary, RMSNorm, SwiGLU": {
        "rotary_pos_emb": True,
        "use_rmsnorm": True,
        "ff_swish": True,
        "ff_glu": True,
    },
    "Decoder ALiBi": {"alibi_pos_bias": True},
    "Decoder T5 bias, post-norm": {"rel_pos_bias": True, "pre_norm": False},
    "Decoder one key head, ReLU squared": {
        "attn_one_kv_head": True,
        "ff_relu_squared": True,
    },
    "Decoder QK norm": {"attn_qk_norm": True, "use_scalenorm": True},
    "Decoder sandwich norm, gated residual": {
        "sandwich_norm": True,
        "gate_residual": True,
    },
    "Decoder hyper-connections": {"num_residual_streams": 2},
    "Decoder softclamp": {"attn_softclamp_logits": True, "softclamp_output": True},
    "Decoder macaron, shifted tokens": {"macaron": True, "shift_tokens": 1},
    "Decoder talking heads, memories": {
        "attn_pre_talking_heads": True,
        "attn_num_mem_kv": 4,
        "attn_gate_values": True,
    },
}


def _decoder(settings: Settings) -> Case:
    from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

    layers = Decoder(dim=64, depth=2, heads=4, attn_dim_head=16, **settings)
    model = TransformerWrapper(num_tokens=WORDS, max_seq_len=LENGTH, attn_layers=layers)
    return Case(AutoregressiveWrapper(model), (text(),))


def _x_translator() -> Case:
    from x_transformers import XTransformer

    sides = {"num_tokens": WORDS, "depth": 2, "heads": 4, "max_seq_len": LENGTH}
    settings = {f"{side}_{k}": v for side in ("enc", "dec") for k, v in sides.items()}
    return Case(XTransformer(dim=64, **settings), (text(), text()))


def _x_image() -> Case:
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=64, depth=2, heads=4, attn_dim_head=16)
    model = ViTransformerWrapper(
        image_size=32, patch_size=8, num_classes=10, attn_layers=layers
    )
    return Case(model, (torch.randn(BATCH, 3, 32, 32),))


def _x_continuous() -> Case:
    from x_transformers import ContinuousTransformerWrapper, Encoder

    layers = Encoder(dim=64, depth=2, heads=4, attn_dim_head=16)
    sizes = {"dim_in": 16, "dim_out": 16, "max_seq_len": LENGTH}
    model = ContinuousTransformerWrapper(attn_layers=layers, **sizes)
    return Case(model, (torch.randn(BATCH, LENGTH, 16),))


# Language models of small packages that take (tokens) and return logits

_LM = {"num_tokens": WORDS, "dim": 64, "depth": 2}
_LM_HEADS = {**_LM, "heads": 4}

#: Module and class -> library, settings.
LANGUAGE: dict[str, tuple[str, Settings]] = {
    "performer_pytorch.PerformerLM": (
        "performer-pytorch",
        {**_LM_HEADS, "max_seq_len": LENGTH, "dim_head": 16, "causal": False},
    ),
    "linformer.LinformerLM": ("linformer", {**_LM_HEADS, "seq_len": LENGTH, "k": 8}),
    "sinkhorn_transformer.SinkhornTransformerLM": (
        "sinkhorn-transformer",
        {**_LM_HEADS, "max_seq_len": LENGTH, "bucket_size": 8},
    ),
    "local_attention.LocalTransformer": (
        "local-attention",
        {
            **_LM_HEADS,
            "max_seq_len": LENGTH,
            "dim_head": 16,
            "local_attn_window_size": 8,
        },
    ),
    "local_attention.LocalTransformer xPos": (
        "local-attention",
        {
            **_LM_HEADS,
            "max_seq_len": LENGTH,
            "dim_head": 16,
            "local_attn_window_size": 8,
            "use_xpos": True,
            "num_residual_streams": 1,
        },
    ),
    "perceiver_pytorch.perceiver_io.PerceiverLM": (
        "perceiver-pytorch",
        {
            **_LM,
            "max_seq_len": LENGTH,
            "num_latents": 16,
            "latent_dim": 64,
            "latent_heads": 4,
        },
    ),
    "minGRU_pytorch.minLM.minLM": ("minGRU-pytorch", {**_LM}),
    "block_recurrent_transformer_pytorch.BlockRecurrentTransformer": (
        "block-recurrent-transformer-pytorch",
        {
            **_LM_HEADS,
            "dim_head": 16,
            "max_seq_len": LENGTH,
            "block_width": 16,
            "num_state_vectors": 16,
            "recurrent_layers": (2,),
            "use_flash_attn": False,
        },
    ),
    "palm_rlhf_pytorch.PaLM": ("PaLM-rlhf-pytorch", {**_LM_HEADS, "dim_head": 16}),
    "titans_pytorch.MemoryAsContextTransformer": (
        "titans-pytorch",
        {**_LM_HEADS, "dim_head": 16, "segment_len": 16, "neural_memory_layers": ()},
    ),
    "linear_attention_transformer.LinearAttentionTransformerLM": (
        "linear-attention-transformer",
        {**_LM_HEADS, "max_seq_len": LENGTH, "causal": True, "blindspot_size": 1},
    ),
    "h_transformer_1d.HTransformer1D": (
        "h-transformer-1d",
        {**_LM_HEADS, "max_seq_len": LENGTH, "dim_head": 16, "block_size": 8},
    ),
    "gated_state_spaces_pytorch.GatedStateSpacesLM": (
        "gated-state-spaces-pytorch",
        {**_LM, "dss_kernel_N": 16, "dss_kernel_H": 16, "dim_expansion_factor": 2},
    ),
    "reformer_pytorch.ReformerLM": (
        "reformer-pytorch",
        {
            **_LM_HEADS,
            "max_seq_len": LENGTH,
            "bucket_size": 8,
            "n_hashes": 2,
            "causal": True,
        },
    ),
    "g_mlp_pytorch.gMLP": ("g-mlp-pytorch", {**_LM, "seq_len": LENGTH, "causal": True}),
}


def imported(name: str) -> Any:
    """A class by its module and name."""
    module, _, cls = name.partition(" ")[0].rpartition(".")
    return getattr(importlib.import_module(module), cls)


def _language(name: str, settings: Settings) -> Case:
    ids = text()
    return loss_outside(imported(name)(**settings), next_token, ids, ids)


def _megabyte() -> Case:
    from MEGABYTE_pytorch import MEGABYTE

    sizes = {
        "dim": (64, 32),
        "max_seq_len": (8, 4),
        "depth": (2, 1),
        "dim_head": 16,
        "heads": 2,
    }
    model = MEGABYTE(num_tokens=WORDS, **sizes)
    return Case(model, (text().view(BATCH, 8, 4),), {"return_loss": True})


def _mamba() -> Case:
    from mambapy.mamba import Mamba, MambaConfig

    model = Mamba(MambaConfig(d_model=64, n_layers=2, d_state=8))
    return Case(model, (torch.randn(BATCH, LENGTH, 64),))


def _retnet() -> Case:
    from torchscale.architecture.config import RetNetConfig
    from torchscale.architecture.retnet import RetNetDecoder

    sizes = {
        "decoder_embed_dim": 64,
        "decoder_value_embed_dim": 128,
        "decoder_layers": 2,
    }
    more = {
        "decoder_retention_heads": 4,
        "decoder_ffn_embed_dim": 128,
        "vocab_size": WORDS,
    }
    config = RetNetConfig(**sizes, **more, no_output_layer=False)
    ids = text()
    model = RetNetDecoder(config, embed_tokens=nn.Embedding(WORDS, 64))
    return loss_outside(model, next_token, ids, ids)


def _esm() -> Case:
    import esm

    model = esm.model.esm2.ESM2(num_layers=2, embed_dim=64, attention_heads=4)
    ids = tokens(24, BATCH, LENGTH)

    def loss(output: Any) -> Tensor:
        return F.cross_entropy(output["logits"].flatten(0, 1), ids.flatten())

    return Case(model, (ids,), loss=loss)


# transformers

#: What configurations call their sizes, and small ones; each takes those that it has.
SMALL: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "n_embd": 64,
    "d_model": 64,
    "dim": 64,
    "embed_dim": 64,
    "d_embed": 64,
    "emb_dim": 64,
    "embedding_size": 64,
    "true_hidden_size": 64,
    "intra_bottleneck_size": 64,
    "rotary_dim": 8,
    "num_hidden_layers": 2,
    "n_layer": 2,
    "n_layers": 2,
    "num_layers": 2,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "head_dim": 16,
    "d_head": 16,
    "d_kv": 16,
    "intermediate_size": 128,
    "n_inner": 128,
    "d_inner": 128,
    "d_ff": 128,
    "dff": 128,
    "ffn_dim": 128,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "moe_intermediate_size": 64,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "max_seq_len": 64,
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_MAMBA: Settings = {"mamba_d_state": 8, "mamba_n_heads": 8, "mamba_d_head": 16}

#: Class of transformers -> what its batch is, and settings beside SMALL.
TRANSFORMERS: dict[str, tuple[str, Settings]] = {
    "OpenAIGPTLMHeadModel": ("language", {}),
    "CTRLLMHeadModel": ("language", {}),
    "GPTBigCodeForCausalLM": ("language", {}),
    "MptForCausalLM": ("language", {}),
    "CodeGenForCausalLM": ("language", {"n_head": 8}),
    "XGLMForCausalLM": ("language", {"attention_heads": 4}),
    "BioGptForCausalLM": ("language", {}),
    "Starcoder2ForCausalLM": ("language", {}),
    "PersimmonForCausalLM": ("language", {}),
    "NemotronForCausalLM": ("language", {}),
    "Gemma3ForCausalLM": ("language", {}),
    "Glm4ForCausalLM": ("language", {}),
    "SmolLM3ForCausalLM": ("language", {}),
    "PhimoeForCausalLM": ("language", {}),
    "GptOssForCausalLM": ("language", {}),
    "JetMoeForCausalLM": ("language", {"kv_channels": 16}),
    "FalconMambaForCausalLM": ("language", {"state_size": 8}),
    "RecurrentGemmaForCausalLM": (
        "language",
        {"lru_width": 64, "attention_window_size": 16, "num_hidden_layers": 3},
    ),
    "BambaForCausalLM": ("language", {**_MAMBA, "attn_layer_indices": [1]}),
    "FNetForMaskedLM": ("language", {}),
    "MobileBertForMaskedLM": ("language", {"use_bottleneck": False}),
    "SqueezeBertForMaskedLM": ("language", {}),
    "XLNetLMHeadModel": ("language", {}),
    "ConvBertForMaskedLM": ("language", {}),
    "BigBirdForMaskedLM": ("language", {"attention_type": "original_full"}),
    "LongformerForMaskedLM": ("language", {"attention_window": 8}),
    "NystromformerForMaskedLM": (
        "language",
        {"segment_means_seq_len": 32, "num_landmarks": 8},
    ),
    "YosoForMaskedLM": ("language", {"use_expectation": True}),
    "RoFormerForMaskedLM": ("language", {}),
    "MPNetForMaskedLM": ("language", {}),
    "EsmForMaskedLM": ("language", {"position_embedding_type": "rotary"}),
    "LEDForConditionalGeneration": ("language", {"attention_window": 8}),
    "ProphetNetForConditionalGeneration": ("language", {"num_buckets": 8, "ngram": 2}),
    "M2M100ForConditionalGeneration": ("language", {"decoder_start_token_id": 2}),
    "NllbMoeForConditionalGeneration": (
        "language",
        {
            "decoder_start_token_id": 2,
            "encoder_sparse_step": 2,
            "decoder_sparse_step": 2,
        },
    ),
    "SwitchTransformersForConditionalGeneration": (
        "language",
        {"num_sparse_encoder_layers": 1, "decoder_start_token_id": 0},
    ),
    "WavLMForCTC": ("wave", {}),
    "SEWForCTC": ("wave", {"squeeze_factor": 2}),
    "UniSpeechForCTC": ("wave", {}),
    "SiglipModel": ("pairs", {}),
    "PoolFormerForImageClassification": (
        "image",
        {"hidden_sizes": [16, 32], "depths": [1, 1], "num_encoder_blocks": 2}
        | {"patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1]},
    ),
    "ViTMSNForImageClassification": ("image", {}),
    "Data2VecVisionForImageClassification": ("image", {}),
    "IJepaForImageClassification": ("image", {}),
    "Dinov2WithRegistersForImageClassification": ("image", {"mlp_ratio": 2}),
    "TimesformerForVideoClassification": ("video", {"num_frames": 4}),
    "VivitForVideoClassification": (
        "video",
        {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    ),
    "PatchTSTForPrediction": (
        "series",
        {
            "num_input_channels": 3,
            "context_length": 32,
            "prediction_length": 8,
            "patch_length": 8,
        },
    ),
    "PatchTSMixerForPrediction": (
        "series",
        {
            "num_input_channels": 3,
            "context_length": 32,
            "prediction_length": 8,
            "patch_length": 8,
        },
    ),
}

_LABELS: Settings = {"num_labels": 10}


def shrunk(cls: Any, settings: Settings) -> Any:
    """The configuration of a class with those of SMALL that it has, and ``settings``."""
    known = cls().to_dict()
    parts = {
        name: shrunk(type(getattr(cls(), name)), {})
        for name in ("text_config", "vision_config")
        if name in known
    }
    small = {name: value for name, value in SMALL.items() if name in known}
    return cls(**{**small, **{k: v.to_dict() for k, v in parts.items()}, **settings})


def batch_of(kind: str) -> Settings:
    """Keyword arguments of a model."""
    if kind == "language":
        ids = text()
        return {"input_ids": ids, "labels": ids.clone()}
    if kind == "wave":
        return {
            "input_values": torch.randn(4, 1024),
            "labels": torch.randint(1, 32, (4, 8)),
        }
    if kind == "pairs":
        return {"input_ids": text(), "pixel_values": torch.randn(BATCH, 3, 32, 32)} | {
            "return_loss": True
        }
    if kind == "series":
        return {
            "past_values": torch.randn(4, 32, 3),
            "future_values": torch.randn(4, 8, 3),
        }
    frames = (4,) if kind == "video" else ()
    pixels = torch.randn(4, *frames, 3, 32, 32)
    return {"pixel_values": pixels, "labels": torch.randint(10, (4,))}


def _transformers(name: str, kind: str, settings: Settings) -> Case:
    import transformers

    cls = getattr(transformers, name)
    given = {"wave": WAVE, "image": _LABELS, "video": _LABELS}.get(kind, {})
    config = shrunk(cls.config_class, {**given, **settings})
    return Case(cls(config), kwargs=batch_of(kind))


def _clip() -> Case:
    import open_clip
    from open_clip.loss import ClipLoss

    vision = {
        "image_size": 32,
        "layers": 2,
        "width": 64,
        "patch_size": 8,
        "head_width": 16,
    }
    words = {
        "context_length": LENGTH,
        "vocab_size": WORDS,
        "width": 64,
        "heads": 4,
        "layers": 2,
    }
    model = open_clip.CLIP(embed_dim=64, vision_cfg=vision, text_cfg=words)
    loss = ClipLoss()
    batch = (torch.randn(BATCH, 3, 32, 32), text())
    return Case(model, batch, loss=lambda output: loss(*output[:3]))


def _coca() -> Case:
    import open_clip
    from open_clip.loss import CoCaLoss

    vision = {
        "image_size": 32,
        "layers": 2,
        "width": 64,
        "patch_size": 8,
        "head_width": 16,
    }
    vision |= {"attentional_pool": True, "attn_pooler_heads": 4, "output_tokens": True}
    words = {
        "context_length": LENGTH,
        "vocab_size": WORDS,
        "width": 64,
        "heads": 4,
        "layers": 2,
    }
    more = {
        "context_length": LENGTH,
        "vocab_size": WORDS,
        "width": 64,
        "heads": 4,
        "layers": 2,
    }
    words |= {"embed_cls": True, "output_tokens": True}
    model = open_clip.CoCa(64, multimodal_cfg=more, text_cfg=words, vision_cfg=vision)
    # Is whatever memory held.
    nn.init.normal_(model.text_decoder.text_projection, std=64**-0.5)
    loss = CoCaLoss(caption_loss_weight=2.0, clip_loss_weight=1.0)

    def total(output: Mapping[str, Any]) -> Tensor:
        return sum(loss(**output))

    return Case(model, (torch.randn(BATCH, 3, 32, 32), text()), loss=total)


STRANGERS = [
    *(Stranger(n, "x-transformers", partial(_decoder, s)) for n, s in DECODERS.items()),
    Stranger("XTransformer", "x-transformers", _x_translator),
    Stranger("ViTransformerWrapper", "x-transformers", _x_image),
    Stranger("ContinuousTransformerWrapper", "x-transformers", _x_continuous),
    *(
        Stranger(name.rpartition(".")[2], library, partial(_language, name, settings))
        for name, (library, settings) in LANGUAGE.items()
    ),
    Stranger("MEGABYTE", "MEGABYTE-pytorch", _megabyte),
    Stranger("Mamba", "mambapy", _mamba),
    Stranger("RetNet", "torchscale", _retnet),
    Stranger("ESM2", "fair-esm", _esm),
    Stranger("CLIP", "open_clip_torch", _clip),
    Stranger("CoCa", "open_clip_torch", _coca),
    *(
        Stranger(name, "transformers", partial(_transformers, name, kind, settings))
        for name, (kind, settings) in TRANSFORMERS.items()
    ),
]
