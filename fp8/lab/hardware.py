"""Accelerators: the rates of their matrix units and of their memory, published or measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ..common.validation import check_choice, check_name, check_number

__all__ = ["HARDWARE", "Cores", "Hardware", "Host", "get_hardware"]

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

NARROW = "fp8, narrow"
NARROWEST = 1024
"""FP8 products with a dimension below `NARROWEST`, where they reach another share of the peak."""

ACHIEVED: dict[str, float] = {
    # torchao #940 (2024-10-07), H100: medians of 2 m^3 / time / peak over bench_matmul's squares of
    # 4096 and more; for FP8 over both accumulation modes.
    "bf16": 0.66,
    "fp8": 0.71,
    NARROW: 0.71,
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
"""Kind of matrix unit, `NARROW` or "memory" -> the share of the peak that large kernels reach,
where `Hardware.achieved` says nothing else."""


class Cores(NamedTuple):
    """The rates that bound kernels other than products.

    processors: streaming multiprocessors, each of which issues four instructions of warps a cycle
    (CUDA C++ programming guide). clock: in Hz, under load. cache: B/s of the L2 cache. latency:
    seconds from a request to the memory's answer. shortest: seconds that no kernel falls below.
    """

    processors: int
    clock: float
    cache: float
    latency: float
    shortest: float = LAUNCH

    def issue(self, instructions: float) -> float:
        """The seconds in which all multiprocessors issue that many instructions of warps."""
        return instructions / (self.processors * 4 * self.clock)


class Host(NamedTuple):
    """Seconds in which the CPU launches a compiled graph.

    graph: of its guards and its entry, 44 less the kernel's 7 µs, and triton: of a Triton kernel,
    6.8 to 9.1 µs (meta-pytorch/tritonbench #1017, 2026-04-14, a GB200's host). library: of a
    product or attention, and python: more, of one that has no kernel of inductor's
    (``torch.ops.aten._scaled_mm_v2``): 38 and 33 µs on the host of `benchmarks.gpu`, where a Triton
    kernel took 22; divided by 22 / 8.
    """

    graph: float = 37e-6
    triton: float = 8e-6
    library: float = 14e-6
    python: float = 12e-6


ORDINARY = Host()

HOPPER = Cores(132, 1.45e9, 5.5e12, 0.75e-6, 2.5e-6)
"""H100 and H200. Multiprocessors: their data sheets. The rest was chosen so that 13 compiled layers
on one H200 (benchmarks/results/gpu.json, 2026-11) take the times that were measured; the clock is
the boost clock of 1.755 GHz times the share that products keep under load (650 of 788 TFLOP/s)."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """An accelerator: published or measured rates.

    Attributes:
        name: as in `HARDWARE`.
        device: the product.
        peak: kind of matrix unit (a key of `UNITS`) -> FLOP/s of dense products, at least "bf16".
        bandwidth: the bandwidth of the memory, in B/s.
        source: where the figures are published, and when.
        achieved: as `ACHIEVED`, for this device.
        cores: the rates that bound kernels other than products; None: unknown, bytes alone count.
        host: the machine that launches kernels; no part of the device.

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
    cores: Cores | None = None
    host: Host = ORDINARY

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

    def rate(self, unit: str, narrowest: float = math.inf) -> float:
        """FLOP/s that large products reach. narrowest: their least dimension."""
        share = self.achieved.get(unit, ACHIEVED[unit])
        if unit == "fp8" and narrowest < NARROWEST:
            share = self.achieved.get(NARROW, share)
        return self.peak[unit] * share

    @property
    def stream(self) -> float:
        """B/s that large kernels reach when they read and write memory."""
        return self.bandwidth * self.achieved.get(MEMORY, ACHIEVED[MEMORY])

    def seconds(
        self,
        unit: str,
        flops: float,
        moved: float,
        at_peak: bool = False,
        narrowest: float = math.inf,
    ) -> float:
        """The time of a kernel. unit: the unit of its products. moved: bytes read and written.
        at_peak: at the rates of the data sheet, where a launch takes no time. narrowest: as in
        `rate`."""
        if at_peak:
            return max(flops / self.peak[unit], moved / self.bandwidth)
        return max(flops / self.rate(unit, narrowest), moved / self.stream, LAUNCH)


SUSTAINED = {"bf16": 0.66, "fp8": 0.576}
"""Shares of the peak of Hopper's products in a step, where the card is warm: 650 and 1140 TFLOP/s,
in a burst 788 and 1302. Fitted with `HOPPER`."""

HARDWARE: dict[str, Hardware] = {
    row.name: row
    for row in (
        Hardware(
            name="h100",
            device="NVIDIA H100 SXM",
            peak={"bf16": 989.4e12, "fp8": 1978.9e12},
            bandwidth=3.35e12,
            source="NVIDIA H100 Tensor Core GPU, architecture white paper and data sheet (2023-04)",
            # The shares of the H200 below, whose multiprocessors and power limit are the same.
            achieved=dict(SUSTAINED),
            cores=HOPPER,
        ),
        Hardware(
            name="h200",
            device="NVIDIA H200 SXM",
            peak={"bf16": 989.4e12, "fp8": 1978.9e12},
            bandwidth=4.8e12,
            source="NVIDIA H200 Tensor Core GPU, data sheet (2023-11)",
            # Memory: a copy of 8.6 GB on one card (2026-11) 4.3e12 B/s, fitted 4.2e12.
            # Narrow products: one shape, 65536 x 768 x 32768, fitted with the others; on an H100
            # nanochat's was faster (dev/LOG.md, 2026-01-13).
            achieved={**SUSTAINED, NARROW: 0.475, MEMORY: 0.875},
            cores=HOPPER,
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
