"""The factors of unit scaling in weights: the plain class computes what the model does."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from unit_scaling.transforms import unit_scale
from unit_scaling.transforms.fold import folded
from unit_scaling.transforms.unit_scale import UnitScale

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("default")  # theirs to fix

IDS = torch.arange(24).reshape(2, 12)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}


def build(name: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    return getattr(transformers, f"{name}ForCausalLM")(config).double().eval()


def run(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def plan_of(model: Any) -> Any:
    (scope,) = [scope for scope, _ in model._scopes if isinstance(scope, UnitScale)]
    return next(iter(scope.plans.values()))


@pytest.mark.parametrize("residual", ["fixed", "umup"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Llama", {}),
        ("Llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"}),
        ("Mistral", {}),
        ("Qwen2", {"tie_word_embeddings": False}),
    ],
)
def test_the_plain_class_computes_the_same(name, options, residual):
    """But for eps, 1e-6 of squares that are about 1, in each of 7 norms."""
    model = unit_scale(build(name, **options), residual=residual)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    want = run(model)
    factors, inputs = folded(model, plan_of(model))
    plain = build(name, **options)
    plain.load_state_dict({key: v * factors.get(key, 1) for key, v in model.state_dict().items()})
    assert (run(plain) - want).abs().max() < 7e-6 * want.abs().max()
    assert max(inputs.values()) > 1.5


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("Llama", {"tie_word_embeddings": True}, "its head is tied"),
        ("Llama", {"attn_implementation": "eager"}, "no scaled scaled_dot_product_attention"),
        ("GPTNeoX", {}, "no attribute 'model'"),
        ("Phi3", {"pad_token_id": 0}, "q_proj has no scaled linear"),
        ("Gemma2", {"head_dim": 8, "tie_word_embeddings": False}, "is scaled|has no scaled"),
        ("Granite", {"embedding_multiplier": 3.0}, "is scaled|has no scaled"),
    ],
)
def test_refused_by_name(name, options, why):
    model = unit_scale(build(name, **options))
    run(model)
    with pytest.raises(ValueError, match=why):
        folded(model, plan_of(model))
