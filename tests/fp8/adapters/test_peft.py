"""PEFT, run for real: LoRA and DoRA on plain and converted models, and on bases whose
frozen weights are stored in FP8."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8
from fp8.casts.scaled_tensor import ScaledTensor
from tests.fp8.adapters import hub_models
from tests.fp8.adapters.hub_models import quiet, transformers  # noqa: F401

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    peft = pytest.importorskip("peft", reason="the adapters")

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of transformers, by peft

TARGETS = ["q_proj", "v_proj", "down_proj"]


def stored(model: nn.Module) -> nn.Module:
    return fp8.store_frozen(model.requires_grad_(False))


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "fp8": fp8.convert,
    "stored": stored,
    "stored, fp8": lambda model: fp8.convert(stored(model)),
    "fp8, stored": lambda model: stored(fp8.convert(model)),
}
EXACT = ("plain", "stored")
"""Ways without casts, whose logits before and after a merge differ by float32's rounding alone."""

each_way = pytest.mark.parametrize("way", WAYS)
each_kind = pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])


def llama() -> nn.Module:
    torch.manual_seed(0)
    return hub_models.llama(num_hidden_layers=1, tie_word_embeddings=False)


X = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=X).logits


def backward(model: Any) -> float:
    loss = model.train()(input_ids=X, labels=X).loss
    loss.backward()
    return loss.item()


def adapted(model: nn.Module, dora: bool = False) -> Any:
    torch.manual_seed(2)
    config = peft.LoraConfig(r=4, target_modules=TARGETS, use_dora=dora)
    return peft.get_peft_model(model, config)


def train(model: Any, steps: int = 3) -> list[float]:
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=1e-2), []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(backward(model))
        optimizer.step()
    return losses


@pytest.mark.parametrize(
    ("way", "dora", "called"),
    [*((way, False, False) for way in WAYS), ("fp8", True, False), ("fp8", False, True)],
)
def test_adapters_of_zero_change_nothing(way: str, dora: bool, called: bool):
    model = WAYS[way](llama())
    if called:
        logits(model)
    reference = logits(copy.deepcopy(model))
    torch.testing.assert_close(logits(adapted(model, dora)), reference, rtol=0, atol=1e-6)


@pytest.mark.sampled(3)
@each_kind
@each_way
def test_adapters_are_trained_saved_loaded_and_merged(way: str, dora: bool, tmp_path: Path):
    model = adapted(WAYS[way](llama()), dora)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(model)
    assert losses[-1] < losses[0]
    for name, parameter in model.named_parameters():
        assert ("lora_" in name) == (parameter.grad is not None)
        assert "lora_" in name or torch.equal(parameter, before[name])
    trained = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), trained)

    model.save_pretrained(tmp_path / "adapters")
    again = peft.PeftModel.from_pretrained(WAYS[way](llama()), tmp_path / "adapters")
    assert torch.equal(logits(again), trained)
    base = stored(llama()) if "stored" in way else llama()
    plain = logits(peft.PeftModel.from_pretrained(base, tmp_path / "adapters"))

    if "stored" in way:
        fp8.store_frozen(model, None)
    merged = model.merge_and_unload()
    if way in EXACT:
        torch.testing.assert_close(plain, trained, rtol=0, atol=1e-6)
        torch.testing.assert_close(logits(merged), trained, rtol=0, atol=1e-6)
    merged.save_pretrained(tmp_path / "merged")
    final = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(final), plain, rtol=0, atol=1e-6)


def test_adapters_stay_in_high_precision():
    before = adapted(fp8.convert(llama()))
    after = fp8.convert(adapted(llama()), where=lambda name, layer: "lora_" not in name)
    for model in (before, after):
        rows = {row.path: row.done for row in fp8.report(model) if "embed" not in row.path}
        assert len(rows) == 14
        for name, done in rows.items():
            assert (done == "converted") == ("lora_" not in name), name
    train(before)
    train(after)
    assert torch.equal(logits(before), logits(after))


@pytest.mark.parametrize("first", [False, True])
def test_frozen_weights_take_one_byte(first: bool):
    model: Any = adapted(stored(llama())) if first else fp8.store_frozen(adapted(llama()))
    count = sum(isinstance(p, ScaledTensor) for p in model.parameters())
    assert count == 8  # 7 linear layers of the block, and the readout
    train(model)
    kept = [p for p in model.parameters() if isinstance(p, ScaledTensor)]
    assert sum(p.nbytes for p in kept) == sum(p.numel() for p in kept) + 4 * count  # a scale each
    assert all(p.grad is None for p in kept)
    assert all(p.dtype == torch.float32 for n, p in model.named_parameters() if "lora_" in n)


def test_a_stored_weight_is_rounded_once_also_when_loaded():
    plain, model = llama(), stored(llama())
    weight = model.lm_head.weight
    expected = fp8.scaled(plain.lm_head.weight, "e4m3").dequantize()
    assert torch.equal(weight.dequantize(), expected)
    with torch.no_grad():
        plain.lm_head.weight.mul_(3.3)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(weight.dequantize(), fp8.scaled(plain.lm_head.weight, "e4m3").dequantize())
    assert weight.nbytes == weight.numel() + 4
    fp8.store_frozen(model, None)
    assert not any(isinstance(p, ScaledTensor) for p in model.parameters())
    assert type(model) is type(plain)
    assert type(model.lm_head) is nn.Linear


@each_kind
def test_a_merge_into_stored_weights_is_exact(dora: bool):
    model = adapted(stored(llama()), dora)
    train(model)
    before = logits(model)
    merged = model.merge_and_unload(safe_merge=dora)
    torch.testing.assert_close(logits(merged), before, rtol=0, atol=1e-6)
    fp8.store_frozen(merged)  # rounds again
    weight = merged.model.layers[0].self_attn.q_proj.weight
    assert weight.nbytes == weight.numel() + 4


def test_gpt2_stores_its_transposed_layers_and_its_tied_head():
    model = stored(hub_models.gpt2(n_layer=1))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert isinstance(model.lm_head.weight, ScaledTensor)
    assert isinstance(model.transformer.h[0].mlp.c_fc.weight, ScaledTensor)
    lora = peft.LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    train(peft.get_peft_model(model, lora))


def test_storing_nothing_warns_and_bad_formats_are_refused():
    with pytest.warns(fp8.warnings.ConvertWarning, match="requires_grad_"):
        fp8.store_frozen(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match="unknown format 'e2m1'; choose one of 'e4m3'"):
        fp8.store_frozen(nn.Linear(4, 4), "e2m1")
    with pytest.raises(TypeError, match=r"store_frozen needs an nn\.Module"):
        fp8.store_frozen(5)


def test_a_level_is_refused_by_name():
    with pytest.raises(ValueError, match=r"has a level already: .* is a ScaledTensor"):
        fp8.initialize(adapted(stored(llama())), opt_level="O2", recipe=None)


def test_a_stored_layer_is_compiled_and_kept_in_bfloat16():
    model = adapted(fp8.convert(stored(llama().bfloat16())))
    train(model, 1)
    assert model.base_model.model.lm_head.weight.dtype == torch.bfloat16
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(16, 32, dtype=torch.bfloat16)
    compiled = torch.compile(layer, backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x), rtol=2**-7, atol=2**-8)
    assert fp8.store_frozen(model, None).base_model.model.lm_head.weight.dtype == torch.bfloat16
