"""The state before a loss spike, for `fp8.blame`: callbacks of Lightning and of transformers."""

from __future__ import annotations

import copy
import importlib
import math
import statistics
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ..common.libraries import need
from ..common.step import Batch, copied, find_loss
from ..common.validation import check_number, check_whole
from .lightning import library_of

__all__ = ["LastGood", "State", "lightning_callback", "transformers_callback"]

WINDOW = 32
"""The number of losses whose median a loss is compared with."""


class State(NamedTuple):
    """step: the number of steps before it. model, optimizers: copies of their state_dicts."""

    step: int
    model: dict[str, Any]
    optimizers: list[dict[str, Any]]


class LastGood:
    """Keeps the last state of training whose loss was fine, until a loss spikes or is not finite.

    Call `before` ahead of each step and `after` with its loss; the callbacks of this module do. A
    copy of the state becomes `state` when the loss that is computed with it is fine. At a spike
    nothing more is copied, so that `restore` goes back to before it, and `fp8.blame` replays
    `batches`: the first one trained on the good state, the last one spiked.

    Args:
        every: the number of steps between copies of weights and optimizer states, which take as
            much memory, on the same device, as these. With 1 the state is at most one step older
            than the spike.
        threshold: a loss spikes if it is above this many times the median of the last 32; above 1.
            With a loss m below 0: above ``m + (threshold - 1) * abs(m)``.
        path: where a spike writes "step", "model", "optimizers" and "batches", for ``torch.load``.

    Raises:
        TypeError: for arguments of another type.
        ValueError: for ``every`` below 1 and for a threshold of at most 1.
    """

    def __init__(
        self,
        *,
        every: int = 100,
        threshold: float = 2.0,
        path: str | Path | None = None,
    ) -> None:
        check_whole("every", every)
        check_number("threshold", threshold)
        if not threshold > 1:
            raise ValueError(f"threshold must be above 1, got {threshold}")
        self.every, self.threshold, self.path = every, threshold, path
        self.spiked = False
        self.state: State | None = None
        self.batches: list[Batch] = []
        self._next: State | None = None
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def before(
        self, step: int, model: nn.Module, optimizers: Sequence[Optimizer] = ()
    ) -> None:
        """Copies the state, if it is due. step: the number of steps before this one."""
        if not self.spiked and (self.state is None or step % self.every == 0):
            states = [copy.deepcopy(optimizer.state_dict()) for optimizer in optimizers]
            self._next = State(step, copy.deepcopy(model.state_dict()), states)

    def after(self, loss: float, batch: Batch) -> None:
        """Notes the loss of a batch. After a spike nothing more changes."""
        if self.spiked:
            return
        self.spiked = self._is_spike(loss)
        self._losses.append(loss)
        if self._next is not None and (self.state is None or not self.spiked):
            self.state, self._next, self.batches = self._next, None, []
        self.batches.append(copied(batch))
        if self.spiked and self.path is not None and self.state is not None:
            torch.save(self.state._asdict() | {"batches": self.batches}, self.path)

    def restore(self, model: nn.Module, *optimizers: Optimizer) -> None:
        """Loads the state. Raises ValueError if there is none."""
        if self.state is None:
            raise ValueError("no state is there to restore: no step was made")
        model.load_state_dict(self.state.model)
        for optimizer, state in zip(optimizers, self.state.optimizers, strict=False):
            optimizer.load_state_dict(copy.deepcopy(state))

    def _is_spike(self, loss: float) -> bool:
        if not math.isfinite(loss) or not self._losses:
            return not math.isfinite(loss)
        usual = statistics.median(self._losses)
        return loss > usual + (self.threshold - 1) * abs(usual)


def lightning_callback(*, library: str | None = None, **options: Any) -> Any:
    """A callback for Lightning's ``Trainer(callbacks=[...])`` with a `LastGood` as ``last_good``.

    The loss is that of ``training_step``, the batch its argument.

    Args:
        library: as in `fp8.adapters.lightning.FP8Precision`.
        options: those of `LastGood`.

    Raises:
        ImportError: if Lightning is not installed.
        TypeError, ValueError: as `LastGood`.
    """

    lightning: Any = importlib.import_module(library_of(True, library))

    class LastGoodCallback(lightning.Callback):
        def __init__(self) -> None:
            self.last_good = LastGood(**options)

        def on_train_batch_start(
            self, trainer: Any, module: Any, batch: Any, index: int
        ) -> None:
            self.last_good.before(trainer.global_step, module, trainer.optimizers)

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
        ) -> None:
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs
            if loss is not None:  # of a step that was skipped
                self.last_good.after(float(loss), batch)

    return LastGoodCallback()


def transformers_callback(**options: Any) -> Any:
    """A callback for ``transformers.Trainer(callbacks=[...])`` with a `LastGood` as ``last_good``.

    The loss is that in the output of the model, which it must return; the batch its arguments. With
    gradient accumulation each batch of a step counts.

    Args:
        options: those of `LastGood`.

    Raises:
        ImportError: if transformers is not installed.
        TypeError, ValueError: as `LastGood`.
    """

    class LastGoodCallback(need("transformers").TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.last_good = LastGood(**options)
            self._hook: Any = None

        def on_train_begin(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            self._hook = kwargs["model"].register_forward_hook(
                self._note, with_kwargs=True
            )

        def on_step_begin(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
            self.last_good.before(state.global_step, kwargs["model"], [optimizer])

        def on_train_end(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            self._hook.remove()

        def _note(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            loss = find_loss(output) if model.training else None
            if loss is not None:
                self.last_good.after(float(loss.detach()), kwargs or args)

    return LastGoodCallback()
