"""How many gradients an FP8 format loses: the reason naive FP8 training fails, as one number."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fp8

from .train import Training

GRADIENT_FORMAT = (
    "e5m2"  # the format simulate_fp8 gives gradients (OCP, as an H100 does)
)


def flushed_share(training: Training, scaled: bool = False) -> float:
    """Share of the nonzero gradients at the outputs of linear layers that e5m2 turns to zero.

    One backward pass on the first training batch. These are the gradients that the two backward
    matrix products of each linear layer cast when FP8 is on; for a variant that casts nothing,
    the share it would lose. scaled: with the scale for each tensor that `fp8.scaled` finds, not as
    they are. Parameters' gradients are left None; NaN if all gradients are zero.
    """

    counts: list[Tensor] = []

    def count(grad: Tensor) -> None:
        cast = fp8.scaled(grad, GRADIENT_FORMAT).stored if scaled else grad
        flushed = (grad != 0) & (fp8.quantize(cast.float(), GRADIENT_FORMAT) == 0)
        counts.append(torch.stack([flushed.sum(), (grad != 0).sum()]))

    def watch(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        output.register_hook(count)

    layers = [
        module for module in training.model.modules() if isinstance(module, nn.Linear)
    ]
    handles = [layer.register_forward_hook(watch) for layer in layers]
    try:
        training.example_loss().backward()
    finally:
        for handle in handles:
            handle.remove()
        training.optimizer.zero_grad(set_to_none=True)
    flushed, nonzero = torch.stack(counts).sum(dim=0).tolist()
    return flushed / nonzero if nonzero else float("nan")
