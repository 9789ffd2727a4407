"""Transforms of whole models: each returns a copy, in any order and combination."""

from .compile import compile
from .report import Report, report
from .simulate import simulate_format, simulate_fp8
from .unit_scale import unit_scale
from .verify import Verification, verify

__all__ = [
    "Report",
    "Verification",
    "compile",
    "report",
    "simulate_format",
    "simulate_fp8",
    "unit_scale",
    "verify",
]
