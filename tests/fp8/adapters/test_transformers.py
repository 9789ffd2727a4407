"""The Trainer of the library transformers, run for real on the CPU with models converted before."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8
import unit_scaling as uu
from tests.fp8.adapters.hub_models import gpt2, llama, quiet, transformers  # noqa: F401
from tests.fp8.adapters.loops import plain_loop
from unit_scaling.transforms import unit_scale

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("accelerate", reason="the trainer needs it")
    from transformers import Trainer, TrainingArguments

pytestmark = pytest.mark.filterwarnings("ignore")  # its own


def both(model: nn.Module) -> nn.Module:
    return unit_scale(fp8.convert(model, "unit"))


MODELS = {"gpt2": gpt2, "llama": llama}
WAYS = {
    "fp8": lambda model: fp8.convert(model, "tensor"),
    "delayed": lambda model: fp8.convert(model, "delayed"),
    "unit": unit_scale,
    "both": both,
}


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(64, (16,), generator=generator) for _ in range(32)]
    first = torch.arange(16) == 0  # has nothing before it; not all models leave it out of a count
    return [{"input_ids": row, "labels": row.masked_fill(first, -100)} for row in rows]


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    if hasattr(model.lm_head.weight, "mup_type"):
        return uu.optim.AdamW(model.parameters(), lr=2**-4)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def trainer(model: nn.Module, folder: Path, **options: Any) -> Any:
    arguments = TrainingArguments(
        folder,
        **{"max_steps": 4, "per_device_train_batch_size": 8, "logging_steps": 1, **options},
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="steps",
        save_steps=2,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
    )
    return Trainer(model, arguments, train_dataset=data(), optimizers=(optimizer(model), None))


def losses(trained: Any) -> list[float]:
    return [row["loss"] for row in trained.state.log_history if "loss" in row]


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The sum, divided as the Trainer has it."""
    return model(**batch, num_items_in_batch=(batch["labels"] != -100).sum()).loss


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    want = dict(other.named_parameters())
    return all(torch.equal(value, want[name]) for name, value in one.named_parameters())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_as_a_plain_loop(name, way, tmp_path):
    model = WAYS[way](MODELS[name]())
    other = copy.deepcopy(model)
    trained = trainer(model, tmp_path)
    batches = list(copy.deepcopy(trained).get_train_dataloader())
    trained.train()
    assert losses(trained) == plain_loop(other.train(), optimizer(other), batches, loss_of)
    assert same_weights(model, other)


@pytest.mark.parametrize("way", ["delayed", "both"])
def test_resumed_as_if_it_had_not_stopped(way, tmp_path):
    model = WAYS[way](llama())
    other = copy.deepcopy(model)
    trainer(model, tmp_path).train()
    again = trainer(other, tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert same_weights(model, other)


@pytest.mark.parametrize(("name", "way"), [("gpt2", "fp8"), ("llama", "both"), ("gpt2", "both")])
def test_checkpointed_activations(name, way, tmp_path):
    model = WAYS[way](MODELS[name]())
    other = copy.deepcopy(model)
    trainer(model, tmp_path / "a").train()
    trainer(other, tmp_path / "b", gradient_checkpointing=True).train()
    assert same_weights(model, other)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_saved_and_loaded(name, tmp_path):
    """Names, ties and values are those of the plain model, before and after."""
    model = MODELS[name]()
    kind = type(model)
    names = set(model.state_dict())
    model = WAYS["fp8"](model)
    trainer(model, tmp_path).save_model(tmp_path / "saved")
    loaded, said = kind.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(said.values())
    assert set(loaded.state_dict()) == names == set(model.state_dict())
    assert same_weights(loaded, model)
    embedding = loaded.get_input_embeddings().weight
    assert (loaded.lm_head.weight is embedding) == (name == "gpt2")
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == (name == "gpt2")


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_unit_scaled_model_is_loaded_as_a_plain_one(name, tmp_path):
    model = WAYS["unit"](MODELS[name]())
    trained = trainer(model, tmp_path)
    trained.train()
    trained.save_model(tmp_path / "saved")
    again, said = type(model).from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not any(said.values())
    assert same_weights(again, model)
    tokens = data()[0]["input_ids"][None]
    with torch.no_grad():
        assert torch.equal(again.eval()(tokens).logits, model.eval()(tokens).logits)


@pytest.mark.parametrize(
    ("name", "way"), [("gpt2", "unit"), ("llama", "unit"), ("llama", "delayed")]
)
def test_generation(name, way):
    """With its cache of keys and values, the tokens that a call of the whole model gives."""
    model = WAYS[way](MODELS[name]()).eval()
    prompt = torch.randint(64, (2, 5))
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
    assert tokens.shape == (2, 11)
    if way == "unit":  # the others round what is summed, which a cache splits
        with torch.no_grad():
            want = model(tokens[:, :-1]).logits.argmax(-1)[:, 4:]
        assert torch.equal(tokens[:, 5:], want)
