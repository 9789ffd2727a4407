"""`fp8.record`: writes what the casts of a converted model lose while it trains."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...casts.watch import Seen, is_look, watches_of
from ...common.ranks import Group, rank, ranks
from ...common.step import Batch, Loss
from ...common.validation import check_module, check_whole
from ...recipes.history import Schedule
from ...recipes.policy import Policy
from ...recipes.recipe import Recipe
from ...version import __version__
from .runs import SHARES, Record, WhatIf, rows_record
from .runs import Loss as LossRow
from .what_if import rows_under
from .writers import NOWHERE, Sink, Writer, opened

__all__ = ["Recorder", "record"]

WAITING = 1 << 14
"""The rows that wait for the first call of `Recorder.step`; then steps are passes."""


class Recorder:
    """Returned by `record`: a context manager, which `close` ends.

    Attributes:
        steps: the number of steps that are done.
    """

    def __init__(self, model: nn.Module, sink: Sink, group: Group, start: int) -> None:
        self.steps = start
        self._model = model
        self._sink = sink
        self._group = group
        self._watches = watches_of(model)
        self._rows: list[Seen] = []
        self._losses: list[tuple[int, Tensor | float]] = []
        # The last pass that was looked at, and the step that it belongs to.
        self._pass = 0
        self._step_of_pass = 0
        # The passes at the last call of `step`.
        self._called: list[int] = []
        # A pass may end in another thread than the one that calls `step`.
        self._lock = threading.RLock()
        for watch in self._watches:
            watch.listeners.append(self._listen)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        # After an error the other processes may not arrive.
        self._end(alone=any(error))

    def step(self, loss: Tensor | float | None = None) -> None:
        """Notes a step of the training; call it once a step, after the backward pass, before or
        after the optimizer.

        It writes at steps with a look, what has come since the last one. With torch.distributed
        initialized, all processes of the group call it, and its first one gathers what they have
        seen then. For each cast it writes the largest shares and magnitude, the root mean square
        of the RMS, and the smallest SQNR, so that the fault of one process stays visible; and the
        mean loss.

        Args:
            loss: a tensor of one element, in any unit; None writes no loss. Inf and NaN are
            written.

        Raises:
            ValueError: for a loss of several elements.
        """
        if isinstance(loss, Tensor):
            if loss.numel() != 1:
                shape = tuple(loss.shape)
                raise ValueError(f"loss must have one element, got the shape {shape}")
            # Read with the next look, because reading synchronizes. A copy: a graph of CUDA may
            # write the next loss to the same memory.
            loss = loss.detach().clone()
        with self._lock:
            self.steps += 1
            self._note_passes()
            if loss is not None:
                self._losses.append((self.steps, loss))
            if is_look(self.steps, self._watches[0].every):
                self._write()

    def what_if(
        self,
        recipe: Policy | Recipe | str,
        batch: Batch,
        loss: Loss | None = None,
    ) -> WhatIf:
        """What the casts of another recipe would lose with the present weights, on a batch.

        It runs one pass of a copy of the model, in eager mode, and writes the rows. The model, its
        gradients and scales, random numbers and the looks of the run stay as they are. A recipe is
        tried on the layers that are converted, a policy on those that it chooses; static scales
        are those that the batch sets. In a distributed training each process asks for itself.

        Args:
            recipe: a name in `fp8.RECIPES`, a `Recipe` or a `Policy`.
            batch: a tensor, a tuple or list of positional arguments, or a mapping of keywords.
            loss: a function of the output that returns a scalar. None: the output's ``loss``.

        Returns:
            The rows, which print as a table.

        Raises:
            ValueError: for an unknown recipe, and if the loss is no scalar.
        """
        rows = rows_under(self._model, recipe, batch, loss)
        step = self.steps + 1
        rows = [replace(row, step=step) for row in rows]
        name = recipe if isinstance(recipe, str) else _name_of(recipe)
        if rows:
            with self._lock:
                record = rows_record(step, rows, kind="what if")
                self._sink.write(record | {"recipe": name})
        return WhatIf(recipe=name, step=step, rows=rows)

    def close(self) -> None:
        """Ends the record: writes what has come since the last look, and looks no more than without
        a recorder. All processes call it, and leave the ``with`` block, which calls it. After an
        error in the block the first process writes what it has seen itself. A second call does
        nothing."""
        self._end(alone=False)

    def _end(self, alone: bool) -> None:
        with self._lock:
            watching = [w for w in self._watches if self._listen in w.listeners]
            for watch in watching:
                watch.read()
                watch.listeners.remove(self._listen)
                watch.every = 0
            if watching:
                self._write(alone)
                self._sink.close()
                self._sink = NOWHERE

    def _note_passes(self) -> None:
        """Notes which pass belongs to this step."""
        now = [watch.step for watch in self._watches]
        if not self._called:
            self._rows = [replace(row, step=self.steps) for row in self._rows]
        for watch in self._watches:
            # Otherwise an optimizer has ended the pass of this step, and its look has been read.
            if watch.looks and watch.is_open:
                self._pass = watch.step
                self._step_of_pass = self.steps
            # Neither eager code nor an optimizer of torch has ended a pass since the last step.
            if now == self._called:
                watch.next()
        self._called = [watch.step for watch in self._watches]

    def _listen(self, rows: list[Seen]) -> None:
        with self._lock:
            if rows[0].step != self._pass:
                self._pass = rows[0].step
                self._step_of_pass = self.steps + 1
            step = self._step_of_pass
            if not self._called:  # the first step may have several passes
                step = self._pass
            self._rows += [replace(row, step=step) for row in rows]
            never_called = not self._called and len(self._rows) > WAITING
            if never_called and ranks(self._group) == 1:
                self._write()

    def _write(self, alone: bool = False) -> None:
        """Writes the rows and losses that wait. alone: those of this process."""
        losses = [LossRow(step, float(loss)) for step, loss in self._losses]
        seen = Part(self._rows, losses)
        self._rows = []
        self._losses = []
        parts = [seen]
        if ranks(self._group) > 1 and not alone:
            parts = _gathered(seen, self._group)
        rows = merged([row for part in parts for row in part.rows])
        means = _means([loss for part in parts for loss in part.losses])
        looks = groupby(rows, key=lambda row: row.step)
        lines = [rows_record(step, list(look)) for step, look in looks]
        for step, loss in means.items():
            lines.append({"kind": "loss", "step": step, "loss": loss})
        for line in sorted(lines, key=lambda line: line["step"]):
            self._sink.write(line)


def record(
    model: nn.Module,
    *,
    writer: Writer | Sequence[Writer],
    every: int = 10,
    start: int = 0,
    group: Group = None,
) -> Recorder:
    """Records what the casts of a converted model do to their operands while it trains.

    A look is written for each ``every``-th pass, besides those at which converted layers look
    anyway: passes 1, 2, 4, ..., 64, and each 128th. The numbers of a row are those of
    `fp8.casts.watch.Seen`. A model has one recorder: another one closes it.

    Args:
        model: after `fp8.convert`, compiled or not.
        writer: the path of a new file in JSON Lines, for ``fp8 record page`` and ``fp8 record
            diff``; or what has ``add_scalar``, as TensorBoard's SummaryWriter; or what has
            ``log``, as wandb or a run of it; or a function of each record, a dict; or several.
        every: the passes from one look to the next, at least 1.
        start: the steps that were done before, of a run that goes on from a checkpoint. Steps count
            from it; a file is continued, and later steps in it give way to those that come.
        group: the processes whose looks are one record, and the first of which writes it; None:
            all.

    Returns:
        A recorder. Call its ``step(loss)`` once a step. Inf and NaN are written as they are, into a
        file as the strings "inf" and "nan".

    Raises:
        FileExistsError: if the file exists, and ``start`` is 0.
        OSError: if it cannot be written.
        TypeError: for another writer.
        ValueError: if nothing in the model is converted, for another ``every`` or ``start``, and
            in a process outside of the group.
    """
    check_module("model", model)
    check_whole("every", every)
    check_whole("start", start, lowest=0)
    watches = watches_of(model)
    this = rank(group)
    if this < 0:
        raise ValueError("this process is not in the group: only its processes record")
    sink = NOWHERE
    if this == 0:
        sink = _all_opened(writer, start)
    for watch in watches:
        for listener in list(watch.listeners):
            other = getattr(listener, "__self__", None)
            if isinstance(other, Recorder):
                other._end(alone=True)
        # Passes before, as those of a calibration, do not count: steps of two runs are the same.
        schedule = watch.schedule
        if schedule.step != start + 1:  # not that of a checkpoint of this step
            schedule = Schedule(start + 1)
        watch.every = every
        watch.resume(schedule)
    layers: dict[str, str] = {}
    for watch in watches:
        layers.update((layer.name, layer.recipe) for layer in watch.layers)
    header: Record = {
        "kind": "header",
        "versions": {"fp8": __version__, "torch": str(torch.__version__)},
        "every": every,
        "start": start,
        "step": start,
        "layers": layers,
    }
    sink.write(header)
    return Recorder(model, sink, group, start)


def _all_opened(writer: Writer | Sequence[Writer], start: int) -> Sink:
    if isinstance(writer, str) or not isinstance(writer, Sequence):
        return opened(writer, start)
    sinks = [opened(each, start) for each in writer]

    def write(record: Record) -> None:
        for sink in sinks:
            sink.write(record)

    def close() -> None:
        for sink in sinks:
            sink.close()

    return Sink(write, close)


def _name_of(recipe: Policy | Recipe) -> str:
    if isinstance(recipe, Recipe):
        return recipe.name
    return f"policy {recipe.recipe}"


# Processes


class Part(NamedTuple):
    """What one process has seen since the last look."""

    rows: list[Seen]
    losses: list[LossRow]


def _gathered(part: Part, group: Group) -> list[Part]:
    """The parts of all processes on the first one, none on others."""
    parts: list[Any] | None = None
    # torch takes a list from the process that receives, and None from others.
    if rank(group) == 0:
        parts = [None] * ranks(group)
    torch.distributed.gather_object(part, parts, group=group, group_dst=0)
    return parts or []


def merged(rows: list[Seen]) -> list[Seen]:
    """One row for the rows of one cast in one step, of several processes or passes, with the worst
    of their numbers."""
    casts: dict[tuple[int, str, str], list[Seen]] = {}
    for row in rows:
        casts.setdefault((row.step, row.layer, row.operand), []).append(row)
    return [_worst(same) for same in casts.values()]


def _worst(rows: list[Seen]) -> Seen:
    if len(rows) == 1:
        return rows[0]
    shares = {name: max(getattr(row, name) for row in rows) for name in SHARES}
    # NaN of the SQNR is that of an operand of zeros.
    sqnr = [row.sqnr for row in rows if not math.isnan(row.sqnr)]
    largest = [row.largest for row in rows]
    has_nan = any(map(math.isnan, largest))
    return replace(
        rows[0],
        **shares,
        rms=math.sqrt(sum(row.rms**2 for row in rows) / len(rows)),
        sqnr=min(sqnr, default=math.nan),
        largest=math.nan if has_nan else max(largest),
    )


def _means(losses: list[LossRow]) -> dict[int, float]:
    """Step -> the mean loss."""
    of_step: dict[int, list[float]] = {}
    for row in losses:
        of_step.setdefault(row.step, []).append(row.loss)
    return {step: sum(values) / len(values) for step, values in of_step.items()}
