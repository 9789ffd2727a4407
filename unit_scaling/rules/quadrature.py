"""Expectations under a standard normal distribution, by adaptive Gauss-Legendre quadrature.

Gauss-Hermite quadrature is exact for polynomials, but gives only two or three digits for a kink
(relu) and one for a jump (the derivative of relu). Here the line is divided into panels of `NODES`
nodes each, which are halved until the halves agree with the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

#: Nodes of a panel; exact for polynomials of degree 31.
NODES = 16

#: Panels end at the multiples of 1/2 up to this value, beyond which the density is below 1e-196;
#: there kinks cost nothing.
REACH = 30.0

#: A panel is accepted once halving it changes no expectation by more than this fraction.
TOLERANCE = 1e-11

#: The maximum number of halvings (a jump is then located to 1e-13), and of concurrent panels.
HALVINGS, MAX_PANELS = 44, 4096


@cache
def _nodes() -> tuple[Tensor, Tensor]:
    nodes, weights = np.polynomial.legendre.leggauss(NODES)
    return torch.from_numpy(nodes), torch.from_numpy(weights)


def _panels(
    f: Callable[[Tensor], Tensor],
    low: Tensor,
    high: Tensor,
) -> Tensor:
    """The integrals of ``f`` times the density over each panel (low, high): (functions, panels)."""
    nodes, weights = _nodes()
    half = (high - low)[:, None] / 2
    x = (low + high)[:, None] / 2 + half * nodes
    density = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
    values = f(x.flatten()).unflatten(-1, x.shape)
    return (values * density * half * weights).sum(-1)


def normal_means(f: Callable[[Tensor], Tensor]) -> list[float]:
    """Returns the means of non-negative functions of a standard normal variable.

    f: points (n,) in float64 -> values (functions, n), piecewise smooth. The relative error is
    about 1e-10. Raises ValueError if the integral does not converge (an infinite mean).

    >>> normal_means(lambda x: torch.stack([x**2, x.relu() ** 2, (x > 0.3).double()]))
    [1.0, 0.5, 0.38208857781]
    """
    edges = torch.arange(-REACH, REACH + 0.25, 0.5, dtype=torch.float64, device="cpu")
    low = edges[:-1]
    high = edges[1:]
    total = torch.zeros((), dtype=torch.float64, device="cpu")
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        whole = _panels(f, low, high)
        halves = _panels(f, low, middle) + _panels(f, middle, high)
        size = (total + halves.sum(-1)).clamp_min(torch.finfo(torch.float64).tiny)
        done = ((whole - halves).abs() <= TOLERANCE * size[:, None]).all(0)
        total = total + halves[:, done].sum(-1)
        low = low[~done]
        middle = middle[~done]
        high = high[~done]
        if not low.numel():
            return [float(f"{value:.11g}") for value in total.tolist()]
        low = torch.cat([low, middle])
        high = torch.cat([middle, high])
        if low.numel() > MAX_PANELS:
            break
    raise ValueError(f"infinite around {low[0].item():.3g}")


def largest_square(count: int) -> float:
    """Returns E[max(x_1, ..., x_count)**2] for independent standard normal variables."""

    def square(x: Tensor) -> Tensor:
        return (count * torch.special.ndtr(x) ** (count - 1) * x.square())[None]

    return normal_means(square)[0]
