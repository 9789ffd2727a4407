"""Architectures of the transformers library in small configurations, and a batch for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["ZOO", "Entry"]

LENGTH, VOCABULARY = 32, 128

#: Settings under the names that most configurations use; each takes those that it knows.
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "d_model": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
    "decoder_start_token_id": 2,
}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}

IMAGE = {"image_size": 32, "num_channels": 3, "patch_size": 8, "num_labels": 10}

WAVE = {
    "conv_dim": (32, 32),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "mask_time_prob": 0.0,
    "layerdrop": 0.0,
    "vocab_size": 32,
}


def ids(*, labels: bool = True) -> dict[str, Tensor]:
    tokens = torch.randint(3, VOCABULARY, (8, LENGTH))
    return (
        {"input_ids": tokens, "labels": tokens.clone()}
        if labels
        else {"input_ids": tokens}
    )


def classified(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch | {"labels": torch.randint(10, (len(next(iter(batch.values()))),))}


def images(size: int = 32) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(8, 3, size, size)}


def waves() -> dict[str, Tensor]:
    return {
        "input_values": torch.randn(4, 1024),
        "labels": torch.randint(1, 32, (4, 8)),
    }


def spectra(name: str, *shape: int) -> dict[str, Tensor]:
    return {name: torch.randn(4, *shape)}


def captioned() -> dict[str, Any]:
    return ids(labels=False) | images() | {"return_loss": True}


@dataclass(frozen=True)
class Entry:
    """A model: its class, what kind it is, settings of its configuration, and its batch."""

    model: str
    kind: str
    settings: Mapping[str, Any]
    batch: Callable[[], dict[str, Any]]


def _language(model: str, kind: str = "language", **settings: Any) -> Entry:
    return Entry(model, kind, SIZES | settings, ids)


def _translation(model: str, **settings: Any) -> Entry:
    return Entry(model, "encoder-decoder", ENCODER_DECODER | settings, ids)


def _vision(model: str, size: int = 32, **settings: Any) -> Entry:
    sizes = SIZES | IMAGE | {"image_size": size} | settings
    return Entry(model, "vision", sizes, lambda: classified(images(size)))


ZOO: dict[str, Entry] = {
    "GPT-2": _language(
        "GPT2LMHeadModel", n_embd=64, n_layer=2, n_head=4, n_positions=LENGTH
    ),
    "GPT-Neo": _language(
        "GPTNeoForCausalLM",
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    ),
    "GPT-NeoX": _language("GPTNeoXForCausalLM"),
    "GPT-J": _language(
        "GPTJForCausalLM",
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_positions=LENGTH,
        rotary_dim=8,
    ),
    "OPT": _language("OPTForCausalLM", ffn_dim=128, word_embed_proj_dim=64),
    "BLOOM": _language("BloomForCausalLM", n_layer=2, n_head=4),
    "Llama": _language("LlamaForCausalLM"),
    "Mistral": _language("MistralForCausalLM"),
    "Qwen2": _language("Qwen2ForCausalLM"),
    "Qwen3": _language("Qwen3ForCausalLM"),
    "Gemma": _language("GemmaForCausalLM"),
    "Gemma 2": _language(
        "Gemma2ForCausalLM", query_pre_attn_scalar=16, sliding_window=16
    ),
    "Phi": _language("PhiForCausalLM"),
    "Phi-3": _language("Phi3ForCausalLM"),
    "Falcon": Entry(
        "FalconForCausalLM",
        "language",
        {k: v for k, v in SIZES.items() if k != "head_dim"},
        ids,
    ),
    "StableLM": _language("StableLmForCausalLM"),
    "OLMo": _language("OlmoForCausalLM"),
    "OLMo 2": _language("Olmo2ForCausalLM"),
    "Cohere": _language("CohereForCausalLM"),
    "Granite": _language("GraniteForCausalLM"),
    "Mixtral": _language(
        "MixtralForCausalLM", "mixture of experts", num_local_experts=4
    ),
    "Qwen2-MoE": _language(
        "Qwen2MoeForCausalLM",
        "mixture of experts",
        **EXPERTS,
        shared_expert_intermediate_size=64,
    ),
    "OLMoE": _language("OlmoeForCausalLM", "mixture of experts", **EXPERTS),
    "Mamba": _language("MambaForCausalLM", "state space", state_size=8),
    "Mamba 2": _language(
        "Mamba2ForCausalLM",
        "state space",
        state_size=8,
        num_heads=8,
        head_dim=16,
        n_groups=1,
        chunk_size=8,
    ),
    "RWKV": _language(
        "RwkvForCausalLM",
        "state space",
        attention_hidden_size=64,
        context_length=LENGTH,
    ),
    "BERT": _language("BertForMaskedLM", "encoder"),
    "RoBERTa": _language(
        "RobertaForMaskedLM", "encoder", max_position_embeddings=LENGTH + 1
    ),
    "DistilBERT": _language(
        "DistilBertForMaskedLM",
        "encoder",
        dim=64,
        hidden_dim=128,
        n_layers=2,
        n_heads=4,
    ),
    "ALBERT": _language("AlbertForMaskedLM", "encoder", embedding_size=32),
    "ELECTRA": _language("ElectraForMaskedLM", "encoder", embedding_size=32),
    "DeBERTa-v2": _language(
        "DebertaV2ForMaskedLM",
        "encoder",
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        max_relative_positions=16,
    ),
    "ModernBERT": _language("ModernBertForMaskedLM", "encoder"),
    "T5": _translation(
        "T5ForConditionalGeneration", d_kv=16, d_ff=128, num_layers=2, num_heads=4
    ),
    "BART": _translation("BartForConditionalGeneration"),
    "Pegasus": _translation("PegasusForConditionalGeneration"),
    "Marian": _translation("MarianMTModel"),
    "ViT": _vision("ViTForImageClassification"),
    "DeiT": _vision("DeiTForImageClassification"),
    "BEiT": _vision("BeitForImageClassification"),
    "Swin": Entry(
        "SwinForImageClassification",
        "vision",
        IMAGE
        | {"patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4]}
        | {"window_size": 4},
        lambda: classified(images()),
    ),
    "ConvNeXt": _vision(
        "ConvNextForImageClassification",
        num_stages=2,
        depths=[2, 2],
        hidden_sizes=[32, 64],
    ),
    "ConvNeXt V2": _vision(
        "ConvNextV2ForImageClassification",
        num_stages=2,
        depths=[2, 2],
        hidden_sizes=[32, 64],
    ),
    "ResNet": _vision(
        "ResNetForImageClassification",
        64,
        embedding_size=16,
        hidden_sizes=[32, 64, 128, 256],
    ),
    "DINOv2": _vision("Dinov2ForImageClassification", mlp_ratio=2),
    "SegFormer": _vision(
        "SegformerForImageClassification",
        depths=[1, 1],
        num_encoder_blocks=2,
        hidden_sizes=[32, 64],
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
    ),
    "Wav2Vec2": Entry("Wav2Vec2ForCTC", "speech", SIZES | WAVE, waves),
    "HuBERT": Entry("HubertForCTC", "speech", SIZES | WAVE, waves),
    "Whisper": Entry(
        "WhisperForConditionalGeneration",
        "speech",
        ENCODER_DECODER
        | {
            "max_source_positions": LENGTH,
            "max_target_positions": LENGTH,
            "num_mel_bins": 16,
        },
        lambda: {
            "input_features": torch.randn(4, 16, 2 * LENGTH),
            "labels": torch.randint(3, VOCABULARY, (4, LENGTH)),
        },
    ),
    "AST": Entry(
        "ASTForAudioClassification",
        "speech",
        SIZES | IMAGE | {"num_mel_bins": 16, "max_length": 64, "time_stride": 8},
        lambda: classified(spectra("input_values", 64, 16)),
    ),
    "CLIP": Entry(
        "CLIPModel",
        "multimodal",
        {
            "text_config": SIZES,
            "vision_config": SIZES | IMAGE,
            "projection_dim": 64,
        },
        captioned,
    ),
}
