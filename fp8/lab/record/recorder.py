"""`fp8.record`: writes what the casts of a converted model lose while it trains."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import IO, Any, Protocol

import torch
from torch import Tensor, nn

from ...casts.watch import Seen, watches_of
from ...common.validation import check_module, check_whole
from ...version import __version__
from .runs import NUMBERS, SHARES, Record, as_line, rows_record

__all__ = ["Recorder", "record"]


class ScalarWriter(Protocol):
    """As TensorBoard's SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Adds a value."""


class Logger(Protocol):
    """As a run of wandb, and its module."""

    def log(self, data: dict[str, Any]) -> object:
        """Logs values by name."""


Writer = str | os.PathLike[str] | ScalarWriter | Logger | Callable[[Record], object]


class Recorder:
    """Returned by `record`: a context manager, which `close` ends."""

    def __init__(self, model: nn.Module, write: Callable[[Record], object]) -> None:
        self._watches = watches_of(model)
        self._write = write
        self._file: IO[str] | None = None
        self._rows: list[Seen] = []
        self._late: bool | None = None
        for watch in self._watches:
            watch.listeners.append(self._listen)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def step(self, loss: Tensor | float | None = None) -> None:
        """Notes a step of the training; call it once a step, before or after the optimizer.

        With torch.distributed initialized, all ranks call it, and rank 0 gathers what they have
        seen. Of each cast it writes the largest shares and magnitude, the root mean square of the
        RMS, and the smallest SQNR, so that the fault of one rank stays visible; and the mean loss.

        Args:
            loss: of one element, in any unit; None writes no loss. Inf and NaN are written.
        """
        now = self._watches[0].step
        if self._late is None:
            # The pass ends with the step of an optimizer: after it, the loss is of the pass before.
            self._late = now > 1
        value = loss.item() if isinstance(loss, Tensor) else loss
        losses = [] if value is None else [value]
        if _ranks() > 1:
            gathered = _gather((self._rows, losses))
            self._rows = merged([row for rows, _ in gathered for row in rows])
            losses = [loss for _, values in gathered for loss in values]
        self._flush()
        if losses and _rank() == 0:
            mean = sum(losses) / len(losses)
            self._write({"kind": "loss", "step": now - self._late, "loss": mean})

    def close(self) -> None:
        """Ends the record: reads the last look, and looks no more than without a recorder. Of a
        look after the last `step`, rank 0 writes its own part. A second call does nothing."""
        for watch in self._watches:
            if self._listen in watch.listeners:
                watch.read()
                watch.listeners.remove(self._listen)
                watch.every = 0
        self._flush()
        if self._file is not None:
            self._file.close()

    def _listen(self, rows: list[Seen]) -> None:
        self._rows += rows
        if _ranks() == 1:
            self._flush()

    def _flush(self) -> None:
        rows, self._rows = self._rows, []
        looks: dict[int, list[Seen]] = {}
        for row in rows:
            looks.setdefault(row.step, []).append(row)
        if _rank() == 0:
            for look in looks.values():
                self._write(rows_record(look))


def record(model: nn.Module, *, writer: Writer, every: int = 10) -> Recorder:
    """Records what the casts of a converted model do to their operands while it trains.

    Passes count from 1, anew. A look is written for each ``every``-th pass, besides those at which
    converted layers look anyway: passes 1, 2, 4, ..., 64, and each 128th. The numbers of a row are
    those of `fp8.casts.watch.Seen`. A look costs some tenths of a step.

    Args:
        model: after `fp8.convert`, compiled or not.
        writer: the path of a new file in JSON Lines, for ``fp8 record page`` and ``fp8 record
            diff``; or what has ``add_scalar``, as TensorBoard's SummaryWriter; or what has
            ``log``, as wandb or a run of it; or a function of each record, a dict.
        every: in passes, from 1.

    Returns:
        A recorder. Call its ``step(loss)`` once a step. Inf and NaN are written as they are, into a
        file as the strings "inf" and "nan".

    Raises:
        FileExistsError: if the file exists.
        TypeError: for another writer.
        ValueError: if nothing in the model is converted, or for another ``every``.
    """
    check_module("model", model)
    check_whole("every", every)
    watches = watches_of(model)
    file, write = _opened(writer)
    for watch in watches:
        # Passes before, as those of a calibration, do not count: steps of two runs are the same.
        watch.restart()
        watch.every = every
    recorder = Recorder(model, write)
    recorder._file = file
    layers = {layer.name: layer.recipe for w in watches for layer in w.layers}
    versions = {"fp8": __version__, "torch": str(torch.__version__)}
    if _rank() == 0:
        write(
            {"kind": "header", "versions": versions, "every": every, "layers": layers}
        )
    return recorder


def _opened(writer: Writer) -> tuple[IO[str] | None, Callable[[Record], object]]:
    """The file of a writer, and the function that writes a record."""
    if isinstance(writer, str | os.PathLike):
        if _rank() > 0:
            return None, _nothing
        file = open(writer, "x", encoding="utf-8")  # noqa: SIM115, closed by close()

        def write(record: Record) -> None:
            file.write(as_line(record))
            file.flush()

        return file, write
    if callable(add_scalar := getattr(writer, "add_scalar", None)):
        return None, _scalars(add_scalar)
    if callable(log := getattr(writer, "log", None)):
        return None, _logs(log)
    if callable(writer):
        return None, writer
    raise TypeError(
        f"writer is of type {type(writer).__name__}: expected a path, an object with add_scalar "
        "(TensorBoard) or log (wandb), or a function of a dict"
    )


def _nothing(record: Record) -> None:
    pass


def _named(record: Record) -> dict[str, float]:
    """The numbers of a record by name."""
    if record["kind"] == "loss":
        return {"fp8/loss": record["loss"]}
    named = {}
    for row in record.get("rows", []):
        for number in NUMBERS:
            named[f"fp8/{row['layer']}/{row['operand']}/{number}"] = row[number]
    return named


def _scalars(add_scalar: Callable[[str, float, int], object]) -> Any:
    def write(record: Record) -> None:
        for name, value in _named(record).items():
            add_scalar(name, value, record["step"])

    return write


def _logs(log: Callable[[dict[str, Any]], object]) -> Any:
    def write(record: Record) -> None:
        # wandb drops what is logged under a step that is past: the step is a value of its own.
        if named := _named(record):
            log({**named, "fp8/step": record["step"]})

    return write


# Ranks


def _ranks() -> int:
    started = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if started else 1


def _rank() -> int:
    return torch.distributed.get_rank() if _ranks() > 1 else 0


Part = tuple[list[Seen], list[float]]


def _gather(part: Part) -> list[Part]:
    """The parts of all ranks on rank 0, none on others."""
    parts: list[Any] | None = [None] * _ranks() if _rank() == 0 else None
    torch.distributed.gather_object(part, parts)
    return parts or []


def merged(rows: list[Seen]) -> list[Seen]:
    """One row for the rows of one cast on several ranks, with the worst of their numbers."""
    casts: dict[tuple[int, str, str], list[Seen]] = {}
    for row in rows:
        casts.setdefault((row.step, row.layer, row.operand), []).append(row)
    return [_worst(same) for same in casts.values()]


def _worst(rows: list[Seen]) -> Seen:
    values = {n: [asdict(row)[n] for row in rows] for n in ("rms", "sqnr", "largest")}
    worst = {n: max(asdict(row)[n] for row in rows) for n in SHARES}
    # NaN of the SQNR is that of an operand of zeros.
    sqnr = [value for value in values["sqnr"] if not math.isnan(value)]
    square = sum(value**2 for value in values["rms"]) / len(rows)
    largest = values["largest"]
    has_nan = any(map(math.isnan, largest))
    return replace(
        rows[0],
        **worst,
        rms=math.sqrt(square),
        sqnr=min(sqnr, default=math.nan),
        largest=math.nan if has_nan else max(largest),
    )
