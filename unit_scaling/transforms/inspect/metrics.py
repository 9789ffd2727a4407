"""Statistics of a tensor: its scale, and the losses of a cast to a format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor
from torch.func import debug_unwrap

from fp8.common.validation import check_name
from fp8.formats.format import Format, get_format

_FULL_NAMES = {
    "mean_abs": "mean absolute value",
    "abs_mean": "absolute mean value",
    "std": "standard deviation",
    "abs_max": "absolute maximum",
    "abs_min": "absolute minimum",
    "numel": "number of elements",
    "rms": "root mean square",
}


@dataclass(frozen=True)
class InFormat:
    """The losses of a cast of a tensor to a format, rounding to nearest with scale 1.

    NaN counts for none of the fractions.

    Attributes:
        zero: the fraction of values that are not zero and would become zero.
        subnormal: the fraction that would become subnormal, with reduced precision.
        saturated: the fraction beyond the largest value of the format.
        headroom: log2 of the largest value of the format over the largest finite magnitude;
            negative if that is larger, infinite for a tensor of zeros.
    """

    zero: float
    subnormal: float
    saturated: float
    headroom: float


class Metrics:
    """The scale of a tensor in the forward pass, ``fwd``, and of its gradient, ``bwd``.

    ``bwd`` is None until the gradient is known.

    Args:
        fwd_tensor: floating point, any shape.
        formats: `fp8.Format` objects or names in `fp8.FORMATS` to compute the losses of.
    """

    @dataclass
    class Data:
        """Statistics of one tensor, computed in float32, or in float64 for float64.

        ``std`` is the square root of the unbiased variance, and 0 for a single element. A tensor
        without elements has 0 for every number; NaN propagates to every number. ``formats`` maps
        names of formats to `InFormat`.
        """

        mean_abs: float
        abs_mean: float
        std: float
        abs_max: float
        abs_min: float
        numel: int
        rms: float = 0.0
        formats: dict[str, InFormat] = field(default_factory=dict)

    def __init__(self, fwd_tensor: Tensor, formats: Sequence[str | Format] = ()) -> None:
        self._formats = tuple(formats)
        self.fwd = self.from_tensor(fwd_tensor, self._formats)
        self.bwd: Metrics.Data | None = None

    def set_bwd(self, bwd_tensor: Tensor) -> None:
        """Records the gradient."""
        self.bwd = self.from_tensor(bwd_tensor, self._formats)

    def __repr__(self) -> str:
        return f"Metrics(fwd={self.fwd}, bwd={self.bwd})"

    @staticmethod
    def from_tensor(t: Tensor, formats: Sequence[str | Format] = ()) -> Metrics.Data:
        """Returns the statistics of a floating-point tensor of any shape; inside of a transform of
        `torch.func`, of all that it maps.

        Raises:
            ValueError: a format is unknown or unsigned.
        """
        rows = [get_format(format) for format in formats]
        for row in rows:
            if not row.signed:
                raise ValueError(f"format {row.name!r} is for scales: it has no zero and no sign")
        t = debug_unwrap(t.detach())
        x = (t.to_dense() if t.is_sparse else t).to(torch.promote_types(t.dtype, torch.float32))
        if x.numel() == 0:
            empty = {row.name: InFormat(0.0, 0.0, 0.0, math.inf) for row in rows}
            return Metrics.Data(0.0, 0.0, 0.0, 0.0, 0.0, 0, 0.0, empty)
        sizes = x.abs()
        std = x.std() if x.numel() > 1 else torch.zeros_like(x).sum()
        finite = torch.where(sizes.isfinite(), sizes, 0).max()
        numbers = [sizes.mean(), x.mean().abs(), std, sizes.max(), sizes.min()]
        numbers += [torch.linalg.vector_norm(x) / x.numel() ** 0.5, finite]
        numbers += [number for row in rows for number in _losses(sizes, row)]
        found = torch.stack([number.double() for number in numbers])
        values = iter(debug_unwrap(found).tolist())
        mean_abs, abs_mean, std, abs_max, abs_min, rms, largest = islice(values, 7)
        losses = {}
        for row in rows:
            zero, subnormal, saturated = islice(values, 3)
            headroom = math.log2(row.max / largest) if largest else math.inf
            losses[row.name] = InFormat(zero, subnormal, saturated, headroom)
        return Metrics.Data(mean_abs, abs_mean, std, abs_max, abs_min, x.numel(), rms, losses)

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


def _losses(sizes: Tensor, format: Format) -> list[Tensor]:
    """The fractions of magnitudes that become zero, become subnormal or are too large. Ties round
    to even: half of the smallest subnormal becomes zero, half a step below the smallest normal
    value becomes that value."""
    half = format.min_subnormal / 2
    zero = (sizes > 0) & (sizes <= half)
    subnormal = (sizes > half) & (sizes < format.min_normal - half)
    return [mask.double().mean() for mask in (zero, subnormal, sizes > format.max)]
