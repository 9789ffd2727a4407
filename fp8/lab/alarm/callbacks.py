"""`Alarm` in trainers: callbacks of Lightning and of transformers."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from ...adapters.lightning import library_of
from ...common.libraries import need
from ...common.step import find_loss
from .alarm import Alarm


def lightning_callback(
    *, library: str | None = None, stop: bool = False, **options: Any
) -> Any:
    """A callback for Lightning's ``Trainer(callbacks=[...])`` with an `Alarm` as ``alarm``, from
    the beginning of the training on.

    The loss is that of ``training_step``, the batch its argument. A checkpoint that is not finite
    is a ValueError that names what is not; its file is not written.

    Args:
        library: as in `fp8.adapters.lightning.FP8Precision`.
        stop: whether the training stops at an alarm.
        options: the options of `Alarm`.

    Raises:
        ImportError: if Lightning is not installed.
    """

    lightning: Any = importlib.import_module(library_of(True, library))

    class AlarmCallback(lightning.Callback):
        alarm: Alarm | None = None

        def on_train_start(self, trainer: Any, module: Any) -> None:
            self.alarm = Alarm(module, *trainer.optimizers, **options)

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int
        ) -> None:
            loss = outputs["loss"] if isinstance(outputs, dict) else outputs
            # None: of a step that was skipped.
            if loss is not None and self.alarm is not None:
                alert = self.alarm.step(loss, batch)
                if alert is not None and stop:
                    trainer.should_stop = True

        def on_save_checkpoint(
            self, trainer: Any, module: Any, checkpoint: dict[str, Any]
        ) -> None:
            if self.alarm is not None:
                names = ("state_dict", "optimizer_states")
                self.alarm.checked({n: checkpoint.get(n) for n in names})

        def on_train_end(self, trainer: Any, module: Any) -> None:
            if self.alarm is not None:
                self.alarm.close()

    return AlarmCallback()


def transformers_callback(*, stop: bool = False, **options: Any) -> Any:
    """A callback for ``transformers.Trainer(callbacks=[...])`` with an `Alarm` as ``alarm``, from
    the beginning of the training on.

    The loss is the mean of those that the model returns in a step, the batch its last arguments. A
    checkpoint that is not finite is a ValueError that names what is not; it is not written.

    Args:
        stop: whether the training stops at an alarm.
        options: the options of `Alarm`.

    Raises:
        ImportError: if transformers is not installed.
    """

    class AlarmCallback(need("transformers").TrainerCallback):  # type: ignore[misc]
        alarm: Alarm | None = None

        def on_train_begin(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            optimizer = getattr(kwargs["optimizer"], "optimizer", kwargs["optimizer"])
            self._model = kwargs["model"]
            self._optimizer = optimizer
            self.alarm = Alarm(self._model, optimizer, **options)
            self._losses: list[Tensor] = []
            self._batch: Any = None
            self._hook = self._model.register_forward_hook(self._note, with_kwargs=True)

        def on_step_end(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            losses, self._losses = self._losses, []
            if losses and self.alarm is not None:
                alert = self.alarm.step(torch.stack(losses).mean(), self._batch)
                if alert is not None and stop:
                    control.should_training_stop = True
            self._check(control.should_save)

        def on_epoch_end(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            self._check(control.should_save)

        def on_evaluate(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            # The best model is saved after it, and control does not say so.
            self._check(True)

        def on_train_end(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            self._hook.remove()
            if self.alarm is not None:
                self.alarm.close()

        def _check(self, saves: bool) -> None:
            if saves and self.alarm is not None:
                states = self._optimizer.state_dict()["state"]
                model = dict(self._model.state_dict())
                self.alarm.checked({"model": model, "optimizer": states})

        def _note(self, model: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            loss = find_loss(output) if model.training else None
            if loss is not None:
                self._losses.append(loss.detach().float())
                self._batch = kwargs or args

    return AlarmCallback()
