"""Transforms of whole models. Each returns a copy; they combine in any order."""

from fp8.common.report import Report

from . import utils
from .compile import compile
from .inspect.metrics import Metrics
from .inspect.prune import prune_non_float_tensors, prune_same_scale_tensors, prune_selected_nodes
from .plan.plan import ModelPlan
from .simulate import simulate_format, simulate_fp8
from .track_scales import track_scales
from .transformed import fold, report
from .unit_scale import unit_scale
from .verify import Verification, verify

__all__ = [
    "Metrics",
    "ModelPlan",
    "Report",
    "Verification",
    "compile",
    "fold",
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
