"""Where a record goes: a file, TensorBoard, wandb, or a function."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple, Protocol

from ...warnings import PitfallWarning, show
from .runs import NUMBERS, Record, as_line


class ScalarWriter(Protocol):
    """What `record` needs of TensorBoard's SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Adds a value."""


class Logger(Protocol):
    """What `record` needs of a run of wandb, or of its module."""

    def log(self, data: dict[str, Any]) -> object:
        """Logs values by name."""


Writer = str | os.PathLike[str] | ScalarWriter | Logger | Callable[[Record], object]


class Sink(NamedTuple):
    """A writer that is open."""

    write: Callable[[Record], object]
    close: Callable[[], object]


def nothing(*_: Any) -> None:
    """Writes nothing, closes nothing."""


NOWHERE = Sink(nothing, nothing)


def opened(writer: Writer, start: int) -> Sink:
    """The sink of a writer. start: as of `record`. Raises as that."""
    if isinstance(writer, str | os.PathLike):
        return _file(writer, start)
    if callable(add_scalar := getattr(writer, "add_scalar", None)):
        return Sink(_scalars(add_scalar), nothing)
    if callable(log := getattr(writer, "log", None)):
        # The x axis of these charts; wandb counts calls of log by itself.
        if callable(define := getattr(writer, "define_metric", None)):
            define("fp8/*", step_metric="fp8/step")
        return Sink(_logs(log), nothing)
    if callable(writer):
        return Sink(writer, nothing)
    raise TypeError(
        f"writer is of type {type(writer).__name__}: expected a path, an object with add_scalar "
        "(TensorBoard) or log (wandb), or a function of a dict"
    )


def _file(path: str | os.PathLike[str], start: int) -> Sink:
    mode = "a" if start else "x"
    try:
        file = open(path, mode, encoding="utf-8")  # noqa: SIM115, closed by the sink
    except FileExistsError as error:
        raise FileExistsError(
            f"{os.fspath(path)} exists: give another path, or start=N to go on after step N"
        ) from error
    if start:
        _drop_torn_line(path)

    def write(record: Record) -> None:
        if file.closed:
            return
        try:
            file.write(as_line(record))
            file.flush()
        except OSError as error:  # a full disk ends the record, not the training
            with suppress(OSError):
                file.close()
            where = f"{os.fspath(path)} ends at step {record['step']}"
            show(PitfallWarning, f"fp8.record: {where}: {error}")

    return Sink(write, file.close)


def _drop_torn_line(path: str | os.PathLike[str]) -> None:
    """Cuts what a killed run has written of its last line."""
    if os.path.getsize(path):  # an empty file has no map
        with (
            open(path, "r+b") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text,
        ):
            end = text.rfind(b"\n") + 1
        os.truncate(path, end)


def _named(record: Record) -> dict[str, float]:
    """The numbers of a record by name."""
    if record["kind"] == "loss":
        return {"fp8/loss": record["loss"]}
    under = "fp8"
    if record["kind"] == "what if":
        under = f"fp8/what if {record['recipe']}"
    named = {}
    for row in record.get("rows", []):
        for number in NUMBERS:
            named[f"{under}/{row['layer']}/{row['operand']}/{number}"] = row[number]
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
