"""One training run: the model, its optimizer, its schedule, what was measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .data import Corpus, window_starts, windows
from .optimizers import make_optimizer
from .progress import Progress
from .settings import Settings

EVAL_SEED = (
    1337  # the examples of an evaluation: the same for every variant, seed and step
)
LOG_INTERVAL = (
    10  # steps between two looks at the loss and the clock: each waits for a GPU
)


@contextmanager
def deterministic(threads: int) -> Iterator[None]:
    """Deterministic algorithms and `threads` threads inside, what was set before outside.

    Uninitialised memory is not filled, as `use_deterministic_algorithms` would by default:
    nothing here reads it, and filling it costs time.
    """
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
        torch.get_num_threads(),
    )
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]
        torch.set_num_threads(before[2])


def learning_rate(step: int, settings: Settings) -> float:
    """Share of the peak learning rate at `step`: linear warm-up, then a cosine to `final_lr`."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    done = (step - settings.warmup) / max(1, settings.iters - settings.warmup)
    cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return settings.final_lr + (1 - settings.final_lr) * cosine


class Training:
    """A run. The examples of every step are drawn at the start from a generator seeded by `seed`:
    all models see the same ones in the same order."""

    def __init__(
        self,
        model: nn.Module,
        *,
        corpus: Corpus,
        settings: Settings,
        lr: float,
        seed: int = 0,
        autocast: torch.dtype | None = None,
        scale_loss: bool = False,
        compile: bool = False,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        """`model` is trained where it is; `autocast` is the dtype of torch.autocast, if any.

        `scale_loss`: multiply the loss by what torch's GradScaler finds to be large enough.
        `optimizer`: that of `make_optimizer` at the peak `lr`, unless another is given.
        """
        self.model, self.settings, self.seed, self.autocast = (
            model,
            settings,
            seed,
            autocast,
        )
        self.device = next(model.parameters()).device
        self._train, self._val = (
            corpus.train.to(self.device),
            corpus.val.to(self.device),
        )
        self._starts = self._draw(self._train, settings.iters, seed)
        self._call = torch.compile(model) if compile else model
        self.optimizer = optimizer or make_optimizer(model, lr, settings)
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=scale_loss)
        self._peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.step = 0
        self.batch_loss = torch.full((settings.iters,), math.nan, device=self.device)
        self.curves: dict[str, list[float]] = {"step": [], "train": [], "val": []}
        self.seconds_per_step: list[float] = []
        # Dropout's numbers do not depend on what building the model drew.
        torch.manual_seed(seed)

    def _draw(self, tokens: Tensor, batches: int, seed: int) -> Tensor:
        shape = (batches, self.settings.batch_size)
        starts = window_starts(tokens, shape, context=self.settings.context, seed=seed)
        return starts.to(self.device)

    def _loss(self, call: Callable[..., Any], tokens: Tensor, starts: Tensor) -> Tensor:
        """Mean loss, 0-dim, of one batch of examples, by the model or its compiled form."""
        idx, targets = windows(tokens, starts, self.settings.context)
        with torch.autocast(
            self.device.type, self.autocast, enabled=self.autocast is not None
        ):
            _, loss = call(idx, targets)
        return loss

    def example_loss(self) -> Tensor:
        """The loss of the first training batch, never compiled: its gradients can be hooked."""
        return self._loss(self.model, self._train, self._starts[0])

    def advance(self) -> int:
        """Trains to the next stop (a look at the clock, an evaluation, the end); steps taken.

        Nothing waits for the device on the way: losses are kept there.
        """
        settings, first = self.settings, self.step
        stops = (
            _next_multiple(first, n) for n in (LOG_INTERVAL, settings.eval_interval)
        )
        stop = min(*stops, settings.iters)
        self.model.train()
        started = time.perf_counter()
        for step in range(first, stop):
            self._train_step(step)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds_per_step.append((time.perf_counter() - started) / (stop - first))
        self.step = stop
        return stop - first

    def _train_step(self, step: int) -> None:
        factor = learning_rate(step, self.settings)
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * factor
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self._call, self._train, self._starts[step])
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.batch_loss[step] = loss.detach()

    def evaluate(self) -> tuple[float, float]:
        """Adds train and held-out loss on the fixed batches to `curves`, and returns them."""
        self.model.eval()
        train, val = self._mean_loss(self._train), self._mean_loss(self._val)
        for name, value in (("step", self.step), ("train", train), ("val", val)):
            self.curves[name].append(value)
        return train, val

    @torch.no_grad()
    def _mean_loss(self, tokens: Tensor) -> float:
        batches = self._draw(tokens, self.settings.eval_batches, EVAL_SEED)
        losses = [self._loss(self._call, tokens, starts) for starts in batches]
        return torch.stack(losses).double().mean().item()

    @property
    def finished(self) -> bool:
        return self.step == self.settings.iters

    @property
    def evaluation_due(self) -> bool:
        """At the start, at every multiple of the interval and at the end, once each."""
        due = self.step % self.settings.eval_interval == 0 or self.finished
        return due and (not self.curves["step"] or self.curves["step"][-1] != self.step)

    @property
    def tokens_per_second(self) -> float:
        """The rate over the steps since the last look at the clock."""
        return (
            self.settings.batch_size * self.settings.context / self.seconds_per_step[-1]
        )


def train(training: Training, progress: Progress) -> None:
    """Trains to the end, evaluating at each interval."""
    while True:
        if training.evaluation_due:
            losses = training.evaluate()
            progress.evaluated(training.step, train=losses[0], val=losses[1])
        if training.finished:
            return
        steps = training.advance()
        loss = training.batch_loss[training.step - 1].item()
        progress.advance(steps, loss=loss, tokens_per_second=training.tokens_per_second)


def _next_multiple(step: int, interval: int) -> int:
    return (step // interval + 1) * interval
