"""Building blocks of rules and residual schemes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fp8.common.validation import check_number

from ..rules.table import tie
from ..scale import scale_bwd, scale_fwd

__all__ = [
    "ResidualScalingFn",
    "logarithmic_interpolation",
    "rms",
    "scale_elementwise",
    "transformer_residual_scaling_rule",
]

#: (index of a branch, number of branches) -> tau, the weight of that branch.
ResidualScalingFn = Callable[[int, int], float]


def logarithmic_interpolation(alpha: float, lower: float, upper: float) -> float:
    """``lower**(1 - alpha) * upper**alpha``: `lower` at 0, `upper` at 1; both positive.

    >>> logarithmic_interpolation(0.5, 2.0, 8.0)
    4.0
    """
    return math.exp(alpha * math.log(upper) + (1 - alpha) * math.log(lower))


def rms(
    x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False, eps: float = 0.0
) -> Tensor:
    """``sqrt(mean(x**2) + eps)`` over ``dims`` (all by default), at least in float32.

    x: floating point. Half-precision input is squared in float32, so nothing under- or overflows
    on the way; the result has the dtype of x. NaN and Inf propagate.

    >>> rms(torch.tensor([1.0, -7.0]))
    tensor(5.)
    """
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    mean = wide.square().mean() if dims is None else wide.square().mean(tuple(dims), keepdim)
    return (mean + eps).sqrt().to(x.dtype)


def scale_elementwise(
    f: Callable[..., Tensor],
    output_scale: float,
    grad_input_scale: float,
    constraint: str | None = "to_output_scale",
) -> Callable[..., Tensor]:
    """``f`` with its output and the gradient of its first argument scaled.

    f: a function of one tensor and settings. The two scales are tied by ``constraint``.

    >>> unit_tanh = scale_elementwise(torch.tanh, 1.59, 1.47)
    >>> unit_tanh(torch.tensor([0.0, 100.0]))
    tensor([0.0000, 1.5900])
    """
    s = tie(constraint, output=output_scale, input=grad_input_scale)

    def scaled(input: Tensor, *args: object, **kwargs: object) -> Tensor:
        output = f(scale_bwd(input, s["input"]), *args, **kwargs)
        return scale_fwd(output, s["output"])

    return scaled


def transformer_residual_scaling_rule(
    residual_mult: float = 1.0, residual_attn_ratio: float = 1.0
) -> ResidualScalingFn:
    """The weights of the residual branches of a pre-norm transformer, attention and MLP in turn.

    residual_mult: of all branches against the embedding. residual_attn_ratio: of attention
    against MLP branches. Returns (index, branches) -> tau: branch number ``index`` (even:
    attention, odd: MLP) of ``branches`` (an even number) is added as `U.residual_add` does.
    Source: u-muP (arXiv 2407.17465), appendix G. With residual_mult=sqrt(tuned / layers) they are
    CompleteP's (arXiv 2505.01618): in proportion to 1 / layers, and u-muP's in a model of ``tuned``
    layers; its rates take ``set_depth(stack, tuned)``.
    Raises ValueError for a negative number; the function for an odd number of branches, and for an
    index that is not one of them.

    >>> tau = transformer_residual_scaling_rule()
    >>> [round(tau(i, 4), 3) for i in range(4)]
    [0.707, 0.577, 0.5, 0.447]
    """
    given = {"residual_mult": residual_mult, "residual_attn_ratio": residual_attn_ratio}
    for name, value in given.items():
        check_number(name, value)
        if not value >= 0:
            raise ValueError(f"{name} is at least 0, got {value!r}")
    mlp = residual_mult * math.sqrt(2 / (1 + residual_attn_ratio**2))
    attention = residual_attn_ratio * mlp

    def tau(index: int, branches: int) -> float:
        if branches % 2:
            raise ValueError(f"a transformer has an even number of branches, got {branches}")
        if not 0 <= index < branches:
            raise ValueError(f"index is one of {branches} branches, from 0 on, got {index}")
        attentions, mlps = (index + 1) // 2, index // 2
        weight = mlp if index % 2 else attention
        total = branches / 2 + attentions * attention**2 + mlps * mlp**2
        return weight / math.sqrt(total)

    return tau
