"""Formulas of FLOPs for matrix products.

Works around: `torch.utils.flop_counter` (2.11 to 2.14) has none for scaled and grouped products,
and counts 0. Its import imports Triton, which takes as long as the import of fp8.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

SCALED = ("aten::_scaled_mm", "aten::_scaled_mm_v2")
GROUPED = ("aten::_grouped_mm", "fp8::multiply_groups")
SUMMED = ("fp8::summed",)


@cache
def count_flops(names: tuple[str, ...]) -> None:
    """Registers the formula of operators that have none. Called by the first product of a kind.
    Counters that are open have a copy of torch's table, and get the formula too."""
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from torch.utils.flop_counter import (
        FlopCounterMode,
        flop_registry,
        register_flop_formula,
    )

    for namespace, _, operator in (name.partition("::") for name in names):
        packet = getattr(getattr(torch.ops, namespace), operator)
        if packet not in flop_registry:
            register_flop_formula(packet, get_raw=True)(_flops)
        for mode in _get_current_dispatch_mode_stack():
            counter = getattr(mode, "counter", None)
            if isinstance(counter, FlopCounterMode):
                counter.flop_registry.setdefault(packet, flop_registry[packet])


def _flops(a: Tensor, *args: Any, out_val: Tensor, **kwargs: Any) -> int:
    """Two for each element of ``a`` and column of the result, which groups of ``a`` may share."""
    groups = a.shape[0] if a.ndim > out_val.ndim else 1
    packed = 2 if a.dtype == torch.float4_e2m1fn_x2 else 1
    return 2 * packed * a.numel() * out_val.shape[-1] // groups
