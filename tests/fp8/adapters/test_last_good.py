"""The state before a loss spike, kept by real trainers, and `fp8.blame` from there."""

import importlib
import math

import pytest
import torch
from torch import nn

import fp8
from fp8.adapters.last_good import LastGood, lightning_callback, transformers_callback
from tests.fp8.adapters.hub_models import gpt2, quiet, transformers  # noqa: F401
from tests.shared import linears, parametrize, quietly, refuses

with quietly():
    pytest.importorskip("lightning", reason="the library of the callback")
    pytest.importorskip("accelerate", reason="the trainer needs it")
    from transformers import Trainer, TrainingArguments

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries

BAD = 5  # the step whose batch has a value that overflows e4m3
TO_NAN = fp8.Cast(format="e4m3", scaling="unit", overflow="nonfinite")
UNSCALED = fp8.Recipe(name="no scales", input=TO_NAN, weight=TO_NAN)
"""e4m3 without scales: a value above 448 becomes NaN."""


def drive(losses, every, **options):
    """A training whose weight is the number of steps so far."""
    model, good = nn.Linear(1, 1, bias=False), LastGood(every=every, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step, loss in enumerate(losses):
        nn.init.constant_(model.weight, step)
        good.before(step, model, [optimizer])
        good.after(loss, torch.tensor([step]))
    return good


@parametrize("bad", [math.nan, math.inf, 3.0])
@parametrize(("every", "step"), [(1, 5), (4, 4)])
def test_the_last_state_whose_loss_was_fine(bad, every, step, tmp_path):
    good = drive([1.0] * 6 + [bad, 1.0, 1.0], every, path=tmp_path / "good.pt")
    assert good.spiked
    model = nn.Linear(1, 1, bias=False)
    good.restore(model)
    assert float(model.weight) == step
    assert [int(batch) for batch in good.batches] == list(range(step, 7))
    saved = torch.load(tmp_path / "good.pt")
    assert saved["step"] == step
    assert float(saved["model"]["weight"]) == step
    assert len(saved["optimizers"]) == 1


def test_without_a_spike_and_at_the_first_step():
    assert not drive([1.0, 0.5, 0.8, -0.1], 1).spiked
    first = drive([math.nan], 1)
    assert first.spiked
    assert first.state is not None
    with refuses("no state is there to restore"):
        LastGood().restore(nn.Linear(1, 1))
    for name, value, error in (("every", 0, ValueError), ("threshold", 1, ValueError)):
        with refuses(name, error):
            LastGood(**{name: value})


def test_lightning(tmp_path):
    pl = importlib.import_module("lightning.pytorch")
    torch.manual_seed(0)

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self):
            super().__init__()
            self.layers = linears(16, 16, 16)

        def forward(self, x):
            return self.layers(x).square().mean()

        def training_step(self, x, index):
            return self(x)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    data = torch.randn(8, 4, 16)
    data[BAD, 0, 0] = 500.0
    module = fp8.convert(Module(), UNSCALED, backend="simulate")
    callback = lightning_callback(library="lightning", every=1)
    quiet_options = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        callbacks=[callback],
        default_root_dir=tmp_path,
        enable_checkpointing=False,
        **quiet_options,
    ).fit(module, torch.utils.data.DataLoader(data, batch_size=None))
    good = callback.last_good
    assert good.spiked
    assert good.state is not None
    assert good.state.step == BAD - 1
    assert torch.equal(good.batches[-1], data[BAD])
    assert not torch.isfinite(module.layers[0].weight).all()
    good.restore(module)
    result = fp8.blame(module, good.batches[-1], loss=lambda loss: loss)
    assert [(rule.layers, rule.product) for rule in result.rules] == [
        ("layers.0", "input")
    ]


def test_transformers(tmp_path):
    """A weight that overflows from the second step on, as one that grew does."""
    ids = torch.randint(64, (16, 16))
    model = fp8.convert(gpt2(), UNSCALED, backend="simulate")
    callback = transformers_callback(every=1)

    class Growing(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == BAD:
                with torch.no_grad():
                    model.lm_head.weight[0, 0] = 500.0

    arguments = TrainingArguments(
        tmp_path, max_steps=8, per_device_train_batch_size=4, save_strategy="no",
        use_cpu=True, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model,
        arguments,
        train_dataset=[{"input_ids": row, "labels": row} for row in ids],
        callbacks=[callback, Growing()],
    )
    trainer.train()
    good = callback.last_good
    assert good.spiked
    assert good.state is not None
    assert good.state.step == BAD - 1
    assert not model._forward_hooks
    good.restore(model)
    assert all(p.isfinite().all() for p in model.parameters())
    assert not fp8.blame(model, good.batches[-1]).rules
