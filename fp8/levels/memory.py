"""`state`: the measured memory of a model and its optimizer, per parameter."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from ..common.mixin import bare_class, check_module
from ..common.report import LEFT_ALONE, Report, Row, as_table
from ..optim.state import purpose_of
from ..tensors.scaled_tensor import ScaledTensor

NOT_COVERED = "no weight of a linear layer or convolution, or not trained when the level began"


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of a set of parameters, by purpose. count: the number of elements."""

    count: int
    weight: int = 0
    gradient: int = 0
    master: int = 0
    first_moment: int = 0
    second_moment: int = 0
    other: int = 0
    """Other optimizer state: step counts and the like."""

    @property
    def total(self) -> int:
        return sum(getattr(self, kind) for kind in _KINDS)

    @property
    def per_parameter(self) -> float:
        """The total divided by count."""
        return self.total / self.count if self.count else 0.0


_KINDS = [field.name for field in fields(Bytes) if field.name != "count"]


@dataclass(frozen=True, kw_only=True)
class State:
    """The result of `state`; prints as a table of bytes per parameter.

    scaled: the weights that are ScaledTensors. others: all other parameters. report: one row for
    each parameter with two or more dimensions: its format, or why it was left alone.
    """

    scaled: Bytes
    others: Bytes
    report: Report[Row]

    def __str__(self) -> str:
        heads = ["bytes per parameter", "count", *(kind.replace("_", " ") for kind in _KINDS)]
        rows = [[*heads, "total"]]
        for name, part in (("scaled weights", self.scaled), ("everything else", self.others)):
            if part.count:
                each = [getattr(part, kind) / part.count for kind in _KINDS]
                numbers = [f"{value:.2f}" for value in [*each, part.per_parameter]]
                rows.append([name, str(part.count), *numbers])
        return as_table(rows)


def state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> State:
    """Measures the memory of the parameters of ``model``, from the tensors that exist now.

    Gradients count while they exist: call it after a backward pass, before ``zero_grad``. Tied
    parameters count once.

    Args:
        model: the model.
        optimizer: its optimizer, whose states are included.

    Returns:
        A `State`, in bytes.
    """
    check_module("state", model)
    groups = () if optimizer is None else optimizer.param_groups
    trained = {id(p) for group in groups for p in group["params"]}
    sizes = {scaled: dict.fromkeys(("count", *_KINDS), 0) for scaled in (True, False)}
    rows = []
    for name, parameter in model.named_parameters():
        scaled = isinstance(parameter, ScaledTensor)
        kept = {} if optimizer is None else optimizer.state.get(parameter, {})
        _add(sizes[scaled], parameter, kept)
        if parameter.dim() > 1:
            kind = bare_class(model.get_submodule(name.rpartition(".")[0])).__name__
            why = NOT_COVERED if id(parameter) in trained else "not trained by the optimizer"
            done = (parameter.format,) if isinstance(parameter, ScaledTensor) else (LEFT_ALONE, why)
            rows.append(Row(name, kind, *done))
    return State(scaled=Bytes(**sizes[True]), others=Bytes(**sizes[False]), report=Report(rows))


def _add(sizes: dict[str, int], parameter: Any, state: dict[str, Any]) -> None:
    sizes["count"] += parameter.numel()
    sizes["weight"] += _size(parameter)
    sizes["gradient"] += _size(parameter.grad)
    sizes["master"] += _size(vars(parameter).get("loaded"))
    for name, value in state.items():
        sizes[purpose_of(name, "other")] += _size(value)


def _size(value: Any) -> int:
    if isinstance(value, ScaledTensor):
        return _size(value.stored) + _size(value.scale)
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
