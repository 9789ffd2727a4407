"""litgpt, run for real: its pretraining, with our plugin of Lightning's Fabric."""

import sys

import pytest
import torch
from torch.utils.data import DataLoader

import fp8
from fp8.adapters.lightning import FP8FabricPrecision
from tests.shared import proves, seeded, theirs

litgpt = pytest.importorskip("litgpt", reason="its own environment: make test-engines")
import lightning  # noqa: E402
from litgpt import pretrain  # noqa: E402
from litgpt.args import EvalArgs, TrainArgs  # noqa: E402
from litgpt.data import DataModule  # noqa: E402

pytestmark = theirs  # of litgpt and what it imports

LENGTH, BATCH, STEPS = 16, 4, 6
ROWS = torch.randint(64, (STEPS * BATCH, LENGTH + 1), generator=seeded(0))
CONFIG = {
    "name": "tiny",
    "block_size": LENGTH,
    "vocab_size": 64,
    "padded_vocab_size": 64,
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "rotary_percentage": 1.0,
    "parallel_residual": False,
    "bias": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
    "intermediate_size": 64,
}


class Tokens(DataModule):
    def connect(self, tokenizer=None, batch_size=1, max_seq_length=0):
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(ROWS, self.batch_size)

    def val_dataloader(self):
        return DataLoader(ROWS[:BATCH], self.batch_size)


@pytest.fixture(autouse=True)
def _command(monkeypatch):
    """litgpt saves the arguments of its command line beside the weights."""
    monkeypatch.setattr(sys, "argv", ["litgpt", "pretrain", "tiny"])


def pretrained(folder, plugins):
    """The weights that ``litgpt pretrain`` saves, whose main function this is."""
    fabric = lightning.Fabric(accelerator="cpu", devices=1, plugins=plugins)
    fabric.launch()
    train = TrainArgs(
        save_interval=100,
        log_interval=1,
        global_batch_size=BATCH,
        micro_batch_size=BATCH,
        max_tokens=STEPS * BATCH * LENGTH,
        max_norm=1.0,
        lr_warmup_steps=1,
        tie_embeddings=False,
    )
    with torch.compiler.set_stance("force_eager"):  # it compiles the model
        pretrain.main(
            fabric=fabric,
            devices=1,
            seed=0,
            initial_checkpoint_dir=None,
            resume=False,
            config=litgpt.Config(**CONFIG),
            data=Tokens(),
            out_dir=folder,
            tokenizer_dir=None,
            tokenizer=None,
            train=train,
            eval=EvalArgs(interval=100, max_iters=1),
            optimizer="AdamW",
        )
    return torch.load(folder / "final" / "lit_model.pth", weights_only=False)["model"]


def differs(one, other):
    assert one.keys() == other.keys()
    return any(not torch.equal(weight, other[name]) for name, weight in one.items())


@proves("the field", "in litgpt's pretraining", how="library")
def test_pretrain(tmp_path, monkeypatch):
    """The plugin trains as a model that the caller has converted, to the bit."""
    plugin = FP8FabricPrecision("tensor", where=lambda name, layer: name != "lm_head")
    trained = pretrained(tmp_path / "plugin", [plugin])
    plain = pretrained(tmp_path / "plain", [])
    make = pretrain.GPT
    monkeypatch.setattr(
        pretrain,
        "GPT",
        lambda config: fp8.convert(
            make(config), "tensor", where=lambda n, m: n != "lm_head"
        ),
    )
    by_hand = pretrained(tmp_path / "hand", [])
    assert not differs(trained, by_hand)
    assert differs(trained, plain)
