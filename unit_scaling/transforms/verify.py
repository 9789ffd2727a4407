"""`verify`: measures whether a model is unit-scaled, in one training step.

The model's transforms stay active: the measured values are those the model computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from fp8.common.mixin import check_module
from fp8.common.report import Rows, as_table
from fp8.common.step import Batch, Loss, call, copied, seeded, starts, tensors, unwrapped
from fp8.common.validation import check_name, check_whole
from fp8.modes.autocast import outside_compiler

from ..checks.first_call import LOW_GRADIENT, skip_checks
from .inspect.product_probe import RANGES, Measurement, Watch
from .install import find_scope, install, is_sharded
from .record.copies import deep_copy
from .record.probe import Observing
from .record.values import rms_of
from .run.transform import UnitScale


class Verification(Rows[Measurement]):
    """The measurements of `verify`; prints as a table.

    Attributes:
        notes: what could not be measured, and why.
        diagnosis: an interpretation of the rows, root causes first.
    """

    def __init__(
        self, rows: Iterable[Measurement], notes: Iterable[str] = (), loss: float | None = None
    ) -> None:
        """loss: the RMS of its gradient at the output; None if it is inside, or if that is scaled
        to RMS 1."""
        super().__init__(rows, notes)
        self.diagnosis = _diagnosis(self.rows, loss)

    @property
    def outside(self) -> list[Measurement]:
        """The rows whose RMS is outside the range of its kind: too small, too large or NaN."""
        return [row for row in self.rows if row.inside is False]

    def share(self, kind: str) -> float:
        """Returns the fraction of the rows of a kind that are inside its range.

        NaN if every row of that kind is zero or there is none.

        Raises:
            ValueError: the kind is unknown or has no range.
        """
        check_name("kind", kind, [name for name, limits in RANGES.items() if limits is not None])
        inside = [row.inside for row in self.rows if row.kind == kind and row.inside is not None]
        return sum(inside) / len(inside) if inside else math.nan

    def __str__(self) -> str:
        cells = [("module", "call", "tensor", "kind", "rms", "")]
        for row in self.rows:
            call = f"{row.call} {row.number}" if row.number else row.call
            mark = "outside" if row.inside is False else ""
            path = row.path or "(model)"
            cells.append((path, call, row.tensor, row.kind, f"{row.rms:.3g}", mark))
        return "\n".join([as_table(cells), "", *self.notes, *self._summary(), "", *self.diagnosis])

    __repr__ = __str__

    def _summary(self) -> Iterator[str]:
        for kind, limits in RANGES.items():
            rows = [row.inside for row in self.rows if row.kind == kind]
            if rows and limits is not None:
                low, high = limits
                zeros, inside = rows.count(None), rows.count(True)
                also = f", {zeros} of zeros" if zeros else ""
                yield f"{kind}: {inside} of {len(rows) - zeros} inside [{low:g}, {high:g}]{also}"


def verify(
    model: nn.Module, batch: Batch, *, loss: Loss | None = None, seed: int = 0
) -> Verification:
    """Runs a training step of ``model`` and measures the RMS of the operands of its products.

    Each linear map, matrix product, convolution, embedding and attention has rows for its operands,
    its output, and the gradient of each. The gradient of an operand is the one this call
    propagates, including its factor; that of the output is the whole gradient. What is cast is
    judged: operands and gradients of outputs. With `unit_scale` they are measured as cast, divided
    by powers of two: a gradient by that of `fp8.calibrate` or of the first gradient, else by the
    nearest. Biases, masks, integer and empty tensors, products inside a parametrization, and
    gradients that are not computed have no row. A recurrent layer is one call, and so is
    `unit_scaling.functional.einsum` of three operands or more: ``notes`` says so.

    The step runs eagerly on a copy, in the model's mode (training or evaluation): the model, its
    gradients, buffers and the random state do not change. With `unit_scale` a first step makes the
    plan, and the one after it is measured.
    `DistributedDataParallel` is measured on the batch of this process, without communication.

    Args:
        model: the model to measure.
        batch: a tensor, a tuple or list of arguments, or a dict of keyword arguments.
        loss: maps the model's output to a scalar. By default the output's ``loss`` or its first
            tensor without dimensions; if there is none, every output tensor gets a standard normal
            gradient.
        seed: the seed of these gradients.

    Raises:
        TypeError: ``model`` is not an `nn.Module`.
        ValueError: no output requires a gradient, the loss is not a scalar, or FSDP has sharded the
            model.

    >>> import unit_scaling as uu
    >>> model = nn.Linear(512, 512)
    >>> uu.verify(model, torch.randn(512, 512)).share("weight")
    0.0
    >>> uu.verify(uu.Linear(512, 512), torch.randn(512, 512)).share("weight")
    1.0
    """
    check_module("verify", model)
    check_whole("seed", seed, 0)
    if not (loss is None or callable(loss)):
        raise TypeError(f"loss must be a function of the model's output, got {loss!r}")
    model = unwrapped(model)
    if is_sharded(model):
        raise ValueError(
            f"verify cannot copy {type(model).__name__}, which FSDP has sharded: call it before"
        )
    trial = deep_copy(model)
    trial.zero_grad()
    skip_checks(trial)
    lists = [(n, m) for n, m in trial.named_modules() if isinstance(m, ParametrizationList)]
    computing = {path for name, part in lists for path, _ in part.named_modules(prefix=name)}
    watch, observing = Watch({id(p) for p in trial.parameters()}, computing), Observing()
    install(trial, observing)
    if any(find_scope(part, UnitScale) for part in trial.modules()):  # the first call makes a plan
        _step(trial, nullcontext(), batch, loss, seed)
    at_output = _step(trial, observing.by(watch), batch, loss, seed)
    scope = find_scope(trial, UnitScale)
    scaled = scope is not None and scope.unit_scaled
    return Verification(
        watch.results(), watch.notes, None if scaled else max(at_output, default=None)
    )


def _step(
    model: nn.Module,
    observed: AbstractContextManager[None],
    batch: Batch,
    loss: Loss | None,
    seed: int,
) -> list[float]:
    """A training step whose forward pass is observed: checkpoints recompute parts of the model in
    the backward pass. Returns the result of `_measured`."""
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.is_cuda})
    with seeded(None, devices), torch.enable_grad():
        with observed:
            output = outside_compiler(lambda: call(model, copied(batch)))
        at_output = _measured(output)
        outside_compiler(lambda: _backward(output, loss, seed))
    model.zero_grad()
    return at_output


def _measured(output: Any) -> list[float]:
    """Collects the RMS of each gradient at the output; stays empty for a loss inside the model."""
    found: list[float] = []
    ends = [t for t in tensors(output) if t.requires_grad]
    if all(t.dim() for t in ends):
        for tensor in ends:
            tensor.register_hook(lambda grad: found.append(rms_of(grad)) if grad.any() else None)
    return found


def _backward(output: Any, loss: Loss | None, seed: int) -> None:
    ends, gradients = starts(output, loss, seed)
    if not ends:
        raise ValueError("no tensor in the model's output requires a gradient: nothing to measure")
    torch.autograd.backward(ends, gradients)


# The diagnosis

_INIT = (
    "bring a plain model to RMS 1 by unit_scale; weights of uu layers were overwritten after the "
    "layers had drawn them: leave them out of the init, or call reset_parameters() after it"
)
_LOSS = (
    "a loss outside of the model divides by the size of the batch: use that of "
    "unit_scaling.functional (U.cross_entropy), or compute it in the model's forward"
)
_HIDDEN = (
    "unit_scaling.transforms.track_scales shows the calls around it, and unit_scaling.report what "
    "unit_scale did with them; a function of torch may stand for U's"
)
_FEW = ", or only some positions have a gradient, as of a class token or of a mean"


def _diagnosis(rows: Sequence[Measurement], loss: float | None) -> list[str]:
    """Sentences, causes before their effects, or one saying that all tensors are in range. loss:
    the RMS of the gradient at the model's output; None if the loss is inside the model or the model
    scales that gradient to RMS 1, as `unit_scale` does."""
    outside = [row for row in rows if row.inside is False]
    found = _weights([row for row in rows if row.kind == "weight"])
    found += _change("activations", [row for row in outside if row.kind == "activation"])
    if loss is not None and 0 < loss < LOW_GRADIENT:
        size = f"has RMS {loss:.2g} instead of 1"
        found.append(f"the loss's gradient at the model's output {size}: {_LOSS}")
    if loss is None or loss >= LOW_GRADIENT:  # otherwise all gradients are that small
        gradients = [row.rms for row in rows if row.kind == "gradient"]
        if gradients and not any(gradients):
            found.append(
                "every gradient is zero: weights of zeros, or a loss that no product goes into"
            )
        # In backward order. Weight gradients do not propagate and come after all others.
        backward = [row for row in reversed(outside) if row.kind.endswith("gradient")]
        backward.sort(key=lambda row: row.kind == "weight gradient")
        found += [f"{line}{_FEW}" for line in _change("gradients", backward, "backward, ")]
    return found or ["every tensor is in the range of its kind"]


def _weights(weights: list[Measurement]) -> list[str]:
    outside = [row for row in weights if row.inside is False]
    if not outside:
        return []
    low, high = min(row.rms for row in outside), max(row.rms for row in outside)
    rms = f"{low:.2g}" if high < 1.1 * low else f"{low:.2g} to {high:.2g}"
    return [
        f"{len(outside)} of {len(weights)} weights have RMS {rms} instead of 1, the first in "
        f"{_place(outside[0])}: {_INIT}"
    ]


def _change(what: str, outside: list[Measurement], direction: str = "") -> list[str]:
    return [
        f"{what} {'shrink' if row.rms < 1 else 'grow'} from the {row.tensor} of {_place(row)} on, "
        f"{direction}RMS {row.rms:.2g}: {_HIDDEN}"
        for row in outside[:1]
    ]


def _place(row: Measurement) -> str:
    return f"{row.path or 'the model'} ({row.call})"
