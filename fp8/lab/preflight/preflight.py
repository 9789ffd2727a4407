"""`fp8.preflight`: will a model train in low precision, which layers stay high, what does it
save?"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import nn
from torch.optim import Optimizer

from ...common.libraries import transforms as installed
from ...common.report import as_table, finite
from ...common.step import Batch, Loss
from ...common.validation import check_name
from ...recipes.policy import Policy
from ...recipes.recipe import Recipe, get_recipe
from ..hardware import Hardware, get_hardware
from .findings import Candidate, Findings
from .stages import PreflightRun, Settings
from .training import Setup, Source
from .verdict import Continue

__all__ = ["Preflight", "PreflightError", "preflight"]

RECIPES_TRIED = (
    "bf16",
    "tensor",
    "static",
    "row",
    "block",
    "mxfp8",
    "nvfp4",
    "mxfp4",
    "unit",
)
"""The recipes that a preflight compares by default."""


class PreflightError(ValueError):
    """A model or its data cannot be measured. report: the results before the error."""

    def __init__(self, message: str, report: Preflight) -> None:
        super().__init__(message)
        self.report = report


class Preflight:
    """The result of `preflight`. It prints as the verdict and a table of the candidates.

    findings: all figures, as plain data.
    """

    def __init__(self, findings: Findings) -> None:
        self.findings = findings

    @property
    def policy(self) -> Policy | None:
        """The recommended policy; None if none was shown to train as the reference."""
        verdict = self.findings.verdict
        if verdict.recommended:
            return Policy.from_dict(verdict.policy)
        return None

    def table(self) -> str:
        """The candidates as a text table, in order of their update error."""
        heads = (
            "policy",
            "outcome",
            "gap of the loss",
            "pairs",
            "update error",
            "FLOPs cast",
        )
        return as_table([heads, *map(_cells, self.findings.candidates)])

    def to_json(self) -> str:
        """All figures as JSON; numbers that are not finite are null."""
        return json.dumps(finite(self.findings.to_dict()), indent=1, allow_nan=False)

    def save(self, path: str | Path) -> None:
        """Writes a page (a path that ends in .html) or all figures (.json).

        Raises:
            ValueError: for another suffix.
            ImportError: for a page without the extra ``preflight`` (jinja2).
        """
        path = _checked(path, ".html", ".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".html":
            from .page import page

            text = page(self.findings)
        else:
            text = self.to_json()
        # An interrupted write leaves the old file.
        temporary = path.with_name(f"{path.name}.tmp")
        temporary.write_bytes(text.encode())
        os.replace(temporary, path)

    @staticmethod
    def load(path: str | Path) -> Preflight:
        """Reads the figures that `save` wrote as JSON."""
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        return Preflight(Findings.from_dict(values))

    def __str__(self) -> str:
        found = self.findings
        return "\n".join([str(found.verdict), "", self.table(), *found.notes])

    __repr__ = __str__


def preflight(
    model: Source,
    batches: Iterable[Batch] | None = None,
    *,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    recipes: Sequence[str | Recipe] | None = None,
    steps: int = 200,
    held_out: int = 8,
    budget: float = 600.0,
    target: float = 0.01,
    max_seeds: int = 32,
    hardware: Sequence[str | Hardware] = ("h100", "b200"),
    transforms: bool = True,
    save: str | Path | None = None,
    resume: str | Path | None = None,
    progress: bool = True,
) -> Preflight:
    """Measures which low-precision recipes train a model as its own precision does.

    It measures update errors of the recipes at snapshots of a reference run, searches the layers to
    keep in high precision, and trains the best policies beside the reference, from the same weights
    on the same batches. The model is not changed. All random numbers are seeded.

    Args:
        model: a model; or a function that returns ``(model, batches[, loss[, optimizer]])``, called
            once per seed with ``seed=`` if it takes that; or a `fp8.lab.preflight.training.Setup`.
        batches: with a model: an iterable of batches, each a tensor, a tuple or list of positional
            arguments, or a mapping of keyword arguments. ``steps + held_out`` of them are drawn.
        loss: a function of the output that returns a scalar. None: the output's ``loss``.
        optimizer: built on the model's parameters; copied with it. None: torch's AdamW.
        recipes: names or Recipes to compare; None: `RECIPES_TRIED`. The default recipe of
            `fp8.convert`, "tensor", is added, and always trained.
        steps: the steps of each training run; reduced to what batches and budget allow.
        held_out: the number of batches for the held-out loss, after those for training.
        budget: seconds for everything, by the wall clock. A run that would not end in time is not
            started; one that does not is ended.
        target: in units of the loss: a gap below it counts as none. A candidate trains as the
            reference where the interval of its gap ends below it.
        max_seeds: the largest number of pairs of runs of a candidate.
        hardware: names in `fp8.lab.hardware.HARDWARE`, or rows of your own.
        transforms: whether to try the transforms of installed packages, as unit scaling.
        save: a path ending in .json, written after each stage and each training run.
        resume: a JSON file of an interrupted preflight, whose stages and runs are not repeated.
        progress: whether to name stages and runs on stderr as they begin, if that is a terminal.

    Returns:
        A `Preflight`. After Ctrl-C it holds what was measured until then. SIGTERM ends the process
        once that is saved. In the command of a verdict, ``...`` stands for the arguments of this
        call.

    Raises:
        PreflightError: a ValueError with the partial report: for a model without products, a loss
            that is not a scalar or not finite, batches that run out.
        ValueError: for an unknown recipe or hardware, or a file to resume of another preflight.
        TypeError: for arguments of another type.
    """
    path = None
    if save is not None:
        path = _checked(save, ".json")
    if recipes is None:
        recipes = RECIPES_TRIED
    found = installed() if transforms else {}
    settings = Settings(
        recipes=tuple(map(get_recipe, recipes)),
        steps=steps,
        held_out=held_out,
        budget=budget,
        target=target,
        max_seeds=max_seeds,
        hardware=tuple(map(get_hardware, hardware)),
        transforms={getattr(each, "label", name): each for name, each in found.items()},
    )
    result = Preflight(Findings())
    if resume is not None:
        result = Preflight.load(resume)
    run = PreflightRun(
        _source(model, batches, loss, optimizer),
        settings,
        result.findings,
        proceed=_continued(path, settings),
        on_change=lambda: None if path is None else result.save(path),
        shows_progress=progress,
    )
    return _complete(run, result)


def _continued(path: Path | None, settings: Settings) -> Continue:
    """The function (seconds, seeds) -> the call that goes on for so long, as Python. Without a file
    that call measures all again."""

    def proceed(seconds: float, seeds: int) -> str:
        again = f"max_seeds={max(seeds, settings.max_seeds)}"
        if path is None:
            return f"fp8.preflight(..., budget={seconds + settings.budget:g}, {again})"
        file = repr(str(path))
        return f"fp8.preflight(..., resume={file}, save={file}, budget={seconds:g}, {again})"

    return proceed


def _complete(run: PreflightRun, result: Preflight) -> Preflight:
    """Runs it, and saves what there is if it is interrupted or fails."""
    findings = result.findings
    with terminable():
        try:
            run.run()
        except KeyboardInterrupt:
            findings.notes.append(
                "interrupted: what follows the last stage was not measured"
            )
            run.save()
        except (ValueError, TypeError) as error:
            findings.notes.append(f"stopped: {error}")
            run.save()
            raise PreflightError(str(error), result) from error
    return result


@contextmanager
def terminable() -> Iterator[None]:
    """Within the block SIGTERM raises KeyboardInterrupt, as Ctrl-C does; at its end the signal is
    sent again. Without effect where the program has a handler of its own, and in threads."""
    # Python takes handlers in its main thread alone.
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    received: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if received:
            signal.raise_signal(signal.SIGTERM)


def _checked(path: str | Path, *suffixes: str) -> Path:
    check_name("suffix of a preflight's file", Path(path).suffix, suffixes)
    return Path(path)


def _source(
    model: Source,
    batches: Iterable[Batch] | None,
    loss: Loss | None,
    optimizer: Optimizer | None,
) -> Source:
    if isinstance(model, nn.Module):
        if batches is None:
            raise TypeError(
                "preflight needs batches with a model, or a function that returns both"
            )
        return Setup(model, batches, loss, optimizer)
    if any(value is not None for value in (batches, loss, optimizer)):
        raise TypeError(
            "batches, loss and optimizer go with a model; a setup returns its own"
        )
    return model


def _cells(row: Candidate) -> tuple[str, ...]:
    errors = " / ".join(f"{error:.3g}" for error in row.errors.values())
    gap = "-"
    if row.gap is not None:
        gap = f"{row.gap:+.4f}"
        if row.low is not None and row.high is not None:
            gap += f" ({row.low:+.4f} to {row.high:+.4f})"
    return row.name, row.outcome, gap, str(row.seeds), errors or "-", f"{row.share:.0%}"
