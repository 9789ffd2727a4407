"""How far is the mean of a cast from what is cast? Of the gradient of each recipe's output.

``python -m benchmarks.cast_bias``, in a minute. A draw is a new matrix x and, with stochastic
rounding or random signs, a new cast Q of it. Its bias is <Q(x), x> / <x, x> - 1: negative where
the cast shrinks.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor

import fp8
from benchmarks.common import Row, report
from fp8.casts.casting import rounded
from fp8.casts.rotation import rotated, rotation_signs

SHAPE, DRAWS = (128, 1024), 64
QUESTION = (
    "by how much of itself, in percent, is the cast gradient of a recipe off in the mean, with the "
    f"standard error of {DRAWS} draws; and the squared error of one draw, relative to x squared"
)


def normal() -> Tensor:
    """Standard normal numbers."""
    return torch.randn(SHAPE)


def heavy() -> Tensor:
    """Student's t with three degrees of freedom, of RMS 1."""
    return torch.randn(SHAPE) / torch.randn(3, *SHAPE).square().sum(0).sqrt()


def draws(
    cast: fp8.Cast, data: Callable[[], Tensor]
) -> tuple[list[float], list[float]]:
    """The bias of each draw, and its relative squared error."""
    torch.manual_seed(0)
    spec, biases, errors = cast, [], []
    for _ in range(DRAWS):
        x = data()
        signs = rotation_signs(spec, x)
        y, _ = rounded(x, spec, signs=signs)
        x = rotated(x, spec.hadamard, -1, signs) if spec.hadamard else x
        size = x.double().square().sum()
        biases.append(float((y - x).double().mul(x).sum() / size))
        errors.append(float((y - x).double().square().sum() / size))
    return biases, errors


def rows() -> list[Row]:
    """One for each recipe."""
    found: list[Row] = []
    for name, recipe in fp8.RECIPES.items():
        assert recipe.grad is not None
        row: Row = {"name": name}
        for data in (normal, heavy):
            biases, errors = draws(recipe.grad, data)
            kind = data.__name__
            # No -0.0.
            row[f"{kind}_bias"] = round(100 * statistics.fmean(biases), 4) + 0.0
            row[f"{kind}_se"] = round(
                100 * statistics.stdev(biases) / math.sqrt(DRAWS), 4
            )
            row[f"{kind}_error"] = float(f"{statistics.fmean(errors):.3g}")
        found.append(row)
    return found


def main() -> int:
    """Measures, prints and records the rows."""
    report("cast_bias", QUESTION, rows())
    return 0


if __name__ == "__main__":
    sys.exit(main())
