"""Building blocks of op rules and residual schemes."""

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
    "completep_residual_scaling_rule",
    "logarithmic_interpolation",
    "rms",
    "scale_elementwise",
    "transformer_residual_scaling_rule",
]

#: (index of a branch, number of branches) -> tau, the weight of that branch.
ResidualScalingFn = Callable[[int, int], float]


def logarithmic_interpolation(alpha: float, lower: float, upper: float) -> float:
    """Returns ``lower**(1 - alpha) * upper**alpha``: ``lower`` at 0, ``upper`` at 1; both positive.

    >>> logarithmic_interpolation(0.5, 2.0, 8.0)
    4.0
    """
    return lower * (upper / lower) ** alpha


def rms(
    x: Tensor,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    eps: float = 0.0,
) -> Tensor:
    """Returns ``sqrt(mean(x**2) + eps)`` over ``dims``, by default all, in the dtype of ``x``.

    Half-precision input is squared in float32, so squares neither underflow nor overflow. NaN and
    Inf propagate. keepdim: whether reduced ``dims`` stay, with size 1.

    >>> rms(torch.tensor([1.0, -7.0]))
    tensor(5.)
    """
    squares = x.to(torch.promote_types(x.dtype, torch.float32)).square()
    mean = squares.mean() if dims is None else squares.mean(tuple(dims), keepdim)
    return (mean + eps).sqrt().to(x.dtype)


def scale_elementwise(
    f: Callable[..., Tensor],
    output_scale: float,
    grad_input_scale: float,
    constraint: str | None = "to_output_scale",
) -> Callable[..., Tensor]:
    """Returns ``f``, a function of one tensor and settings, with its output and the gradient of its
    first argument scaled by factors that ``constraint`` ties.

    >>> unit_tanh = scale_elementwise(torch.tanh, 1.59, 1.47)
    >>> unit_tanh(torch.tensor([0.0, 100.0]))
    tensor([0.0000, 1.5900])
    """
    s = tie(constraint, output=output_scale, input=grad_input_scale)

    def scaled(input: Tensor, *args: object, **kwargs: object) -> Tensor:
        output = f(scale_bwd(input, s["input"]), *args, **kwargs)
        return scale_fwd(output, s["output"])

    return scaled


#: The branches, four layers of a transformer, at which CompleteP's and u-muP's weights are equal.
FEW_BRANCHES = 8


def completep_residual_scaling_rule() -> ResidualScalingFn:
    """Returns CompleteP's rule (index, branches) -> tau, the weight of a residual branch relative
    to what the stream has become by then.

    Weights are in proportion to one over the number of branches, so that the best learning rate
    does not depend on the depth. A branch weighs 4 / branches of the stream's input, and at most
    1 / sqrt(2) of it: what it has under u-muP's rule in a model of eight branches, and of four.
    Parameters of a `unit_scaling.TransformerStack` with this rule have no depth.

    Source: CompleteP (arXiv 2505.01618), table 1, alpha = 1.

    >>> tau = completep_residual_scaling_rule()
    >>> [round(tau(i, 16), 3) for i in (0, 1, 15)]
    [0.25, 0.243, 0.18]
    """

    def tau(index: int, branches: int) -> float:
        weight = min(2**-0.5, FEW_BRANCHES / 2 / branches)
        return weight / math.sqrt(1 + index * weight**2)

    tau.keeps_rates = True  # type: ignore[attr-defined]
    return tau


def transformer_residual_scaling_rule(
    residual_mult: float = 1.0, residual_attn_ratio: float = 1.0
) -> ResidualScalingFn:
    """Returns the rule (index, branches) -> tau for a pre-norm transformer: branch ``index`` (even:
    attention, odd: MLP) of ``branches`` (an even number) is added with weight tau.

    Args:
        residual_mult: the weight of all branches relative to the embedding.
        residual_attn_ratio: the weight of attention relative to MLP branches.

    Raises:
        ValueError: an argument is negative, or (in the rule) the number of branches is odd or the
            index out of range.

    Source: u-muP (arXiv 2407.17465), appendix G.

    >>> tau = transformer_residual_scaling_rule()
    >>> [round(tau(i, 4), 3) for i in range(4)]
    [0.707, 0.577, 0.5, 0.447]
    """
    weights = {
        "residual_mult": residual_mult,
        "residual_attn_ratio": residual_attn_ratio,
    }
    for name, value in weights.items():
        check_number(name, value)
        if not value >= 0:
            raise ValueError(f"{name} is at least 0, got {value!r}")
    # The mean square of both weights is residual_mult**2 (u-muP, appendix G).
    mlp = residual_mult * math.sqrt(2 / (1 + residual_attn_ratio**2))
    attention = residual_attn_ratio * mlp

    def tau(index: int, branches: int) -> float:
        if branches % 2:
            raise ValueError(
                f"a transformer has an even number of branches, got {branches}"
            )
        if not 0 <= index < branches:
            raise ValueError(
                f"index is one of {branches} branches, from 0 on, got {index}"
            )
        attentions, mlps = (index + 1) // 2, index // 2
        weight = (attention, mlp)[index % 2]
        total = branches / 2 + attentions * attention**2 + mlps * mlp**2
        return weight / math.sqrt(total)

    return tau
