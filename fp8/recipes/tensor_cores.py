"""The matrix instructions of accelerators, whose sums `Recipe.accumulate` simulates.

A tensor core adds a few products to its accumulator at once: it aligns them to the largest exponent
among them, truncates each a number of bits below that, adds the truncated ones exactly, and rounds
the sum. The arithmetic was measured on the devices by others and is published with a model of every
instruction (arXiv:2511.10909, arXiv:2512.07004, package mmasim 2.1.1, the oracle of the tests).
`fp8.lab.sums` computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["TENSOR_CORES", "Instruction", "instruction", "instruction_for"]


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """How a matrix instruction adds.

    Attributes:
        formats: those of its operands, in any combination.
        scales: the numbers of elements of a row that may share a block scale; () for instructions
            without block scales.
        scale_formats: those of block scales.
        step: the number of products that are added at once, in the order of k.
        add: the arithmetic of a step, a name in `fp8.lab.sums.arithmetic.ADDITIONS`.
        term_bits: bits of a term below the largest exponent of the step; lower ones are cut off.
        fraction: bits of the sum's fraction.
        of_zero: the exponent of a zero product and of a zero sum.
    """

    formats: tuple[str, ...]
    scales: tuple[int, ...] = ()
    scale_formats: tuple[str, ...] = ()
    step: int
    add: str
    term_bits: int
    fraction: int = 23
    of_zero: int = -133


_FP8 = ("e4m3", "e5m2")
_NARROW = (*_FP8, "e3m2", "e2m3", "e2m1")

TENSOR_CORES: dict[str, tuple[Instruction, ...]] = {
    "ada": (
        Instruction(formats=_FP8, step=16, add="aligned", term_bits=13, fraction=13, of_zero=-132),
    ),
    "hopper": (Instruction(formats=_FP8, step=32, add="aligned", term_bits=13, fraction=13),),
    "blackwell": (
        Instruction(formats=_NARROW, step=32, add="aligned", term_bits=25),
        Instruction(
            formats=("e2m1",),
            scales=(16, 32),
            scale_formats=("e8m0", "e4m3"),
            step=64,
            add="in_groups",
            term_bits=35,
            of_zero=-139,
        ),
        Instruction(
            formats=_NARROW,
            scales=(32,),
            scale_formats=("e8m0",),
            step=32,
            add="aligned",
            term_bits=25,
        ),
    ),
}
"""Accelerator -> its instructions for operands of eight bits and fewer: wgmma of Hopper, mma of
Ada, tcgen05.mma of Blackwell. CDNA3 (MI300) keeps 24 bits: its errors are those of float32."""


def instruction(
    chip: str, formats: Sequence[str], along: int = 0, scale_format: str = ""
) -> Instruction | None:
    """The instruction of a chip for operands of these formats; None if it has none.

    along, scale_format: the block scales that the instruction applies; 0 for none.
    """
    for row in TENSOR_CORES[chip]:
        scaled = along in row.scales and scale_format in row.scale_formats
        if set(formats) <= set(row.formats) and (scaled if along else not row.scales):
            return row
    return None


def instruction_for(
    chip: str, formats: Sequence[str], along: Sequence[int], scale_formats: Sequence[str]
) -> Instruction | None:
    """The instruction for two operands: one that applies their block scales, or else one without.

    along: the elements of a row that share a scale, 0 for all. scale_formats: "" for float32.
    """
    match = None
    if along[0] == along[1] > 0 and scale_formats[0] == scale_formats[1]:
        match = instruction(chip, formats, along[0], scale_formats[0])
    return match or instruction(chip, formats)
