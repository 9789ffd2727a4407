"""Which products FP8 kernels compute, and why they do not compute the others."""

from __future__ import annotations

from typing import NamedTuple


class Coverage(NamedTuple):
    """A row of NATIVE. about: what is native, or why nothing is."""

    is_native: bool
    about: str


NATIVE: dict[str, Coverage] = {
    "linear layer": Coverage(
        True, "`F.linear`, `nn.Linear`, `Conv1D` of transformers: output, both gradients"
    ),
    "product of two matrices": Coverage(
        True, "also of a batch and one matrix, `x @ w`, which is one product"
    ),
    "einsum": Coverage(True, "where it is one product of two matrices; else as its products"),
    "grouped product with weights": Coverage(
        True,
        "experts, one group after the other, in eager mode and without histories. Compiled, it is "
        "simulated: the number of tokens of a group is not known to the compiler, and "
        "torch has `F.scaled_grouped_mm` on CUDA devices alone",
    ),
    "grouped product of two activations": Coverage(
        False, "each group sums over its own tokens, whose number kernels want as a multiple of 16"
    ),
    "batch of matrices": Coverage(
        False, "`F.scaled_mm` multiplies two matrices; a call for each is many short kernels"
    ),
    "attention": Coverage(
        False,
        "torch's kernels take operands of 16 bits or more. Its scores and weights are batches of "
        "matrices",
    ),
    "convolution": Coverage(
        False,
        "torch has no convolution in FP8; as a product of matrices it would write its input once "
        "for each position of the kernel",
    ),
    "bilinear form": Coverage(False, "it is a product of three operands, composed of batches"),
}
"""Product -> whether torch's FP8 kernels compute it under a recipe that has kernels."""
