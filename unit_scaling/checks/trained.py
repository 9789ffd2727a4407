"""Whether a model has been trained, read from its parameters.

`unit_scale` gives weights other sizes and sets biases to zero. That is a start for training and
ruins a trained model, without an error.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8.warnings import ConvertWarning, warn_once

from .first_call import is_readable

ERRORS = 4.0
"""Standard errors from which rows or columns of a weight differ more in size than in an
initialization; see `_spread`. Initializations of torch have at most 0, up to chance: entries are
independent, or rows have equal norms (orthogonal)."""

FEWEST = 32
"""Rows and columns of a weight that is judged: `_spread` has the errors of normal values.
"""


def warn_if_trained(model: nn.Module) -> None:
    """Warns, once, that `unit_scale` is about to discard what a model has learned."""
    if why := signs_of_training(model):
        warn_once(
            ConvertWarning,
            f"unit_scale: the model looks trained ({why}). Its weights get other sizes and its "
            "biases zeros, so that it starts from a function that it has not learned. Use "
            "fp8.convert(model, 'static'), which keeps the function",
            about=model,
            key="trained",
        )


@torch.no_grad()
def signs_of_training(model: nn.Module) -> str:
    """What no initialization gives: gains that differ within a layer, or rows and columns of
    different sizes in most of the weights; "" if there is nothing of that kind."""
    for path, module in model.named_modules():
        parameters = dict(module.named_parameters(recurse=False))
        gain = parameters.get("weight")  # not as an attribute: that may be computed
        if gain is None or gain.dim() != 1 or len(gain) < 2 or not _is_read(gain):
            continue
        if (
            gain.mean().abs() > gain.std() > 0
        ):  # gains that are random at first have both signs
            return f"the gains of {path or type(module).__name__} differ"
    weights = [p for p in model.parameters() if p.dim() > 1 and _is_read(p)]
    weights = [p for p in weights if min(len(p), p[0].numel()) >= FEWEST]
    uneven = sum(p.numel() for p in weights if _spread(p) > ERRORS)
    if 2 * uneven > sum(p.numel() for p in weights):
        return "the rows or columns of most weights differ in size"
    return ""


def _is_read(parameter: Tensor) -> bool:
    return is_readable(parameter) and parameter.is_floating_point()


def _spread(weight: Tensor) -> float:
    """How far the variance of the mean squares of rows, or of columns, is above the variance of
    independent entries of the same distribution, (kurtosis - 1) / entries; in its standard
    errors."""
    squares = weight.detach().flatten(1).float().square()
    variance = float(squares.var())
    if not variance > 0:
        return 0.0
    errors = []
    for means, entries in ((squares, squares.shape[1]), (squares.mT, len(squares))):
        excess = float(means.mean(1).var()) * entries / variance - 1
        errors.append(excess / (2 / len(means)) ** 0.5)
    return max(errors)
