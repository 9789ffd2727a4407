"""Training of a `Problem` by transformers' Trainer."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fp8.lab.preflight.training import Problem, loss_of


def held_out_by_trainer(
    problem: Problem,
    seed: int,
    transform: Callable[[nn.Module], nn.Module],
    make: Callable[[Iterator[nn.Parameter]], Optimizer],
    warmup: int,
) -> float:
    """The held-out loss of a model of transformers after training with Trainer's defaults but for
    its schedule, a warmup and a cosine to 0; infinite if the run diverged. The optimizer is made of
    a model that has not run, as Trainer's users do."""
    transformers = import_module("transformers")
    start = problem.start(seed)
    model = transform(start.model)
    examples = [
        {k: v[i] for k, v in batch.items()}
        for batch in start.batches
        for i in _rows(batch)
    ]
    with tempfile.TemporaryDirectory() as folder:
        args = transformers.TrainingArguments(
            folder,
            per_device_train_batch_size=len(_rows(start.batches[0])),
            max_steps=problem.steps,
            lr_scheduler_type="cosine",
            warmup_steps=warmup,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=seed,
        )
        optimizers = (make(model.parameters()), None)
        trainer: Any = transformers.Trainer(
            model, args, train_dataset=examples, optimizers=optimizers
        )
        trainer.train()
    model.eval()
    losses = [loss_of(model, batch, start.loss).detach() for batch in start.held_out]
    found = torch.stack(losses).mean().item()
    return found if math.isfinite(found) else math.inf


def _rows(batch: dict[str, Tensor]) -> range:
    return range(len(next(iter(batch.values()))))
