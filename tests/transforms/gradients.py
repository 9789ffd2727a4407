"""The gradients of a model, and whether they are those of its forward function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Loss = Callable[[nn.Module], Tensor]
"""The loss of a model, for a batch that it holds."""


def gradients(model: nn.Module, loss: Loss) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of parameters; None for those without are left out."""
    model.zero_grad()
    value = loss(model)
    value.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return value.detach(), found


def check_true(model: nn.Module, loss: Loss, rtol: float = 1e-5) -> dict[str, Tensor]:
    """Asserts that the gradient of each parameter is the slope of the loss in its direction and a
    random one, by finite differences. For deterministic models in float64. Returns the gradients.
    """
    _, found = gradients(model, loss)
    generator = torch.Generator().manual_seed(0)
    parameters = dict(model.named_parameters())
    assert any(grad.any() for grad in found.values())
    for name, grad in found.items():
        noise = torch.randn(grad.shape, generator=generator, dtype=grad.dtype)
        direction = grad / (grad.norm() or 1) + 0.3 * noise / noise.norm()
        slope = _slope(parameters[name], direction, lambda: loss(model))
        wanted = (grad * direction).sum()
        error = (slope - wanted).abs()
        assert error <= rtol * (wanted.abs() + 1e-3), (name, (slope / wanted).item())
    return found


def _slope(parameter: Tensor, direction: Tensor, value: Callable[[], Tensor]) -> Tensor:
    """The derivative of a value with respect to a parameter, in a direction."""
    start, step = parameter.detach().clone(), 1e-6 * max(1.0, parameter.detach().norm().item())
    ends = []
    for sign in (1, -1):
        with torch.no_grad():
            parameter.copy_(start + sign * step * direction)
        ends.append(value().detach())
    with torch.no_grad():
        parameter.copy_(start)
    return (ends[0] - ends[1]) / (2 * step)
