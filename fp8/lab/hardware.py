"""Accelerators: the rates of their matrix units and of their memory, published or measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..common.validation import check_choice, check_name, check_number

__all__ = ["HARDWARE", "Hardware", "get_hardware"]

BF16 = "bf16"

UNITS: dict[str, float] = {
    BF16: 2.0,
    "fp8": 1.0,
    "mxfp8": 1 + 1 / 32,
    "mxfp6": 6 / 8 + 1 / 32,
    "mxfp4": 4 / 8 + 1 / 32,
    "nvfp4": 4 / 8 + 1 / 16,
}
"""Kind of matrix unit -> bytes of an element of its operands, with the scales of MX (one byte for
32 elements) and NVFP4 (one for 16). "bf16" stands for float16 too."""

# Seconds of a kernel that does nothing, on an H100: torchao's roofline_utils.py (2025). No kernel
# takes less.
LAUNCH = 2e-6

MEMORY = "memory"

ACHIEVED: dict[str, float] = {
    # torchao #940 (2024-10-07), H100: medians of 2 m^3 / time / peak over bench_matmul's squares of
    # 4096 and more; for FP8 over both accumulation modes.
    "bf16": 0.66,
    "fp8": 0.71,
    # torchao, prototype/moe_training/README.md (2026-03-13), B200: median of three
    # grouped products.
    "mxfp8": 0.65,
    "mxfp6": 0.65,  # as mxfp8, which has the same peak
    # torchao #3675 (2026-01-21), B200: median over bench_matmul's squares of 4096 and more.
    "mxfp4": 0.50,
    "nvfp4": 0.50,  # as mxfp4, which has the same peak
    # torchao, benchmarks/prototype/blockwise_fp8_training/README.md (2026-03-20), H100: median of
    # ten kernels that cast.
    MEMORY: 0.83,
}
"""Kind of matrix unit, or "memory" -> the share of the peak that large kernels reach, where
`Hardware.achieved` says nothing else."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """An accelerator: published or measured rates.

    Attributes:
        name: as in `HARDWARE`.
        device: the product.
        peak: kind of matrix unit (a key of `UNITS`) -> FLOP/s of dense products, at least "bf16".
        bandwidth: of the memory, in B/s.
        source: where the figures are published, and when.
        achieved: as `ACHIEVED`, for this device.

    Raises:
        ValueError: for an unknown kind of unit, a rate that is not positive, and a share above 1.
        TypeError: for a rate that is not a number.

    >>> mine = Hardware(name="mine", device="a card", peak={"bf16": 1e14, "fp8": 2e14},
    ...                 bandwidth=1e12, source="its data sheet")
    >>> mine.rate("fp8") / mine.peak["fp8"]
    0.71
    """

    name: str
    device: str
    peak: Mapping[str, float]
    bandwidth: float
    source: str
    achieved: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if BF16 not in self.peak:
            raise ValueError(
                f"peak of {self.name!r} needs 'bf16', got {sorted(self.peak)}"
            )
        for what, rates, names, most in (
            ("peak", self.peak, UNITS, math.inf),
            ("achieved", self.achieved, ACHIEVED, 1.0),
            ("bandwidth", {MEMORY: self.bandwidth}, ACHIEVED, math.inf),
        ):
            for name, rate in rates.items():
                check_name(f"unit in {what}", name, names)
                check_number(f"{what} of {self.name!r}", rate)
                if not (0 < rate <= most and math.isfinite(rate)):
                    allowed = "positive"
                    if most < math.inf:
                        allowed = f"above 0 and at most {most:g}"
                    raise ValueError(
                        f"{what} of {self.name!r} must be {allowed}, got {rate}"
                    )

    def rate(self, unit: str) -> float:
        """FLOP/s that large products reach on this kind of unit."""
        return self.peak[unit] * self.achieved.get(unit, ACHIEVED[unit])

    @property
    def stream(self) -> float:
        """B/s that large kernels reach when they read and write memory."""
        return self.bandwidth * self.achieved.get(MEMORY, ACHIEVED[MEMORY])

    def seconds(
        self, unit: str, flops: float, moved: float, at_peak: bool = False
    ) -> float:
        """The time of a kernel. unit: of its products. moved: bytes read and written. at_peak: at
        the rates of the data sheet, where a launch takes no time."""
        if at_peak:
            return max(flops / self.peak[unit], moved / self.bandwidth)
        return max(flops / self.rate(unit), moved / self.stream, LAUNCH)


HARDWARE: dict[str, Hardware] = {
    row.name: row
    for row in (
        Hardware(
            name="h100",
            device="NVIDIA H100 SXM",
            peak={"bf16": 989.4e12, "fp8": 1978.9e12},
            bandwidth=3.35e12,
            source="NVIDIA H100 Tensor Core GPU, architecture white paper and data sheet (2023-04)",
        ),
        Hardware(
            name="h200",
            device="NVIDIA H200 SXM",
            peak={"bf16": 989.4e12, "fp8": 1978.9e12},
            bandwidth=4.8e12,
            source="NVIDIA H200 Tensor Core GPU, data sheet (2023-11)",
            # benchmarks.gpu (2026-11), one card: products of 8192 x 8192 in FP8, copies.
            achieved={"fp8": 0.66, MEMORY: 0.72},
        ),
        Hardware(
            name="b200",
            device="NVIDIA B200 SXM, 1000 W",
            peak={"bf16": 2.25e15}
            | dict.fromkeys(("fp8", "mxfp8", "mxfp6"), 4.5e15)
            | dict.fromkeys(("mxfp4", "nvfp4"), 9e15),
            bandwidth=8e12,
            source="NVIDIA Blackwell architecture, technical brief; DGX B200, data sheet (2024-03)",
            # torchao #3675 (2026-01-21): as "bf16" in ACHIEVED; FP8 as mxfp8.
            achieved={"bf16": 0.74, "fp8": 0.65},
        ),
    )
}
"""Name -> accelerator. Peaks are of dense products, without 2:4 sparsity."""


def get_hardware(hardware: str | Hardware) -> Hardware:
    """The row of a name in `HARDWARE`; a `Hardware` itself. Raises ValueError for an unknown name,
    TypeError for what is neither."""
    if isinstance(hardware, Hardware):
        return hardware
    check_choice("hardware", hardware, HARDWARE)
    return HARDWARE[hardware]
