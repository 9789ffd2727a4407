"""What a kernel is: a row with the operands that it accepts, their layout and the product.

A kernel computes ``a b^T``: a and b are both multiplied along their last dimension. Kernels differ
in which elements share a scale, and in the memory layout of values and scales. Both follow from
torch's argument checks (ScaledBlas.cpp).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..casts.casting import QuantizedOperand
from ..common.compiler import compiled_as
from ..recipes.cast import Cast
from ..torch_internals import Keywords

#: The sizes of a weight must be multiples of this, because CUDA kernels read 16 bytes at a time.
#: The rule holds on every device, so that what runs natively on one runs natively on all.
ALIGNMENT = 16

Capability = tuple[int, int]
"""A CUDA compute capability."""

#: The pairs of formats of kernels without scales of tiles. No device multiplies e5m2 by e5m2.
EIGHT_BITS = (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"))


class Output(NamedTuple):
    """The result of a product, ``factor * a b^T`` in ``dtype``. fast: as `Recipe.fast_sums`."""

    factor: float
    dtype: torch.dtype
    fast: bool


def _nothing(a: Cast, b: Cast) -> str:
    return ""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A row of `KERNELS`.

    Attributes:
        name: which elements share a scale: "scales by ``name``" in messages.
        about: the operands, for the documentation.
        accepts: whether the kernel multiplies operands under this cast.
        formats: the pairs of formats of operands that it multiplies.
        refuses: why it does not multiply operands under two casts that it accepts; "" if it does.
        store: `quantized` values, rounded by the conversion to the dtype of the format, and scales
            in the layout of the kernel.
        multiply: the product of two stored operands, whose values are `filled`.
        least: the lowest CUDA compute capability that has the kernel.
        below: the lowest one that no longer has it, if there is one.
        cpu: whether CPUs have the kernel.
        multiple: the sizes of a weight must be multiples of this; tokens are padded to it.
    """

    name: str
    about: str
    accepts: Callable[[Cast], bool]
    formats: tuple[tuple[str, str], ...]
    refuses: Callable[[Cast, Cast], str] = _nothing
    store: Callable[[QuantizedOperand, Cast], QuantizedOperand]
    multiply: Callable[[QuantizedOperand, QuantizedOperand, Output], Tensor]
    least: Capability
    below: Capability | None = None
    cpu: bool = False
    multiple: int = ALIGNMENT

    @property
    def devices(self) -> str:
        """A description of the devices that have the kernel."""
        if self.cpu:
            return "CUDA devices with FP8"
        first = "CUDA devices of compute capability {}.{}".format(*self.least)
        if self.below:
            return first
        return f"{first} and up"

    def why_not_pair(self, a: Cast, b: Cast) -> str:
        """Why the kernel does not multiply operands that it accepts; "" if it does."""
        if (a.format, b.format) in self.formats:
            return self.refuses(a, b)
        formats = f"{a.number_format} by {b.number_format}"
        return f"no kernel multiplies {formats} with scales by {self.name}"

    def why_not_on(self, device: torch.device) -> str:
        """Why ``device`` is not expected to have the kernel; "" if it is."""
        needs = f"scales by {self.name} need {self.devices}"
        capability = capability_of(device)
        if capability is None:
            if self.cpu:
                return ""
            return needs
        is_newer = self.below is not None and capability >= self.below
        if self.least <= capability and not is_newer:
            return ""
        return "{}, not {}.{}".format(needs, *capability)


def why_not_device(device: torch.device) -> str:
    """Why ``device`` has no FP8 product at all; "" if it has one."""
    capability = capability_of(device)
    if capability is not None:
        if capability < (8, 9):
            return "compute capability {}.{}, FP8 needs 8.9".format(*capability)
    elif device.type != "cpu":
        return f"no FP8 product is known for {device.type}"
    elif torch.__version__ < "2.12":
        return f"torch {torch.__version__} has no FP8 product for CPUs, 2.12 has"
    return ""


_ASSUMED: list[Capability | None] = [None]


def assume(capability: Capability | None) -> None:
    """Lets every device count as one of this capability (None: as what it is), for code that
    multiplies nothing."""
    _ASSUMED[0] = capability


def capability_of(device: torch.device) -> Capability | None:
    """The capability of a CUDA device, or the assumed one; None for other devices."""
    if device.type == "cuda" and _ASSUMED[0] is None:
        return torch.cuda.get_device_capability(device)
    return _ASSUMED[0]


# What rows share.


def in_rows_or_squares(cast: Cast, size: int) -> bool:
    """Whether scales are shared by ``size`` elements of a row, or by squares of that side."""
    return cast.tile in ((1, size), (size, size))


def padded(values: Tensor, columns: int, rows: int = 1) -> Tensor:
    """A matrix filled up with zeros to multiples of these sizes."""
    right = -values.shape[1] % columns
    below = -values.shape[0] % rows
    return F.pad(values, (0, right, 0, below))


def filled(data: Tensor) -> Tensor:
    """FP8 data with contiguous rows, filled up with zeros to a multiple of 16 bytes."""
    missing = -data.shape[1] % ALIGNMENT
    if not missing:
        return data.contiguous()
    bytes = data.view(torch.uint8)  # float8 tensors cannot be padded
    return F.pad(bytes, (0, missing)).view(data.dtype)


class Scales(NamedTuple):
    """The scales of an operand, as `torch.nn.functional.scaled_mm` takes them."""

    values: Tensor | list[Tensor]
    types: F.ScalingType | list[F.ScalingType]
    swizzles: F.SwizzleType | list[F.SwizzleType] | None = None


#: Whether the compiler generates a call of `F.scaled_mm`. torch 2.11 and 2.12 dispatch it from
#: Python, which takes 33 us longer (by times of a model on an H200).
_IS_LOWERED = torch.__version__ >= "2.13"


def _in_graph(
    a: Tensor, b: Tensor, of_a: Scales, of_b: Scales, output: Output
) -> Tensor:
    older = of_a.types in (F.ScalingType.TensorWise, F.ScalingType.RowWise)
    if _IS_LOWERED or not older or a.device.type != "cuda":
        return _scaled_mm(a, b, of_a, of_b, output)
    left, right = of_a.values, of_b.values
    assert isinstance(left, Tensor)
    assert isinstance(right, Tensor)
    how: Keywords = {"out_dtype": output.dtype, "use_fast_accum": output.fast}
    return torch._scaled_mm(a, b.t(), left, right, **how)


def _scaled_mm(
    a: Tensor, b: Tensor, of_a: Scales, of_b: Scales, output: Output
) -> Tensor:
    # Row-major first and column-major second operand: the only layout that CUDA supports.
    result: Tensor = F.scaled_mm(
        a,
        b.t(),
        of_a.values,
        of_a.types,
        of_b.values,
        of_b.types,
        of_a.swizzles,
        of_b.swizzles,
        output_dtype=output.dtype,
        use_fast_accum=output.fast,
    )
    return result


@compiled_as(_in_graph)
def scaled_mm(
    a: Tensor, b: Tensor, of_a: Scales, of_b: Scales, output: Output
) -> Tensor:
    """``a b^T`` with these scales, which hold the factor of the output."""
    return _scaled_mm(a, b, of_a, of_b, output)
