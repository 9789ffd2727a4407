"""The sums that `Recipe.accumulate` simulates: sums of matrix instructions, and exact ones.

A tensor core adds a few products to its accumulator at once: it aligns them to the largest exponent
among them, truncates each 13 bits below that, adds the truncated ones exactly, and rounds the sum
to 13 bits of fraction (measured on devices: arXiv:2511.10909, arXiv:2512.07004, package mmasim
2.1.1, the oracle of the tests). `fp8.lab.sums` computes it.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["EXACT", "FORMATS", "SUMS", "TENSOR_CORES", "Instruction"]

FORMATS = ("e4m3", "e5m2")
"""The formats of the operands, in any combination."""


class Instruction(NamedTuple):
    """How many products are added at once, in the order of k, and the exponent of a zero."""

    step: int
    of_zero: int


#: Accelerator -> its instruction for FP8: mma of Ada, wgmma of Hopper. Blackwell keeps 25 bits, and
#: CDNA3 (MI300) 24: their errors equal the errors of float32.
TENSOR_CORES: dict[str, Instruction] = {
    "ada": Instruction(step=16, of_zero=-132),
    "hopper": Instruction(step=32, of_zero=-133),
}

EXACT = "exact"
"""Sums without rounding, rounded to float32 once: the same for each order of the terms, and so for
each size of the batch. They are computed in float64, which holds every sum of 2**17 products of
e4m3 values, multiples of 2**-18 up to 2**17.6; of other formats within its rounding."""

SUMS = (*TENSOR_CORES, EXACT)
"""The values of `Recipe.accumulate`."""
