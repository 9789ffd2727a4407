"""Transforms of whole models: each returns a copy, in any order and combination."""

from .simulate import simulate_format, simulate_fp8
from .unit_scale import unit_scale

__all__ = ["simulate_format", "simulate_fp8", "unit_scale"]
