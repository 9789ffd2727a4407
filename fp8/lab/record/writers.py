"""Where a record goes: a file, TensorBoard, wandb, or a function."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ...warnings import PitfallWarning, show
from .runs import NUMBERS, Record, as_line

Writer = Any
"""A path; TensorBoard's SummaryWriter, or what has its add_scalar; wandb, or what has its log; or a
function of a record."""


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
    if callable(getattr(writer, "add_scalar", None)):

        def scalars(record: Record) -> None:
            for name, value in _named(record).items():
                writer.add_scalar(name, value, record["step"])

        return Sink(scalars, nothing)
    if callable(getattr(writer, "log", None)):
        # The x axis of these charts; wandb counts calls of log by itself.
        if callable(getattr(writer, "define_metric", None)):
            writer.define_metric("fp8/*", step_metric="fp8/step")

        def logs(record: Record) -> None:
            # wandb drops what is logged under a past step: the step is a value of its own.
            if named := _named(record):
                writer.log({**named, "fp8/step": record["step"]})

        return Sink(logs, nothing)
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
    # Without what a killed run has written of its last line. A device has no size.
    if start and os.path.getsize(path):
        os.truncate(path, Path(path).read_bytes().rfind(b"\n") + 1)

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
