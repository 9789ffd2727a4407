"""Scales: what factor each operation needs so that every tensor has RMS about 1."""

from . import constraints, core, functional, ops, parameter, scale
from .core.functional import transformer_residual_scaling_rule
from .parameter import MupType, Parameter

__all__ = [
    "MupType",
    "Parameter",
    "constraints",
    "core",
    "functional",
    "ops",
    "parameter",
    "scale",
    "transformer_residual_scaling_rule",
]
