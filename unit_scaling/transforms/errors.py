"""What the gradient of a loss has in common at all positions: as far as it is of the output.

The gradient is the output less the target. Targets are independent; outputs agree as the values do
that they are made of. So the agreement of the gradient is theirs, times their share of its energy.
"""

from __future__ import annotations

from functools import cache

import torch

from .record import Node

__all__ = ["Shares", "of_loss"]

Shares = tuple[float, ...]
"""As in `transforms.agreement`."""

_MEASURED: dict[str, Shares] = {"ctc_loss": (0.6, 0.6, 0.0)}
"""CTC asks for blanks at most positions: measured for logits near 0, 0.57 to 0.81 and 0.52 to 0.79
for labels that fill up to 0.4 of them.
"""

_REGRESSIONS = frozenset("mse_loss smooth_l1_loss huber_loss".split())
"""Losses whose gradient is half of the output, but of a tanh, whose slope is small where its value
is not.
"""

_BINARY = 0.148
"""Var sigmoid(z) / (Var sigmoid(z) + 1/4) for a standard normal z and targets 0 and 1 alike."""

NUMBERS = 2**18
"""How many logits are drawn."""


def of_loss(node: Node, output: Shares, curved: bool) -> Shares | None:
    """The agreement of the gradient of a loss; None for one that is not known.

    output: that of its input. curved: whether the input is a function of values, not linear.
    """
    if node.name in _MEASURED:
        return _MEASURED[node.name]
    if node.kind in _REGRESSIONS:
        share = 0.0 if curved else 0.5
    elif node.kind == "cross_entropy":
        shape = node.args[0].shape if node.args else node.kwargs["input"].shape
        share = _share(shape[1] if len(shape) > 1 else shape[0])
    elif node.kind == "binary_cross_entropy_with_logits":
        share = _BINARY
    else:
        return None
    return tuple(each * share for each in output)


@cache
def _share(classes: int) -> float:
    """That of the probabilities of so many classes in their difference from one-hot rows, without
    what is the same for all classes: for standard normal logits.
    """
    if classes < 2:
        return 0.0
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(max(2, NUMBERS // classes), classes, generator=generator)
    energy = logits.softmax(-1).square().sum(-1).mean().item() - 1 / classes
    return energy / (energy + 1 - 1 / classes)
