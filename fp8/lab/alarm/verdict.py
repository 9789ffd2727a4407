"""Whose fault an alarm is: that of FP8, of the batch, of the training, or of none of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ...common.copies import training_copy
from ...common.step import Batch, Loss
from ...recipes.history import histories, set_histories
from ...recipes.policy import LayerRule
from ..blame import Blame, Replay, Step, blamed, is_faulty
from .state import State, not_finite


@dataclass(frozen=True, repr=False)
class Verdict:
    """The result of `Alarm.blame`, as a text.

    Attributes:
        kind: "fp8", "batch", "training" or "none".
        what: the reason, in a sentence.
        blame: of the replay that shows a fault of FP8, whose ``rules`` name layers and operands;
            None of other kinds.
    """

    kind: str
    what: str
    blame: Blame | None = None

    def __str__(self) -> str:
        if self.blame is None:
            return f"{self.kind}: {self.what}"
        return f"{self.kind}: {self.what}\n\n{self.blame}"

    __repr__ = __str__


@dataclass(frozen=True)
class Subject:
    """What is judged.

    Attributes:
        model, optimizer: of the state of now. They are copied.
        kept: the last good state.
        optimizer_state: that of ``optimizer`` in it.
        limit: the largest usual loss.
        batches: those since the last good state; the last one is judged.
        loss: as of `fp8.blame`.
        casts: those that the alarm went off for, and what they lose; "" if for something else.
    """

    model: nn.Module
    optimizer: Optimizer | None
    kept: State
    optimizer_state: dict[str, Any] | None
    limit: float
    batches: Sequence[Batch]
    loss: Loss | None
    casts: str

    def is_fine(self, value: float | None) -> bool:
        """Whether a loss is finite and in its band."""
        return value is None or (math.isfinite(value) and value <= self.limit)

    def replay(
        self, now: bool = False, scales_of_now: bool = False, path: bool = False
    ) -> Replay:
        """Replays from the state of now, or from the last good one; with the scales of now; the
        last batch, or all of them."""
        model, optimizer, loss = training_copy(self.model, self.optimizer, self.loss)
        if not now:
            self.kept._replace(parts=[]).load(model, [])
            if optimizer is not None and self.optimizer_state is not None:
                optimizer.load_state_dict(self.optimizer_state)
        if scales_of_now:
            set_histories(model, histories(self.model))
        batches = self.batches if path else self.batches[-1:]
        if now:
            optimizer = None
        return Replay(model, batches, None, loss, optimizer, self.kept.set_random)


def judge(subject: Subject) -> Verdict:
    """Replays the step from the last good state, in FP8 and in high precision, then the steps since
    then, then the step from the state of now. What high precision does too is not FP8's."""
    then = subject.replay()
    high = _high(then)
    if not subject.is_fine(high.loss):
        return Verdict("batch", _of_batch(high, subject.limit))
    if not subject.is_fine(high.loss_after):
        return Verdict("training", _of_step(high))
    if then.layers:
        found = _of_fp8(subject, then)
        if found is not None:
            return found
    return _of_training(subject, then)


def _high(replay: Replay) -> Step:
    """The step in high precision."""
    return replay([LayerRule("*")] if replay.layers else [])


def _of_fp8(subject: Subject, then: Replay) -> Verdict | None:
    """A fault that high precision removes: in the step from the last good state, with its scales or
    those of now; in the step of now; in the steps since then."""
    told = blamed(then, is_faulty)
    if told.rules:
        return _verdict(told, "the step from the last good state")
    told = blamed(subject.replay(scales_of_now=True), is_faulty)
    if told.rules:
        return _verdict(told, "the last good weights with the scales of now")
    if not not_finite(dict(subject.model.named_parameters())):
        now = subject.replay(now=True)
        # Where high precision fails too, the weights are broken, and differences are chance.
        if subject.is_fine(_high(now).loss):
            told = blamed(now, is_faulty)
            if told.rules:
                return _verdict(told, "the step from the state of now")
    if len(subject.batches) > 1:
        # What low precision harms a little in each step.
        path = subject.replay(path=True)
        if subject.is_fine(_high(path).loss):
            told = blamed(path, lambda step, high: not subject.is_fine(step.loss))
            if told.rules:
                what = f"the {len(subject.batches)} steps since the last good state"
                return _verdict(told, what)
    return None


def _verdict(told: Blame, where: str) -> Verdict:
    return Verdict("fp8", f"high precision removes the fault of {where}", told)


def _of_batch(high: Step, limit: float) -> str:
    return (
        f"the loss of the last good weights on it is {high.loss:.3g} in high precision; usual are "
        f"values up to {limit:.3g}"
    )


def _of_step(high: Step) -> str:
    return (
        f"a step in high precision from the last good state takes the loss of its own batch from "
        f"{high.loss:.3g} to {high.loss_after:.3g}: the learning rate is too large for this "
        "gradient"
    )


def _of_training(subject: Subject, then: Replay) -> Verdict:
    nothing = "" if then.layers else "no layer is converted, nothing is FP8; "
    broken = not_finite(dict(subject.model.named_parameters()))
    loss = math.nan if broken else _high(subject.replay(now=True)).loss
    if subject.is_fine(loss) and subject.casts:
        what = f"{subject.casts}; the loss does not show it yet"
        return Verdict("fp8", what)
    if subject.is_fine(loss):
        what = (
            "the step is usual in high precision, from the last good state and from now"
        )
        if then.layers:
            what = "the step is usual, in FP8 and in high precision"
        return Verdict("none", nothing + what)
    grown = _grown(subject)
    return Verdict(
        "training",
        f"{nothing}the weights of now have a loss of {loss:.3g} in high precision, and the last "
        f"good ones a usual one{grown}",
    )


def _grown(subject: Subject) -> str:
    """The parameter whose norm has grown most since the last good state."""
    ratios = []
    for name, parameter in subject.model.named_parameters():
        before = subject.kept.model.get(name)
        if before is None or type(before) is not torch.Tensor:
            continue
        norms = [float(x.detach().float().norm()) for x in (parameter, before)]
        if norms[1] > 0:
            ratio = norms[0] / norms[1]
            # Inf and NaN are the most.
            ratios.append((ratio if math.isfinite(ratio) else math.inf, name))
    ratio, name = max(ratios, default=(0.0, ""))
    if ratio < 1.1:
        return ""
    return f"; {name} has {ratio:.3g} times its norm"
