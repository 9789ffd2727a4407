"""What a preflight says of a cache of keys and values in FP8."""

import json
import math
import subprocess
import sys

import pytest
import torch
from torch import nn

import fp8
from fp8.adapters.transformers import cache_errors, cache_found, has_cache
from fp8.lab.preflight.preflight import Preflight
from tests.fp8.lab.preflight.test_sources import LLAMA_7B

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def model(kind: str = "llama", **values):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SMALL, **values)
    return transformers.AutoModelForCausalLM.from_config(config)


def batch(seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def test_bytes_are_those_of_a_count_by_hand_and_logits_those_of_cache_errors():
    """Keys and values of 2 layers x 2 heads x 8: a byte each, and a float32 scale for each head."""
    small = model()
    found = cache_found(small, batch())
    assert small.training
    assert (found["bytes"], found["bytes_bf16"]) == (2 * 2 * 2 * (8 + 4), 2 * 2 * 2 * 8 * 2)
    (row,) = cache_errors(small.eval(), batch()["input_ids"], scalings=("token",))
    assert (found["kl"], found["largest"]) == (row.kl, row.largest)
    assert 0 < found["kl"] < 0.1


def test_bytes_of_the_full_size_need_no_memory():
    values = dict(LLAMA_7B)
    with torch.device("meta"):
        config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
        full = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    found = cache_found(model(), batch(), full)
    assert found["bytes_bf16"] == 2 * 32 * 4096 * 2
    assert found["bytes"] == 2 * 32 * (4096 + 32 * 4)


def test_what_has_no_cache():
    small = model()
    assert has_cache(small, batch())
    assert not has_cache(nn.Linear(2, 2), batch())
    assert not has_cache(small, batch()["input_ids"])
    assert not has_cache(small, {"inputs_embeds": torch.zeros(2, 12, 32)})
    assert not has_cache(model(use_cache=False), batch())


def measured(of: nn.Module) -> Preflight:
    batches = [batch(seed) for seed in range(6)]
    how = {"recipes": ("tensor",), "steps": 3, "held_out": 2, "max_seeds": 1, "transforms": False}
    return fp8.preflight(of, batches, progress=False, budget=60.0, **how)


def test_a_preflight_says_it_after_training():
    report = measured(model())
    found = report.findings.cache
    assert found["bytes"] == 96
    assert math.isfinite(found["kl"])
    assert found != cache_found(model(), batch())  # the weights were trained
    text = "A cache of keys and values takes 96 bytes per token in FP8, 128 in bf16; the next-token"
    assert any(line.startswith(text) for line in report.findings.verdict.reasons)
    again = fp8.lab.preflight.findings.Findings.from_dict(json.loads(report.to_json()))
    assert again.cache == found


def test_a_cache_of_another_kind_is_noted():
    report = measured(model("mistral", sliding_window=4))
    assert report.findings.cache == {}
    assert any("DynamicSlidingWindowLayer" in note for note in report.findings.notes)


def test_other_models_import_nothing_of_the_library():
    """Its base class takes seconds to import, or may not import at all."""
    lines = ["import sys, transformers, torch", "from fp8.adapters.transformers import has_cache"]
    lines += ["assert not has_cache(torch.nn.Linear(4, 4), torch.ones(2, 4))"]
    lines += ["assert 'transformers.modeling_utils' not in sys.modules"]
    subprocess.run([sys.executable, "-W", "ignore", "-c", "\n".join(lines)], check=True)
