"""Accelerate, Lightning and Transformers over DDP in two processes, run for real: losses of the
first two are those of a plain loop over DDP, to the bit; and all train on from a checkpoint, in a
new model, as if they had not stopped."""

import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fp8
import unit_scaling as uu
from fp8.adapters import accelerate
from fp8.adapters.lightning import FP8Precision
from fp8.casts.scaled_tensor import dequantized
from tests.fp8.adapters import hub_models
from tests.fp8.adapters.hub_models import transformers
from tests.fp8.adapters.loops import accelerated, plain_loop
from tests.launch import run_ranks
from unit_scaling.transforms import unit_scale

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")
    Accelerator = pytest.importorskip("accelerate").Accelerator

WORLD, BATCH, STEPS, STOP = 2, 4, 8, 4
ROWS = torch.randn(STEPS * BATCH * WORLD, 32, generator=torch.Generator().manual_seed(1))


def batches() -> list[Tensor]:
    """This process's."""
    return list(ROWS[dist.get_rank() :: WORLD].split(BATCH))


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x)


def check_equal(model: nn.Module) -> None:
    """Both processes have the same weights."""
    for p in model.parameters():
        weights = [torch.empty(p.shape) for _ in range(WORLD)]
        dist.all_gather(weights, dequantized(p.detach()))
        assert torch.equal(*weights)


def check_accelerate(level: str | None, folder: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)

    def start():
        accelerator.free_memory()
        return accelerate.prepare(accelerator, *make(), recipe="unit", opt_level=level)

    def train(model, optimizer, data):
        return accelerated(accelerator, model, optimizer, data, loss_of, clip=0.5)

    model, optimizer = start()
    losses = train(model, optimizer, batches()[:STOP])
    accelerator.save_state(str(folder))
    losses += train(model, optimizer, batches()[STOP:])
    other, second = make()
    if level is None:
        fp8.convert(other, "unit")
    else:
        fp8.initialize(other, second, level, "unit")
    ddp = DistributedDataParallel(other)
    assert losses == plain_loop(ddp, second, batches(), loss_of, clip=0.5, every=2)
    check_equal(model)
    model, optimizer = start()
    accelerator.load_state(str(folder))
    assert train(model, optimizer, batches()[STOP:]) == losses[STOP:]


class Lit(lightning.LightningModule):
    def __init__(self, level: str | None) -> None:
        super().__init__()
        self.level, self.losses = level, []
        self.net, self.optimizer = make()
        if level is not None:
            fp8.initialize(self.net, self.optimizer, level, recipe=None)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        loss = loss_of(self.net, batch)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


def check_lightning(level: str | None, folder: Path) -> None:
    def fit(epochs: int, checkpoint: Path | None = None):
        model = Lit(level)
        trainer = lightning.Trainer(
            plugins=FP8Precision("unit"),
            accelerator="cpu",
            devices=WORLD,
            strategy="ddp",
            max_epochs=epochs,
            gradient_clip_val=0.5,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
        data = torch.utils.data.DataLoader(torch.cat(batches()), BATCH)
        trainer.fit(model, data, ckpt_path=checkpoint)
        return model, trainer

    model, _ = fit(2)
    other = Lit(level)
    fp8.convert(other.net, "unit")
    ddp = DistributedDataParallel(other.net)
    assert model.losses == plain_loop(ddp, other.optimizer, batches() * 2, loss_of, clip=0.5)
    check_equal(model)
    fit(1)[1].save_checkpoint(folder / "stopped")
    assert fit(2, folder / "stopped")[0].losses == model.losses[STEPS:]


def llama(level: str | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = hub_models.llama(vocab_size=32, num_hidden_layers=1, tie_word_embeddings=True)
    if level is not None:
        return fp8.initialize(model, torch.optim.AdamW(model.parameters()), level, "tensor")
    model = unit_scale(fp8.convert(model, "unit"))
    groups = uu.optim.scaled_parameters(model.parameters(), "adam", lr=2**-4)
    return model, fp8.optim.AdamW(groups)


def check_transformers(level: str | None, folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    tokens = torch.randint(32, (64, 8), generator=torch.Generator().manual_seed(2))
    arguments = transformers.TrainingArguments(
        folder,
        max_steps=STOP,
        save_steps=STOP // 2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        lr_scheduler_type="constant",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    trained = []
    for checkpoint in (None, str(folder / f"checkpoint-{STOP // 2}")):
        model, optimizer = llama(level)
        trainer = transformers.Trainer(
            model, arguments, train_dataset=rows, optimizers=(optimizer, None)
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        check_equal(model)
        trained.append(model.state_dict())
    assert all(torch.equal(value, trained[1][name]) for name, value in trained[0].items())
    assert model.generate(tokens[:1, :4], max_new_tokens=2, pad_token_id=0).shape == (1, 6)


def check_ranks(rank: int, store: Path) -> None:
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ.update(ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # where they have met
    for check, level in (
        (check_accelerate, "O3"),
        (check_lightning, None),
        (check_lightning, "O2"),
        (check_transformers, "O3"),
    ):
        check(level, store.with_name(f"{check.__name__}-{level}"))
        dist.barrier()


@pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch is built without gloo")
@pytest.mark.timeout(300)
def test_two_processes(tmp_path: Path):
    run_ranks(check_ranks, 2, tmp_path / "store", 280, warnings="ignore")  # libraries' own
