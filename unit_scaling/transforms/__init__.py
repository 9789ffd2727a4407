"""Transforms of whole models. Each returns a copy; they combine in any order."""

from fp8.common.report import Report

from . import utils
from .compile import compile
from .simulate import simulate_format, simulate_fp8
from .track_scales import (
    Metrics,
    prune_non_float_tensors,
    prune_same_scale_tensors,
    prune_selected_nodes,
    track_scales,
)
from .unit_scale import report, unit_scale
from .verify import Verification, verify

__all__ = [
    "Metrics",
    "Report",
    "Verification",
    "compile",
    "prune_non_float_tensors",
    "prune_same_scale_tensors",
    "prune_selected_nodes",
    "report",
    "simulate_format",
    "simulate_fp8",
    "track_scales",
    "unit_scale",
    "utils",
    "verify",
]
