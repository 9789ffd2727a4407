"""`Alarm`: watches a training run, keeps its last good state, and says whether FP8 is at fault."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...casts.counts import LOST
from ...casts.scaled_tensor import ScaledTensor
from ...casts.watch import Seen, Watch, watches_of
from ...casts.watch import loss as lost
from ...common.dtensor import part_of
from ...common.ranks import rank, ranks
from ...common.step import Batch, Loss, copied, parameters_of, unwrapped
from ...common.validation import check_module, check_whole
from ...formats.format import get_format
from ...layers.settings import converted
from ...warnings import PitfallWarning, show
from .band import Band
from .state import Part, State, not_finite, read, state_of, written
from .verdict import Subject, Verdict, judge

T = TypeVar("T")


class Alert(NamedTuple):
    """Why an alarm has gone off. step: the call of `Alarm.step`, from 1. rule: its name in `RULES`.
    what: the observation, in words."""

    step: int
    rule: str
    what: str


class Observed(NamedTuple):
    """What the rules judge, the same on all ranks.

    Attributes:
        loss, grad_norm: the means of all ranks; None if not known.
        high_loss, high_norm: whether they are above their bands.
        broken: the number of weights and states that are not finite.
        casts: the number of casts that lose more than they did.
        names: those of the broken weights and states, or of the casts, of this rank.
    """

    loss: float | None
    grad_norm: float | None
    high_loss: bool
    high_norm: bool
    broken: int
    casts: int
    names: str


class Rule(NamedTuple):
    """A row of `RULES`.

    Attributes:
        name: of the rule.
        times: the successive calls at which it must hold; of a rule about casts, looks.
        holds: the values that the rule judges.
        says: the text of an `Alert`.
    """

    name: str
    times: int
    holds: Callable[[Observed], bool]
    says: str


LOSS, CASTS = "loss above its band", "casts lose more"


def _is_wrong(value: float | None) -> bool:
    return value is not None and not math.isfinite(value)


RULES = (
    Rule("loss not finite", 1, lambda seen: _is_wrong(seen.loss), "the loss is {loss}"),
    Rule(
        LOSS,
        4,  # single losses leave it in healthy runs: `FACTOR` of the band
        lambda seen: seen.high_loss,
        "the loss is {loss:.4g}, for the fourth time above its band",
    ),
    Rule(
        "gradient norm above its band",
        8,  # five successive ones leave a band of 4 sigmas in healthy runs
        lambda seen: seen.high_norm,
        "the gradient norm is {grad_norm:.4g}, for the eighth time above its band",
    ),
    Rule(
        "weights or states not finite",
        1,
        lambda seen: seen.broken > 0,
        "weights or states are not finite: {names}",
    ),
    Rule(
        CASTS,
        2,  # a static scale is set anew after the first look
        lambda seen: seen.casts > 0,
        "in two successive looks, {names}",
    ),
)
"""What an alarm goes off for."""

LONGEST = max(rule.times for rule in RULES)


class Alarm:
    """Goes off by `RULES`, keeps the last good state of a run, and judges whose fault it is.

    Call `step` once a step, with any loop: before or after the optimizer's step, with accumulated
    gradients, with a GradScaler, whose skipped steps are no fault, and on all ranks, which agree.

    A copy of the state is taken every ``every`` calls, and becomes the good one when no rule has
    held at the next 8: two copies of weights and states in the memory of the CPU, or in files. From
    an alarm on nothing more is copied, until `restore` or `clear`.

    Args:
        model: converted, compiled, wrapped in DistributedDataParallel, or none of it. A model that
            is not converted has no rule about casts.
        parts: its optimizer first, then other optimizers, schedulers, a GradScaler: what has a
            state_dict.
        every: the calls between copies.
        path: a file for the copy, in the place of memory; on rank n, with ".n" added.

    Attributes:
        alert: the `Alert`; None until the alarm goes off.
        state: the last good `State`, at first the current one.
        batches: those since then, if `step` gets them; copies, on their devices.

    Raises:
        TypeError: for arguments of another type.
        ValueError: for ``every`` below 1, and for a state that is not finite.

    >>> import torch
    >>> model = torch.nn.Linear(4, 4)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> alarm = Alarm(model, optimizer)
    >>> loss = model(torch.ones(2, 4)).square().mean()
    >>> loss.backward(); optimizer.step(); alarm.step(loss)
    """

    def __init__(
        self,
        model: nn.Module,
        *parts: Part,
        every: int = 100,
        path: str | Path | None = None,
    ) -> None:
        check_module("Alarm", model)
        check_whole("every", every)
        for part in parts:
            if not hasattr(part, "load_state_dict"):
                kind = type(part).__name__
                raise TypeError(f"an alarm keeps what has a state_dict, got a {kind}")
        self._model, self._parts = unwrapped(model), parts
        self.every = every
        self._path = None if path is None else Path(f"{path}{_suffix()}")
        self._calls = 0
        # Masks of attention may have Inf.
        self._allowed = tuple(
            f".{name}" for name in not_finite(dict(self._model.named_buffers()))
        )
        if names := self._broken():
            raise ValueError(f"the state is not finite: {_listed(names)}")
        self._kept: State | None = None
        self._keep(state_of(0, self._model, parts))
        self.batches: list[Batch] = []
        self._losses, self._norms = Band(falls=True), Band(falls=False)
        self._least: dict[tuple[str, str, str], float] = {}
        self._is_late, self._is_restored = True, False
        self._reset()
        self._watches = _watches(self._model)
        for watch in self._watches:
            watch.listeners.append(self._listen)
        hook = weakref.WeakMethod(self._before_step)
        self._hooks = [
            part.register_step_pre_hook(lambda *args: _called(hook, args[0]))
            for part in parts
            if isinstance(part, Optimizer)
        ]

    @property
    def state(self) -> State:
        """The last good state."""
        if self._kept is None and self._path is not None:
            return read(self._path)
        assert self._kept is not None
        return self._kept

    def clear(self) -> None:
        """Takes the alarm back: the run goes on as it is, with new bands, as after a change of the
        data that multiplies the loss."""
        self._losses.clear()
        self._norms.clear()
        self._reset()

    def _reset(self) -> None:
        self.alert: Alert | None = None
        self._strikes = dict.fromkeys((rule.name for rule in RULES), 0)
        self._limit = self._losses.limit
        self._next: State | None = None
        self._later: list[Batch] = []
        self._pending: list[Tensor] = []
        self._looked: list[str] | None = None

    def close(self) -> None:
        """Ends the watch. `state`, `restore` and `blame` stay."""
        for hook in self._hooks:
            hook.remove()
        for watch in self._watches:
            if self._listen in watch.listeners:
                watch.listeners.remove(self._listen)

    def step(
        self,
        loss: Tensor | float | None = None,
        batch: Batch | None = None,
        grad_norm: Tensor | float | None = None,
    ) -> Alert | None:
        """Notes a step of the training. All ranks call it.

        Args:
            loss: of one element, in any unit; of accumulated gradients, of all or of each part. Its
                value is read, which waits for the device.
            batch: as of `fp8.blame`, kept since the last good state, for `blame`.
            grad_norm: as clip_grad_norm_ returns it. None: that of the gradients that reach the
                optimizer, which are clipped.

        Returns:
            The `Alert`, and a warning, if the alarm goes off now; else None.
        """
        self._calls += 1
        if self.alert is not None:
            return None
        if self._calls == 1:
            self._is_late = bool(self._pending)
        if self._is_restored:
            self.batches, self._is_restored = [], False
        if batch is not None:
            self.batches.append(copied(batch))
            self._later.append(self.batches[-1])
        seen = self._observe(loss, grad_norm)
        looked, self._looked = self._looked is not None, None
        for rule in RULES:
            if rule.name == CASTS and not looked:
                continue
            self._strikes[rule.name] += 1
            if not rule.holds(seen):
                self._strikes[rule.name] = 0
            if self._strikes[rule.name] >= rule.times:
                what = rule.says.format(**seen._asdict())
                self.alert = Alert(self._calls, rule.name, what)
                self._next = None
                show(PitfallWarning, f"alarm at step {self._calls}: {what}")
                return self.alert
        self._advance()
        return None

    def restore(self) -> int:
        """Loads the last good state, takes the alarm back, and returns the number of calls of
        `step` before that state. The states of random number generators stay: the next steps are
        other ones. Scales of converted layers are those of then."""
        kept = self.state
        kept.load(self._model, self._parts)
        self._reset()
        self._is_restored = True
        for watch in self._watches:
            watch.looks = watch.measures = True
        return kept.step

    def blame(self, batch: Batch | None = None, loss: Loss | None = None) -> Verdict:
        """Says whose fault an alarm is, from replays of the step: see `Verdict`. On copies; the run
        stays as it is. It needs the memory of two more models. Each rank judges its own batch.

        Args:
            batch: the one whose step is judged. None: the last one that `step` got, and those since
                the last good state, which show a harm that is small in each step.
            loss: a function of the model's output, whose values are those that `step` gets; without
                ``batch``, of any batch, whose targets it needs from the output. None: the output's
                ``loss``.

        Raises:
            ValueError: without a batch; and as `fp8.blame`.
        """
        batches = self.batches if batch is None else [batch]
        if not batches:
            raise ValueError("blame needs the batch: pass it, or give batches to step")
        optimizer, state = self._stepped()
        subject = Subject(
            model=self._model,
            optimizer=optimizer,
            kept=self.state,
            optimizer_state=state,
            limit=self._limit,
            batches=batches,
            loss=loss,
            casts=self._casts_at_fault(),
        )
        return judge(subject)

    def _casts_at_fault(self) -> str:
        if self.alert is None or self.alert.rule != CASTS:
            return ""
        return self.alert.what

    def _stepped(self) -> tuple[Optimizer | None, dict[str, Any] | None]:
        """The optimizer that replays step, and its last good state; of several ones, none."""
        pairs = zip(self._parts, self.state.parts, strict=True)
        found = [(p, state) for p, state in pairs if isinstance(p, Optimizer)]
        if len(found) == 1:
            return found[0]
        return None, None

    def checked(self, checkpoint: T) -> T:
        """Returns a checkpoint whose tensors are finite: ``torch.save(alarm.checked(x), path)``
        leaves the file as it is otherwise.

        Args:
            checkpoint: tensors in nested dicts, lists and tuples. Buffers that had Inf or NaN at
                the start may have them.

        Raises:
            ValueError: naming the tensors that have Inf or NaN.
        """
        names = self._unusual(checkpoint)
        if names:
            raise ValueError(
                f"the checkpoint is not written: {len(names)} of its tensors are not finite, "
                f"{_listed(names)}"
            )
        return checkpoint

    def _unusual(self, value: Any) -> list[str]:
        """The tensors that are not finite, and were at the start."""
        names = not_finite(value)
        return [n for n in names if not f".{n}".endswith(self._allowed)]

    def _broken(self) -> list[str]:
        """The weights, buffers and states that are not finite."""
        states = [part.state_dict() for part in self._parts]
        return self._unusual(
            {"model": dict(self._model.state_dict()), "states": states}
        )

    # The state

    def _keep(self, state: State) -> None:
        if self._path is None:
            self._kept = state
        else:
            written(state, self._path)

    def _advance(self) -> None:
        """After a call at which nothing went off: takes a state, or keeps it."""
        if any(self._strikes.values()):
            return
        if self._next is not None and self._calls - self._next.step >= LONGEST:
            self._keep(self._next)
            self._next, self.batches = None, self._later
        elif self._next is None and self._is_due():
            self._next = state_of(self._calls, self._model, self._parts)
            # Before the step of the optimizer, the last batch is still to come.
            self._later = [] if self._is_late else self._later[-1:]

    def _is_due(self) -> bool:
        return self._calls % self.every == 0

    # What is observed

    def _observe(
        self, loss: Tensor | float | None, grad_norm: Tensor | float | None
    ) -> Observed:
        if grad_norm is None and self._pending:
            grad_norm = torch.stack([norm.float() for norm in self._pending]).norm()
        self._pending = []
        broken = self._broken() if self._is_due() else []
        casts = self._looked or []
        names = broken or casts
        mine = [loss, grad_norm, float(len(broken)), float(len(casts))]
        losses, norms, of_broken, of_casts = _of_ranks(mine, self._model)
        mean, norm = _mean(losses), _mean(norms)
        lost_casts = int(sum(of_casts))
        self._look_again(lost_casts)
        return Observed(
            mean,
            norm,
            self._is_high(self._losses, mean),
            self._is_high(self._norms, norm),
            int(sum(of_broken)),
            lost_casts,
            _listed(names) or "on another rank",
        )

    def _is_high(self, band: Band, value: float | None) -> bool:
        if value is None or not math.isfinite(value):
            return False
        if band is self._losses and not self._strikes[LOSS]:
            self._limit = band.limit
        return band.add(value)

    def _look_again(self, casts: int) -> None:
        """The second look at casts that lose more comes in the next pass."""
        if casts and not self._strikes[CASTS]:
            for watch in self._watches:
                watch.looks = True

    def _before_step(self, optimizer: Optimizer) -> None:
        """The norm of the gradients that reach an optimizer, which is not called where a GradScaler
        skips a step, or makes the step itself (``found_inf``)."""
        parameters = parameters_of(optimizer)
        grads = [part_of(p.grad) for p in parameters if p.grad is not None]
        dense = [g for g in grads if not (g.is_sparse or isinstance(g, ScaledTensor))]
        if not dense:
            return
        norm = torch.nn.utils.get_total_norm(dense)
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            norm = norm / scale
            found = getattr(optimizer, "found_inf", torch.zeros(()))
            norm = torch.where(found.to(norm.device) > 0, 0.0, norm)
        self._pending.append(norm.detach())

    def _listen(self, rows: list[Seen]) -> None:
        """Notes the casts that lose more than they did: by `LOST` more of their elements."""
        self._looked = self._looked or []
        for row in rows:
            share = row.zero + row.saturated
            key = (row.layer, row.operand, row.format)
            least = self._least.setdefault(key, share)
            self._least[key] = min(least, share)
            if not row.format or share - least <= LOST:
                continue
            what = lost(row, get_format(row.format), is_static=False)
            if what:
                self._looked.append(what)


def _called(method: Any, optimizer: Any) -> None:
    function = method()
    if function is not None:
        function(optimizer)


def _watches(model: nn.Module) -> list[Watch]:
    if not converted(model):
        return []
    return watches_of(model)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _listed(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# Ranks


def _suffix() -> str:
    return f".{rank()}" if ranks() > 1 else ""


def _of_ranks(
    numbers: Sequence[Tensor | float | None], model: nn.Module
) -> list[list[float]]:
    """Each number on the ranks that know it, read from the device at once."""
    devices = [x.device for x in numbers if isinstance(x, Tensor)]
    if ranks() > 1:
        # That of the collectives of the model.
        devices = [p.device for p in model.parameters()]
    device = devices[0] if devices else torch.device("cpu")
    given = [torch.as_tensor(0.0 if x is None else x).detach() for x in numbers]
    values = [x.reshape(()).to(device, torch.float32) for x in given]
    known = torch.tensor([float(x is not None) for x in numbers])
    packed = torch.cat([torch.stack(values), known.to(device)])
    parts = [packed]
    if ranks() > 1:
        parts = [torch.empty_like(packed) for _ in range(ranks())]
        torch.distributed.all_gather(parts, packed)
    columns = torch.stack(parts, 1).tolist()
    count = len(numbers)
    pairs = zip(columns[:count], columns[count:], strict=True)
    return [list(compress(found, is_known)) for found, is_known in pairs]
