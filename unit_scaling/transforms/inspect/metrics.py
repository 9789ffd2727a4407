"""Statistics of a tensor and of its gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import debug_unwrap

from fp8.common.validation import check_name

_FULL_NAMES = {
    "mean_abs": "mean absolute value",
    "abs_mean": "absolute mean value",
    "std": "standard deviation",
    "abs_max": "absolute maximum",
    "abs_min": "absolute minimum",
    "numel": "number of elements",
    "rms": "root mean square",
}


class Metrics:
    """The scale of a tensor in the forward pass, ``fwd``, and of its gradient, ``bwd``.

    ``bwd`` is None until the gradient is known.

    Args:
        fwd_tensor: floating point, any shape.
    """

    @dataclass
    class Data:
        """Statistics of one tensor, computed in float32, or in float64 for float64.

        ``std`` is the square root of the unbiased variance, and 0 for a single element. A tensor
        without elements has 0 for every number; NaN propagates to every number.
        """

        mean_abs: float
        abs_mean: float
        std: float
        abs_max: float
        abs_min: float
        numel: int
        rms: float = 0.0

    def __init__(self, fwd_tensor: Tensor) -> None:
        self.fwd = self.from_tensor(fwd_tensor)
        self.bwd: Metrics.Data | None = None

    def set_bwd(self, bwd_tensor: Tensor) -> None:
        """Records the gradient."""
        self.bwd = self.from_tensor(bwd_tensor)

    def __repr__(self) -> str:
        return f"Metrics(fwd={self.fwd}, bwd={self.bwd})"

    @staticmethod
    def from_tensor(t: Tensor) -> Metrics.Data:
        """Returns the statistics of a floating-point tensor of any shape; inside of a transform of
        `torch.func`, of all that it maps."""
        t = debug_unwrap(t.detach())
        x = (t.to_dense() if t.is_sparse else t).to(torch.promote_types(t.dtype, torch.float32))
        if x.numel() == 0:
            return Metrics.Data(0.0, 0.0, 0.0, 0.0, 0.0, 0)
        sizes = x.abs()
        std = x.std() if x.numel() > 1 else torch.zeros_like(x).sum()
        rms = torch.linalg.vector_norm(x) / x.numel() ** 0.5
        numbers = [sizes.mean(), x.mean().abs(), std, sizes.max(), sizes.min(), rms]
        found = torch.stack([number.double() for number in numbers])
        mean_abs, abs_mean, spread, high, low, rms = debug_unwrap(found).tolist()
        return Metrics.Data(mean_abs, abs_mean, spread, high, low, x.numel(), rms)

    @staticmethod
    def get_full_name(short_name: str) -> str:
        """Returns the full name of a metric, for plots.

        Raises:
            ValueError: the name is unknown.
        """
        check_name("metric", short_name, _FULL_NAMES)
        return _FULL_NAMES[short_name]

    @staticmethod
    def names() -> list[str]:
        """The names of the numbers in `Data`."""
        return list(_FULL_NAMES)

    @staticmethod
    def full_names() -> list[str]:
        """The full names of the numbers in `Data`."""
        return list(_FULL_NAMES.values())
