"""`verify`: is a model unit-scaled? One training step, and the RMS of what goes into its products.

The transforms of the model stay in force: what is measured is what the model computes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8.common.mixin import check_module
from fp8.common.report import Rows, as_table
from fp8.common.step import Batch, Loss, call, starts, tensors, unwrapped
from fp8.common.validation import check_name, check_whole
from fp8.modes.autocast import outside_compiler

from ..checks.first_call import skip_checks
from .capture.copies import deep_copy
from .capture.record import rms_of
from .inspect.diagnosis import diagnosis
from .inspect.rows import as_csv, as_json
from .inspect.watch import Watch
from .plan.weights import parametrizations
from .run.install import find_scope, install, is_sharded
from .run.scope import UnitScale

__all__ = ["RANGES", "Measurement", "Verification", "verify"]

RANGES: dict[str, tuple[float, float] | None] = {
    "activation": (1 / 4, 4.0),
    "output": None,
    "weight": (1 / 4, 4.0),
    "gradient": (1 / 4, 4.0),
    "query-key gradient": (1 / 64, 4.0),
    "weight gradient": (1 / 4, 4.0),
    "passed gradient": None,
    "attention": None,
}
"""Kind of tensor -> the RMS it should have.

A factor of 4 is two steps of the exponent: of the range of a format little is lost by it. What is
zero everywhere is in no range and outside of none, and does not count.

"activation" is an operand of a product, which a cast sees; an "output" is one where another product
reads it. "gradient" is that of the output of a product: the one that a cast sees. "passed gradient"
is what a product hands on to its input: it has no range, as no cast sees it before it is the
gradient of an output again. "weight gradient" is what the optimizer gets.

The gradient of queries and keys of unit RMS, with logits q.k/d for heads of width d, is about
1/sqrt(d): the gradient of a logit is that of its probability times the probability, about 1/n for
n keys, and a query sums n of them times k/d. 1/64 is a quarter of that for heads of width 256.
What is called so: the gradients of the outputs of products that compute nothing but queries, keys
or an additive bias of the logits.

"attention" is what is inside attention that is written out: logits, probabilities and their
gradients, which are as the softmax makes them. It has no range; fused kernels show none of it.
"""


@dataclass(frozen=True)
class Measurement:
    """One tensor of one call.

    path: of the module. call: the kind of product. number: how many of it came before in the
    module. tensor: "input", "weight", "output", ..., "gradient of input", ... kind: a key of
    RANGES. inside: whether rms is in the range of the kind; None where it has none, and of zeros.
    """

    path: str
    call: str
    number: int
    tensor: str
    kind: str
    rms: float
    inside: bool | None


class Verification(Rows[Measurement]):
    """The rows of `verify`; printed, a table of them.

    notes: what could not be measured, and why. diagnosis: what the rows say in words, the cause of
    the others first.
    """

    def __init__(
        self,
        rows: Iterable[Measurement],
        notes: Iterable[str] = (),
        loss: float | None = None,
    ) -> None:
        """loss: the RMS of its gradient at the output, None where it is inside of the model or
        brought to RMS 1."""
        super().__init__(rows, notes)
        self.diagnosis = diagnosis(self.rows, loss)

    @property
    def outside(self) -> list[Measurement]:
        """The rows whose RMS is not in the range of their kind: too small, too large or NaN."""
        return [row for row in self.rows if row.inside is False]

    def share(self, kind: str) -> float:
        """The share of the rows of a kind that are inside; NaN where there is no such row but of
        zeros.

        Raises ValueError for an unknown kind and for one without a range.
        """
        check_name("kind", kind, [name for name, limits in RANGES.items() if limits is not None])
        inside = [row.inside for row in self.rows if row.kind == kind and row.inside is not None]
        return sum(inside) / len(inside) if inside else math.nan

    def to_json(self, path: str | Path | None = None) -> str:
        """The rows as a JSON list of objects; also written to ``path``."""
        return as_json(self.rows, path)

    def to_csv(self, path: str | Path | None = None) -> str:
        """The rows as CSV with a header; also written to ``path``."""
        return as_csv(self.rows, path)

    def __str__(self) -> str:
        cells = [("module", "call", "tensor", "kind", "rms", "")]
        for row in self.rows:
            call = f"{row.call} {row.number}" if row.number else row.call
            mark = "outside" if row.inside is False else ""
            cells.append(
                (row.path or "(model)", call, row.tensor, row.kind, f"{row.rms:.3g}", mark)
            )
        return "\n".join([as_table(cells), "", *self.notes, *self._summary(), "", *self.diagnosis])

    __repr__ = __str__

    def _summary(self) -> Iterator[str]:
        for kind, limits in RANGES.items():
            rows = [row for row in self.rows if row.kind == kind]
            if rows and limits is not None:
                low, high = limits
                inside = [row.inside for row in rows if row.inside is not None]
                zeros = len(rows) - len(inside)
                also = f", {zeros} of zeros" if zeros else ""
                yield f"{kind}: {sum(inside)} of {len(inside)} inside [{low:g}, {high:g}]{also}"


def verify(
    model: nn.Module,
    batch: Batch,
    *,
    loss: Loss | None = None,
    seed: int = 0,
) -> Verification:
    """One training step of ``model``, and the RMS of the operands of its products.

    batch: a tensor, a tuple or list of arguments, or a dict of keyword arguments.
    loss: output of the model -> a scalar. Without it the loss is the output's ``loss`` or its first
    tensor without dimensions; where the model has no loss, every output tensor gets a gradient of
    independent standard normal numbers, drawn with ``seed``.

    There are rows for each call of a linear map, matrix product, convolution, embedding and
    attention: each operand, the output, and the gradient of each. A gradient of an operand is what
    leaves this call towards it, its factor included; the gradient of the output is what arrives
    there. Judged are operands, the gradients of outputs and those of weights; an output is where
    another product reads it. Biases, masks, integer and empty tensors have no row, nor have
    products within a parametrization, nor a gradient that is not computed.

    The step is made by a copy of the model, in the model's mode (training or evaluation), eagerly:
    the model, its gradients, buffers and the random state stay as they are. Of a recurrent layer,
    whose steps are one call, the operands and the output have rows, and `notes` says so. A
    `DistributedDataParallel` is measured on the batch of this process, without communication.
    Raises TypeError for what is not a module, ValueError where no output requires a gradient, for a
    loss of more than one number, and for a model that FSDP has sharded.

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
    twin = deep_copy(model)
    twin.zero_grad()
    skip_checks(twin)
    watch = Watch({id(p): name for name, p in twin.named_parameters()}, parametrizations(twin))
    install(twin, watch)
    if loss is None:
        _forget_losses(twin)
    devices = sorted({p.device.index or 0 for p in twin.parameters() if p.is_cuda})
    with torch.random.fork_rng(devices), torch.enable_grad():
        output = outside_compiler(lambda: call(twin, _detached(batch)))
        watch.active = False  # checkpoints compute parts of the model again
        at_output = _measured(output)
        outside_compiler(lambda: _backward(output, loss, seed))
    rows = [_measurement(*found) for found in watch.results()]
    at_loss = None if _is_gauged(twin) else max(at_output, default=None)
    return Verification(rows, watch.notes, at_loss)


def _is_gauged(model: nn.Module) -> bool:
    """Whether the gradient that a loss outside of the model sends is brought to RMS 1."""
    scope = find_scope(model, UnitScale)
    return scope is not None and scope.unit_scaled


def _forget_losses(model: nn.Module) -> None:
    """Has the gradients that arrive at the model measured anew, which no loss of the user makes."""
    for part in model.modules():
        scope = find_scope(part, UnitScale)
        for plan in [] if scope is None else scope.plans.values():
            plan.outside = None


def _measured(output: Any) -> list[float]:
    """The RMS of each gradient that reaches the output, once it has; none of a loss inside."""
    found: list[float] = []
    ends = [t for t in tensors(output) if t.requires_grad]
    if all(t.dim() for t in ends):
        for tensor in ends:
            tensor.register_hook(lambda grad: found.append(rms_of(grad)) if grad.any() else None)
    return found


def _measurement(
    path: str, call: str, number: int, tensor: str, kind: str, rms: float
) -> Measurement:
    limits = RANGES[kind]
    inside = None if limits is None or rms == 0 else limits[0] <= rms <= limits[1]
    return Measurement(path, call, number, tensor, kind, rms, inside)


def _detached(batch: Any) -> Any:
    """A copy that shares no storage with ``batch``, nor its part of the graph."""
    memo: dict[int, Any] = {}
    for t in tensors(batch):
        memo[id(t)] = t.detach().clone().requires_grad_(t.requires_grad)
    return copy.deepcopy(batch, memo)


def _backward(output: Any, loss: Loss | None, seed: int) -> None:
    ends, gradients = starts(output, loss, seed)
    if not ends:
        raise ValueError("no tensor in the model's output requires a gradient: nothing to measure")
    torch.autograd.backward(ends, gradients)
