"""Accelerators, and a roofline: estimates of the step time of a policy without the device.

The time of a matrix product is the larger of its arithmetic and its memory traffic, at the rates
that large kernels reach; casts are memory traffic; every kernel has a launch. All results are
estimates, not measurements. The comparison with published measurements is in docs/hardware.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ..common.validation import check_name, check_number
from ..formats.format import get_format
from ..recipes.cast import Cast
from ..recipes.recipe import OPERANDS, PRODUCTS, Recipe, get_recipe

__all__ = [
    "HARDWARE",
    "Estimate",
    "Hardware",
    "LayerTime",
    "Product",
    "estimate",
    "get_hardware",
]

UNITS: dict[str, float] = {
    "bf16": 2.0,
    "fp8": 1.0,
    "mxfp8": 1 + 1 / 32,
    "mxfp6": 6 / 8 + 1 / 32,
    "mxfp4": 4 / 8 + 1 / 32,
    "nvfp4": 4 / 8 + 1 / 16,
}
"""Kind of matrix unit -> bytes of an element of its operands, with the scales of MX (one byte for
32 elements) and NVFP4 (one for 16). "bf16" stands for float16 too."""

LAUNCH = 2e-6
"""Seconds of a kernel that does nothing, on an H100: torchao's roofline_utils.py (2025)."""

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
        either_layout: the kinds of units that read an operand along either axis. Others need an
            operand whose summed axis is contiguous, and so a transposed copy.

    Raises:
        ValueError: for an unknown kind of unit, and for a rate that is not positive.
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
    either_layout: Sequence[str] = ()

    def __post_init__(self) -> None:
        for what, names in (("peak", self.peak), ("either_layout", self.either_layout)):
            for name in names:
                check_name(f"unit in {what}", name, UNITS)
        for name in self.achieved:
            check_name("unit in achieved", name, ACHIEVED)
        if "bf16" not in self.peak:
            raise ValueError(f"peak of {self.name!r} needs 'bf16', got {sorted(self.peak)}")
        rates = {**self.peak, "bandwidth": self.bandwidth}
        shares = {f"achieved {name}": share for name, share in self.achieved.items()}
        for what, value in {**rates, **shares}.items():
            check_number(f"{what} of {self.name!r}", value)
            if not 0 < value < math.inf:
                raise ValueError(f"{what} of {self.name!r} must be positive, got {value}")
            if what in shares and value > 1:
                raise ValueError(f"{what} of {self.name!r} must be at most 1, got {value}")

    def rate(self, unit: str) -> float:
        """FLOP/s that large products reach on this kind of unit."""
        return self.peak[unit] * self.achieved.get(unit, ACHIEVED[unit])

    @property
    def stream(self) -> float:
        """B/s that large kernels reach when they read and write memory."""
        return self.bandwidth * self.achieved.get(MEMORY, ACHIEVED[MEMORY])

    def seconds(self, unit: str, flops: float, moved: float) -> float:
        """The time of a kernel. unit: of its products. moved: bytes read and written."""
        return LAUNCH + max(flops / self.rate(unit), moved / self.stream)


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
            either_layout=("fp8",),
        ),
    )
}
"""Name -> accelerator. Peaks are of dense products, without 2:4 sparsity. Hopper needs
FP8 operands with a contiguous summed axis, Blackwell does not (cuBLAS, "Narrow precision data
types")."""


class _CastCost(NamedTuple):
    """The kernels of a cast. fused: written by the kernel that computes the operand. amax: a pass
    over the tensor precedes it. amax_transposed: also along the other axis, not contiguous."""

    fused: bool = False
    amax: bool = False
    amax_transposed: bool = False


CASTING: dict[str, _CastCost] = {
    "unit": _CastCost(fused=True),
    "static": _CastCost(fused=True),
    "delayed": _CastCost(),
    "tensor": _CastCost(amax=True),
    "row": _CastCost(amax_transposed=True),
    "block": _CastCost(),
    "mx": _CastCost(),
    "nv": _CastCost(amax=True),
}
"""Name in `fp8.recipes.scaling.SCALINGS` -> its kernels."""

BF16 = "bf16"


@dataclass(frozen=True)
class Product:
    """The matrix products of one layer (or of one call without a weight) in a training step.

    Attributes:
        layer: the name of the module that owns the weight, "(model)" for the model itself; the kind
            and number of the call for products of activations ("attention 1").
        kind: "linear", "convolution", "matmul" or "attention".
        m, k, n: sizes of the forward product, (m, k) times (k, n), per call; m counts tokens.
        calls: the number of such products in one forward pass.
        weight_elements: the number of elements of the weight; 0 without one.
        why_not: why `fp8.convert` does not cast it; "" if it does.
        input_elements: the number of elements of the input per call; 0: m * k. A convolution reads
            fewer.
    """

    layer: str
    kind: str
    m: int
    k: int
    n: int
    calls: int = 1
    weight_elements: int = 0
    why_not: str = ""
    input_elements: int = 0

    @property
    def flops(self) -> int:
        """Floating-point operations of the forward product; a training step has three times as
        many."""
        return 2 * self.m * self.k * self.n * self.calls


@dataclass
class LayerTime:
    """Estimated seconds of a layer's three products in a step: in bf16, and under the policy with
    its casts, amax passes and transposes."""

    layer: str
    bf16: float
    low: float

    @property
    def speedup(self) -> float:
        return self.bf16 / self.low if self.low else 1.0


@dataclass
class Estimate:
    """An estimate of one policy on one device, from a roofline; not a measurement.

    Attributes:
        hardware: a name in `HARDWARE`.
        candidate: the name of the policy.
        step_bf16, step: seconds of all products of a training step.
        layers: per layer.
        slower: the number of layers that get slower, of ``of``.
        saved_bf16, saved: bytes that the products save for the backward pass: their inputs, and of
            products of activations both operands.
        why_not: why the device does not run this recipe; "" if it does.
    """

    hardware: str
    candidate: str
    step_bf16: float
    step: float
    layers: list[LayerTime] = field(default_factory=list)
    slower: int = 0
    of: int = 0
    saved_bf16: int = 0
    saved: int = 0
    why_not: str = ""

    @property
    def speedup(self) -> float:
        return self.step_bf16 / self.step if self.step else 1.0


def estimate(
    products: Iterable[Product],
    recipes: Mapping[str, Recipe | str | None],
    hardware: str | Hardware,
    *,
    candidate: str = "",
) -> Estimate:
    """Estimates the time of all products of a training step, and what they save for backward.

    A product runs in low precision if both its operands are cast to a format of which the hardware
    has units. Convolutions and products of activations stay in bfloat16. Norms, attention's
    softmax, the optimizer, communication and recomputation are not part of the estimate.

    Args:
        products: of a training step.
        recipes: layer -> recipe, or its name. None, or no entry: bfloat16.
        hardware: a name in `HARDWARE`, or a row.
        candidate: the name of the policy, for the result.

    Returns:
        The estimate, in bfloat16 and under the recipes: seconds per step, also by layer, and saved
        bytes. An input that several layers share counts for each of them.

    Raises:
        ValueError: for an unknown hardware, recipe or layer.
        TypeError: for arguments of another type.
    """
    device = get_hardware(hardware)
    rows = list(products)
    chosen = _chosen(rows, recipes)
    planned = [_Planned.of(row, recipe, device) for row, recipe in zip(rows, chosen, strict=True)]
    times = [LayerTime(p.product.layer, p.bf16(device), p.low(device)) for p in planned]
    low = [time for time, p in zip(times, planned, strict=True) if p.units]
    missing = (_missing(recipe, device) for recipe in chosen if recipe is not None)
    return Estimate(
        hardware=device.name,
        candidate=candidate,
        step_bf16=sum(time.bf16 for time in times),
        step=sum(time.low for time in times),
        layers=times,
        slower=sum(time.low > time.bf16 for time in low),
        of=len(low),
        saved_bf16=sum(p.saved(low=False) for p in planned),
        saved=sum(p.saved(low=True) for p in planned),
        why_not=next(filter(None, missing), ""),
    )


def get_hardware(hardware: str | Hardware) -> Hardware:
    """Looks up a device.

    Args:
        hardware: a name in `HARDWARE`, or a row, which is returned unchanged.

    Returns:
        The row.

    Raises:
        ValueError: for an unknown name; the message lists the names.
        TypeError: for an argument that is neither a name nor a `Hardware`.
    """
    if isinstance(hardware, Hardware):
        return hardware
    if not isinstance(hardware, str):
        kind = type(hardware).__name__
        raise TypeError(f"hardware must be a name or a Hardware, not {kind}")
    check_name("hardware", hardware, HARDWARE)
    return HARDWARE[hardware]


def _chosen(rows: list[Product], recipes: Mapping[str, Recipe | str | None]) -> list[Recipe | None]:
    if not isinstance(recipes, Mapping):
        raise TypeError(f"recipes must map layers to recipes, not {type(recipes).__name__}")
    for row in rows:
        if not isinstance(row, Product):
            raise TypeError(f"products must be rows of Product, not {type(row).__name__}")
    for layer in recipes:
        check_name("layer", layer, dict.fromkeys(row.layer for row in rows))
    chosen = (None if row.why_not else recipes.get(row.layer) for row in rows)
    return [None if recipe is None else get_recipe(recipe) for recipe in chosen]


_MULTIPLIED = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1")
"""The formats of 8 bits or fewer that matrix units multiply."""


def _unit(cast: Cast) -> str:
    """The kind of matrix unit that multiplies operands under this cast; the format where no unit
    does."""
    format = get_format(cast.format)
    bits = format.bits
    if bits < 16 and format.name not in _MULTIPLIED:
        return format.name
    prefix = {"mx": "mxfp", "nv": "nvfp"}.get(cast.scaling, "fp")
    return BF16 if bits == 16 else f"{prefix}{bits}"


def _pairs(recipe: Recipe) -> dict[str, tuple[Cast, Cast]]:
    pairs = {name: getattr(recipe, name) for name in PRODUCTS}
    return {name: pair for name, pair in pairs.items() if None not in pair}


def _missing(recipe: Recipe, device: Hardware) -> str:
    """Why the device does not run all products of a recipe; "" if it does."""
    for cast in (cast for pair in _pairs(recipe).values() for cast in pair):
        if _unit(cast) not in device.peak:
            return f"{device.name} has no units for {cast.format} with scaling {cast.scaling!r}"
    return ""


class _Planned(NamedTuple):
    """units: product -> kind of unit, of those in low precision. passes: operand -> bytes per
    element of each kernel that casts it."""

    product: Product
    units: dict[str, str]
    passes: dict[str, list[float]]

    @staticmethod
    def of(product: Product, recipe: Recipe | None, device: Hardware) -> _Planned:
        """What of the products of a layer runs in low precision."""
        if recipe is None or product.kind != "linear":
            return _Planned(product, {}, {})
        pairs = _pairs(recipe)
        kinds = {name: {_unit(cast) for cast in pair} for name, pair in pairs.items()}
        units = {name: kind.pop() for name, kind in kinds.items() if len(kind) == 1}
        units = {n: unit for n, unit in units.items() if unit in device.peak and unit != BF16}
        passes = {}  # the first product of an operand sums over its contiguous axis
        for operand, names in OPERANDS.items():
            first, second = (
                pairs[n][PRODUCTS[n].index(operand)] if n in units else None for n in names
            )
            passes[operand] = _passes(first, second, device, operand == "weight")
        return _Planned(product, units, passes)

    @property
    def elements(self) -> dict[str, int]:
        """Operand -> its number of elements, per call."""
        p = self.product
        return {"input": p.input_elements or p.m * p.k, "weight": p.k * p.n, "grad": p.m * p.n}

    def _matmul(self, device: Hardware, name: str, unit: str) -> float:
        p, elements = self.product, self.elements
        operands = PRODUCTS[name]
        moved = sum(elements[x] * (UNITS[unit] if x in operands else 2) for x in elements)
        if p.kind == "attention":  # its scores stay on the chip
            moved = 0
        return device.seconds(unit, 2 * p.m * p.k * p.n, moved)

    def bf16(self, device: Hardware) -> float:
        """Seconds of the three products in bfloat16."""
        return self.product.calls * sum(self._matmul(device, name, BF16) for name in PRODUCTS)

    def low(self, device: Hardware) -> float:
        """Seconds of the three products and the casts."""
        times = [self._matmul(device, name, self.units.get(name, BF16)) for name in PRODUCTS]
        for operand, passes in self.passes.items():
            moved = (self.elements[operand] * each for each in passes)
            times += [device.seconds(BF16, 0, each) for each in moved]
        return self.product.calls * sum(times)

    def saved(self, low: bool) -> int:
        """Bytes saved for the backward pass: the input, and the second operand if it is no weight,
        in the format of the product that gives the weight's gradient. A weight is cast again."""
        unit = self.units.get("grad_weight", BF16) if low else BF16
        operands = ["input"] if self.product.weight_elements else ["input", "weight"]
        elements = sum(self.elements[operand] for operand in operands)
        return round(self.product.calls * elements * UNITS[unit])


def _passes(first: Cast | None, second: Cast | None, device: Hardware, weight: bool) -> list[float]:
    """Bytes per element of each kernel that casts an operand for its two products (None: that one
    is in high precision). A weight is cast for each, in the forward and in the backward pass."""
    casts = [cast for cast in (first, second) if cast is not None]
    # Reads the tensor, and reduces the maxima of its parts (torchao's roofline_utils.py).
    passes = [2.0, 0.0] if any(CASTING[cast.scaling].amax for cast in casts) else []
    fused = [CASTING[cast.scaling].fused and not weight for cast in casts]
    if first and second and not weight and _serves_both(first, second):
        size = UNITS[_unit(first)]
        copies = 1 if _unit(first) in device.either_layout else 2
        if fused[0]:
            return [2 * size] if copies == 2 else []  # a kernel that transposes
        return [*passes, 2 + copies * size]
    if first and not fused[0]:
        passes.append(2 + UNITS[_unit(first)])
    if second:
        passes += [2.0] * CASTING[second.scaling].amax_transposed + [2 + UNITS[_unit(second)]]
    return passes


def _serves_both(a: Cast, b: Cast) -> bool:
    """Whether the values of one cast serve products that sum over different axes."""
    across, along = a.tile or (0, 0)
    return a == b and across == along and not a.hadamard
