"""The Trainer of the library transformers, run for real on the CPU with models converted before."""

from copy import deepcopy

import pytest
import torch

import fp8
import unit_scaling as uu
from tests.fp8.adapters.hub_models import gpt2, llama, quiet, transformers  # noqa: F401
from tests.fp8.adapters.loops import plain_loop
from tests.shared import parametrize, quietly, sampled, seeded, theirs
from unit_scaling.transforms import unit_scale

with quietly():
    pytest.importorskip("accelerate", reason="the trainer needs it")
    from transformers import Trainer, TrainingArguments


pytestmark = theirs


MODELS = {"gpt2": gpt2, "llama": llama}
WAYS = {
    "fp8": lambda model: fp8.convert(model, "tensor"),
    "delayed": lambda model: fp8.convert(model, "delayed"),
    "unit": unit_scale,
}


def data():
    generator = seeded(1)
    rows = [torch.randint(64, (16,), generator=generator) for _ in range(32)]
    # Has nothing before it; not all models leave it out of a count.
    first = torch.arange(16) == 0
    return [{"input_ids": row, "labels": row.masked_fill(first, -100)} for row in rows]


def optimizer(model):
    if hasattr(model.lm_head.weight, "mup_type"):
        return uu.optim.AdamW(model.parameters(), lr=2**-4)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def trainer(model, folder, **options):
    arguments = TrainingArguments(
        folder,
        **{
            "max_steps": 4,
            "per_device_train_batch_size": 8,
            "logging_steps": 1,
            **options,
        },
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="steps",
        save_steps=2,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
    )
    return Trainer(
        model, arguments, train_dataset=data(), optimizers=(optimizer(model), None)
    )


def losses(trained):
    return [row["loss"] for row in trained.state.log_history if "loss" in row]


def loss_of(model, batch):
    """The sum, divided as the Trainer has it."""
    return model(**batch, num_items_in_batch=(batch["labels"] != -100).sum()).loss


def same_weights(one, other):
    want = dict(other.named_parameters())
    return all(torch.equal(value, want[name]) for name, value in one.named_parameters())


@sampled(3)
@parametrize("way", WAYS)
@parametrize("name", MODELS)
def test_the_same_as_a_plain_loop(name, way, tmp_path):
    model = WAYS[way](MODELS[name]())
    other = deepcopy(model)
    trained = trainer(model, tmp_path)
    batches = list(deepcopy(trained).get_train_dataloader())
    trained.train()
    assert losses(trained) == plain_loop(
        other.train(), optimizer(other), batches, loss_of
    )
    assert same_weights(model, other)


@parametrize("name", ["gpt2", "llama"])
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
    assert (model.lm_head.weight is model.get_input_embeddings().weight) == (
        name == "gpt2"
    )
