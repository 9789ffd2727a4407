"""Models of the library transformers: files that say how they are unit-scaled."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from unit_scaling.transforms import unit_scale
from unit_scaling.transforms.state import MARKER

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

IDS = torch.arange(24).reshape(2, 12)
CLASSES = ["GPT2LMHeadModel", "AutoModelForCausalLM"]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    torch.manual_seed(0)
    logging.getLogger("transformers").setLevel(logging.ERROR)


def gpt2(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, "vocab_size": 64}
    drop = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **drop, **ends))


def scaled(**options: Any) -> nn.Module:
    model = unit_scale(gpt2(), **options)
    model(input_ids=IDS, labels=IDS).loss.backward()
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model.eval()(input_ids=IDS).logits


def config_in(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def loss_and_grads(model: Any) -> list[Tensor]:
    model.train().zero_grad()
    loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("cls", CLASSES)
def test_back_with_its_plan(cls, tmp_path):
    """The same bits, forward and backward, without a recording; saved and loaded again."""
    model = scaled()
    model.save_pretrained(tmp_path / "one")
    assert config_in(tmp_path / "one")["quantization_config"]["quant_method"] == "unit_scale"
    again = getattr(transformers, cls).from_pretrained(tmp_path / "one")
    assert uu.plan(again) == uu.plan(model)
    for a, b in zip(loss_and_grads(again), loss_and_grads(model), strict=True):
        assert torch.equal(a, b)
    tags = [[(p.mup_type, p.mup_divisor) for p in m.parameters()] for m in (again, model)]
    assert tags[0] == tags[1]
    again.save_pretrained(tmp_path / "two")
    third = getattr(transformers, cls).from_pretrained(tmp_path / "two")
    assert torch.equal(logits(third), logits(model))
    assert torch.equal(logits(pickle.loads(pickle.dumps(again))), logits(model))
    want = logits(again)
    torch.testing.assert_close(logits(uu.fold(again)), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cls", [*CLASSES, "AutoModel"])
def test_without_the_transform_it_fails_by_name(cls, tmp_path, monkeypatch):
    scaled().save_pretrained(tmp_path)
    auto = transformers.quantizers.auto
    monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, "unit_scale")
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "unit_scale")
    with pytest.raises(ValueError, match=r"Call unit_scaling\.register_transformers\(\) before"):
        getattr(transformers, cls).from_pretrained(tmp_path)
    uu.register_transformers()
    if cls != "AutoModel":
        getattr(transformers, cls).from_pretrained(tmp_path)


def test_what_has_not_run_yet(tmp_path):
    """It is saved with its weights and settings, and finds its factors at its first call."""
    model = unit_scale(gpt2(), residual="umup").eval()
    model.save_pretrained(tmp_path)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    tokens = torch.arange(8)[None]
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert uu.plan(again) == uu.plan(model)


def test_the_configuration_of_the_model_is_its_own(tmp_path):
    model = scaled()
    model.save_pretrained(tmp_path)
    assert not hasattr(model.config, "quantization_config")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    own = {"quantization_config", "transformers_weights", "_is_quantized"}
    assert not own & vars(again.config).keys()
    assert not getattr(again, "is_quantized", False)


def test_plain_files(tmp_path):
    """Of what is folded, of init="preserve", and of weights that are not those of the model."""
    folded, preserved = uu.fold(scaled()), unit_scale(gpt2(), init="preserve")
    for i, model in enumerate((folded, preserved)):
        model.save_pretrained(tmp_path / str(i))
        assert (
            not {"quantization_config", "transformers_weights"}
            & config_in(tmp_path / str(i)).keys()
        )
        plain = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / str(i))
        torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)
    model = scaled()
    model.save_pretrained(tmp_path / "2", state_dict=gpt2().state_dict())
    plain = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "2")
    assert torch.equal(logits(plain), logits(gpt2()))


def test_refused_by_name(tmp_path):
    model = scaled()
    with pytest.raises(ValueError, match="transformer is a part of a unit-scaled model: save the"):
        model.transformer.save_pretrained(tmp_path)
    replaced = scaled(replace={F.dropout: F.dropout})
    replaced.save_pretrained(tmp_path / "replaced")
    with pytest.raises(ValueError, match=r"functions in unit_scale\(replace=\.\.\.\)"):
        transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "replaced")
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="the plan is of another model than this GPT2Model"):
        transformers.AutoModel.from_pretrained(tmp_path / "other")


def rows() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(64, (12,), generator=generator) for _ in range(16)]
    return [{"input_ids": row, "labels": row} for row in ids]


def trainer(model: nn.Module, folder: Path, **options: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=4,
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        **options,
    )
    optimizer = uu.optim.AdamW(model.parameters(), lr=2**-6)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return transformers.Trainer(
        model, arguments, train_dataset=rows(), optimizers=(optimizer, constant)
    )


def test_trainer(tmp_path):
    """It saves the model, goes on from a checkpoint, and trains what from_pretrained gives."""
    pytest.importorskip("accelerate")
    model = unit_scale(gpt2())
    model(input_ids=IDS, labels=IDS)
    start = copy.deepcopy(model)
    run = trainer(model, tmp_path / "run")
    run.train()
    run.save_model(str(tmp_path / "saved"))
    want = logits(model)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits(again), want)
    resumed = trainer(start, tmp_path / "run")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert torch.equal(logits(start), want)
    trainer(again.train(), tmp_path / "more").train()
    assert not torch.equal(logits(again), want)
    assert MARKER in again.state_dict()


def test_other_models_import_nothing_of_the_library():
    """Its base class takes seconds to import, and no model of another library has it."""
    lines = ["import sys, transformers, torch", "from unit_scaling.transforms import unit_scale"]
    lines += ["unit_scale(torch.nn.Linear(4, 4))(torch.ones(2, 4)).sum().backward()"]
    lines += ["assert 'transformers.modeling_utils' not in sys.modules"]
    subprocess.run([sys.executable, "-W", "ignore", "-c", "\n".join(lines)], check=True)
