"""PEFT, run for real: LoRA and DoRA on plain and converted models, and on bases whose
frozen weights are stored in FP8."""

import copy

import pytest
import torch

import fp8
from fp8.casts.scaled_tensor import ScaledTensor
from tests.fp8.adapters import hub_models
from tests.fp8.adapters.hub_models import quiet, transformers  # noqa: F401
from tests.shared import (
    assert_close,
    assert_same,
    descend,
    filterwarnings,
    parametrize,
    quietly,
    sampled,
    seeded,
)

with quietly():
    peft = pytest.importorskip("peft", reason="the adapters")

# Of transformers, by peft.
pytestmark = filterwarnings("ignore::FutureWarning")

TARGETS = ["q_proj", "v_proj", "down_proj"]


def stored(model):
    return fp8.store_frozen(model.requires_grad_(False))


WAYS = {
    "plain": lambda model: model,
    "fp8": fp8.convert,
    "stored": stored,
    "stored, fp8": lambda model: fp8.convert(stored(model)),
    "fp8, stored": lambda model: stored(fp8.convert(model)),
}
EXACT = ("plain", "stored")
"""Ways without casts, whose logits before and after a merge differ by float32's rounding alone."""

each_way = parametrize("way", WAYS)
each_kind = parametrize("dora", [False, True])


def llama():
    torch.manual_seed(0)
    return hub_models.llama(num_hidden_layers=1, tie_word_embeddings=False)


X = torch.randint(64, (2, 16), generator=seeded(1))


@torch.no_grad()
def logits(model):
    return model.eval()(input_ids=X).logits


def adapted(model, dora=False):
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, target_modules=TARGETS, use_dora=dora)
    return peft.get_peft_model(model, config)


def train(model, steps=3):
    trained = [p for p in model.parameters() if p.requires_grad]
    model.train()
    losses = (model(input_ids=X, labels=X).loss for _ in range(steps))
    return descend(torch.optim.AdamW(trained, lr=1e-2), losses)


@sampled(3)
@each_kind
@each_way
def test_adapters_are_trained_saved_loaded_and_merged(way, dora, tmp_path):
    model = adapted(WAYS[way](llama()), dora)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(model)
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        assert ("lora_" in name) == (parameter.grad is not None)
        assert "lora_" in name or torch.equal(parameter, before[name])
    trained = logits(model)
    assert_same(logits(copy.deepcopy(model)), trained)

    model.save_pretrained(tmp_path / "adapters")
    again = peft.PeftModel.from_pretrained(WAYS[way](llama()), tmp_path / "adapters")
    assert_same(logits(again), trained)
    base = stored(llama()) if "stored" in way else llama()
    plain = logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapters"))

    if "stored" in way:
        fp8.store_frozen(model, None)
    merged = model.merge_and_unload()
    if way in EXACT:
        assert_close(plain, trained, rtol=0, atol=1e-6)
        assert_close(logits(merged), trained, rtol=0, atol=1e-6)
    merged.save_pretrained(tmp_path / "merged")
    final = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    assert_close(logits(final), plain, rtol=0, atol=1e-6)


def test_gpt2_stores_its_transposed_layers_and_its_tied_head():
    model = stored(hub_models.gpt2(n_layer=1))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert isinstance(model.lm_head.weight, ScaledTensor)
    assert isinstance(model.transformer.h[0].mlp.c_fc.weight, ScaledTensor)
    lora = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    train(peft.get_peft_model(model, lora))
