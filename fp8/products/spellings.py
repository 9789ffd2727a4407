"""The names that torch has for each matrix product: functions, methods and operators."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

T = TypeVar("T")

SPELLINGS: dict[str, tuple[Callable[..., Any], ...]] = {
    "matmul": (
        torch.matmul,
        torch.linalg.matmul,
        Tensor.matmul,
        Tensor.__matmul__,
        operator.matmul,
    ),
    "rmatmul": (Tensor.__rmatmul__,),
    "mm": (torch.mm, Tensor.mm),
    "bmm": (torch.bmm, Tensor.bmm),
    "mv": (torch.mv, Tensor.mv),
    "dot": (torch.dot, Tensor.dot),
    "vdot": (torch.vdot, Tensor.vdot),
    "addmm": (torch.addmm, Tensor.addmm),
    "addmm_": (Tensor.addmm_,),
    "addmv": (torch.addmv, Tensor.addmv),
    "addmv_": (torch.addmv_, Tensor.addmv_),
    "addbmm": (torch.addbmm, Tensor.addbmm),
    "addbmm_": (Tensor.addbmm_,),
    "baddbmm": (torch.baddbmm, Tensor.baddbmm),
    "baddbmm_": (Tensor.baddbmm_,),
    "grouped_mm": (F.grouped_mm, torch._grouped_mm),  # a mode receives the second for both
}
"""Product -> its spellings, which take the same arguments. A trailing _: in place."""


def by_function(table: Mapping[str, T]) -> dict[Callable[..., Any], T]:
    """Maps each spelling of the products of ``table`` to its value."""
    return {function: value for name, value in table.items() for function in SPELLINGS[name]}
