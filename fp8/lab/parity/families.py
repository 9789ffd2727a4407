"""Small models of five families of transformers, with random weights, for certificates.

Each function returns (model, prompts), as ``fp8 parity`` takes them. Layers have the sizes of whole
blocks of 128 x 128. Nothing is fetched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...common.libraries import need

WORDS = 512

_COMMON: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    # Logits of random weights that differ by several nats.
    "initializer_range": 0.08,
    "pad_token_id": 0,
}

Setup = tuple[nn.Module, list[Tensor]]


def _family(kind: str, **options: Any) -> Setup:
    transformers = need("transformers")
    config = transformers.AutoConfig.for_model(kind, **_COMMON | options)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            # A new norm multiplies by 1, which no order of roundings shows.
            if "norm" in name and p.dim() == 1:
                p.add_(0.3 * torch.randn(p.shape, generator=generator).to(p.dtype))
    prompts = torch.randint(1, WORDS, (4, 32), generator=generator)
    return model.eval(), [*prompts.split(2)]


def llama() -> Setup:
    """Llama."""
    return _family("llama", intermediate_size=512)


def qwen() -> Setup:
    """Qwen3, with norms of queries and keys."""
    return _family("qwen3", intermediate_size=512, head_dim=64)


def gemma() -> Setup:
    """Gemma 2: norms that multiply by 1 + weight, four in a block, and capped logits."""
    return _family("gemma2", intermediate_size=512, head_dim=64)


def mixture() -> Setup:
    """Qwen3 with a mixture of experts."""
    return _family(
        "qwen3_moe",
        intermediate_size=512,
        moe_intermediate_size=128,
        num_experts=4,
        num_experts_per_tok=2,
        head_dim=64,
        # Whose products are those of linear layers, with exact sums.
        experts_implementation="eager",
    )


def hybrid() -> Setup:
    """LFM2: short convolutions and attention in turn."""
    return _family(
        "lfm2",
        intermediate_size=512,
        layer_types=["conv", "full_attention"],
        block_auto_adjust_ff_dim=False,
    )
