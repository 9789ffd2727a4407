"""What a row of the collection builds: a model, its batch, and its loss."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fp8.common.step import find_loss, tensors_within

__all__ = [
    "Case",
    "Stranger",
    "WithLoss",
    "distance",
    "loss_inside",
    "loss_outside",
    "tokens",
]


@dataclass(frozen=True)
class Case:
    """A model and a batch for it.

    loss: the model's output -> a scalar, computed outside of the model. Without one the loss is the
    output or its ``loss``, where that is one number; where the model has none, the distance of its
    outputs from random numbers.
    """

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[[Any], Tensor] | None = None

    def run(self, model: nn.Module) -> tuple[Any, Tensor]:
        """Output and loss of the model, or of a transformed one in its place."""
        output = model(*copy.deepcopy(self.args), **copy.deepcopy(dict(self.kwargs)))
        return output, self.loss_of(output)

    @property
    def batch(self) -> Any:
        """The arguments as `fp8.calibrate` and `uu.verify` take them."""
        return self.named() if self.kwargs else self.args

    def named(self) -> dict[str, Any]:
        """Every argument of the model by its name."""
        bound = inspect.signature(self.model.forward).bind(*self.args, **self.kwargs)
        return {
            name: value for name, value in bound.arguments.items() if name != "kwargs"
        } | dict(bound.arguments.get("kwargs", {}))

    def loss_of(self, output: Any) -> Tensor:
        """The loss of an output."""
        if self.loss is not None:
            return self.loss(output)
        loss = find_loss(output)
        return distance(output) if loss is None else loss


@dataclass(frozen=True)
class Stranger:
    """A model of the collection. package: the name of the distribution. build: makes it anew, with
    the same weights and batch after the same seed."""

    name: str
    package: str
    build: Callable[[], Case]

    def row(self) -> dict[str, Any]:
        """The row before anything is measured."""
        return {"name": self.name, "library": self.package, "result": "not built"}


def distance(output: Any) -> Tensor:
    """The mean squared distance of the outputs from random numbers, the same at every call."""
    generator = torch.Generator().manual_seed(0)
    outputs = [t for t in tensors_within(output) if t.requires_grad]
    targets = [torch.randn(t.shape, generator=generator) for t in outputs]
    pairs = zip(outputs, targets, strict=True)
    return torch.stack(
        [(t - target).abs().square().mean() for t, target in pairs]
    ).sum()


def tokens(high: int, *shape: int) -> Tensor:
    """Random token ids."""
    return torch.randint(1, high, shape)


class WithLoss(nn.Module):
    """A model and its loss in one module: ``forward(target, *args)`` is the loss."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, target: Any, *args: Any) -> Tensor:
        return self.loss(self.model(*args), target)


def loss_inside(
    model: nn.Module, loss: Callable[..., Tensor], target: Any, *args: Any
) -> Case:
    """A case whose loss is part of the model, so that the transform sees it."""
    return Case(WithLoss(model, loss), (target, *args))


def loss_outside(
    model: nn.Module, loss: Callable[..., Tensor], target: Any, *args: Any
) -> Case:
    """A case whose loss is computed by the training loop."""
    return Case(model, args, loss=lambda output: loss(output, target))
