"""Models of the library transformers: the plain class refuses the files of unit-scaled ones."""

from __future__ import annotations

import copy
import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import unit_scaling as uu
from tests.transforms.models import plan_of
from unit_scaling.transforms import unit_scale

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

IDS = torch.arange(24).reshape(2, 12)


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


def loaded(folder: Path) -> nn.Module:
    """A unit-scaled model that has not run, with the weights and the plan of a folder."""
    model = unit_scale(gpt2(seed=1))
    lost = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert lost == (["lm_head.weight"], [])  # which is tied
    return model


def test_back_with_its_plan(tmp_path):
    """The same bits, without a recording."""
    model = scaled()
    model.save_pretrained(tmp_path)
    again = loaded(tmp_path)
    assert plan_of(again) == plan_of(model)
    assert torch.equal(logits(again), logits(model))


@pytest.mark.parametrize("cls", ["GPT2LMHeadModel", "AutoModelForCausalLM", "AutoModel"])
def test_the_plain_class_refuses_the_files(cls, tmp_path):
    model = scaled()
    for i, part in enumerate((model, model.transformer)):
        part.save_pretrained(tmp_path / str(i))
        with pytest.raises(ValueError, match="Load them by load_state_dict into"):
            getattr(transformers, cls).from_pretrained(tmp_path / str(i))
    assert not hasattr(model.config, "transformers_weights")
    with pytest.raises(ValueError, match=r"push_to_hub: .* unit_scale\(model, batch="):
        model.save_pretrained(tmp_path, push_to_hub=True)


def test_plain_files(tmp_path):
    """Of a batch, and of weights that are not those of the model."""
    batched = unit_scale(gpt2(), batch={"input_ids": IDS})
    batched.save_pretrained(tmp_path / "0")
    scaled().save_pretrained(tmp_path / "1", state_dict=gpt2().state_dict())
    for i, model in enumerate((batched, gpt2())):
        plain = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / str(i))
        torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)


def trainer(model: nn.Module, folder: Path) -> Any:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(64, (16, 12), generator=generator)
    options = {"max_steps": 4, "save_steps": 2, "report_to": [], "use_cpu": True}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4, disable_tqdm=True, **options
    )
    optimizer = uu.optim.AdamW(model.parameters(), lr=2**-6)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    return transformers.Trainer(
        model, arguments, train_dataset=rows, optimizers=(optimizer, constant)
    )


def test_trainer(tmp_path):
    """It saves the model and goes on from a checkpoint."""
    pytest.importorskip("accelerate")
    model = unit_scale(gpt2())
    model(input_ids=IDS, labels=IDS)
    start = copy.deepcopy(model)
    run = trainer(model, tmp_path / "run")
    run.train()
    run.save_model(str(tmp_path / "saved"))
    want = logits(model)
    assert torch.equal(logits(loaded(tmp_path / "saved")), want)
    resumed = trainer(start, tmp_path / "run")
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert torch.equal(logits(start), want)
