"""Sequence parallelism: activations gathered in one byte per element.

`torch.distributed.tensor.parallel.parallelize_module` needs nothing of this module: products take
DTensors (`fp8.casts.casting`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.hooks import RemovableHandle

from ..casts.casting import LoweredCast, format_of, lowered, rounding_of, whole_scale
from ..casts.operands import restored
from ..common.dtensor import as_shard, whole
from ..common.mixin import bare_class, check_module
from ..formats.format import get_format
from ..formats.quantize import in_dtype, quantize_operand

__all__ = ["gather_input_in_fp8"]

SCALINGS = ("unit", "tensor")
"""The supported scalings of an input's cast, whose copy serves the gradient of the weight too."""


def gather_input_in_fp8(module: nn.Module, mesh: DeviceMesh, *, dim: int = 1) -> RemovableHandle:
    """Makes ``module`` gather its input in FP8, as its layers cast it.

    Call it before or after `parallelize_module`, for modules whose plan gathers the first argument:

        plan = {"up": ColwiseParallel(input_layouts=Shard(1)), ...}
        model = parallelize_module(fp8.convert(model), mesh, plan)
        gather_input_in_fp8(model.up, mesh)

    ``module`` is such a layer, or one that holds layers and whose input a `PrepareModuleInput`
    gathers for all of them. A forward pre-hook sends the rounded part of each process, and passes
    the whole on as a replicated DTensor, the operand of the layers: results are those of a
    gathering in high precision. The gradient is reduced and divided in high precision. NaN stays
    NaN; Inf stays Inf if the format has Inf and becomes NaN otherwise.

    Args:
        module: converted by `fp8.convert`.
        mesh: of tensor parallelism, with one dimension.
        dim: the dimension of the input that processes divide: 1 is the sequence.

    Returns:
        A handle whose ``remove()`` restores the gathering in high precision.

    Raises:
        TypeError: if ``module`` is not a module.
        ValueError: if no layer in it has a recipe, or its layers cast their inputs differently, or
            by a cast without a format of one byte and a scaling in `SCALINGS`, or not for the
            gradient of the weight; for a mesh of more dimensions.
    """
    check_module("gather_input_in_fp8", module)
    if mesh.ndim != 1:
        raise ValueError(f"gather_input_in_fp8 needs a mesh of one dimension, got {mesh.ndim}")
    recipes = [vars(m)["fp8_recipe"] for m in module.modules() if "fp8_recipe" in vars(m)]
    pairs = {(recipe.input, recipe.grad_weight[1]) for recipe in recipes if recipe is not None}
    kind = bare_class(module).__name__
    if len(pairs) != 1:
        count = f"{len(pairs)} casts of inputs" if pairs else "no layer with a recipe"
        raise ValueError(f"{kind} has {count}: gather_input_in_fp8 needs one cast for all layers")
    cast, again = pairs.pop()  # of the input, and in the gradient of the weight
    dtype = None if cast is None else get_format(cast.format).dtype
    if cast is None or cast.scaling not in SCALINGS or dtype is None or dtype.itemsize > 1:
        raise ValueError(
            f"{kind} casts its input as {cast}; gather_input_in_fp8 sends one byte per element and "
            f"takes scalings {' and '.join(map(repr, SCALINGS))}"
        )
    if again != cast or cast.hadamard:
        raise ValueError(
            f"{kind} casts its input as {cast}, and as {again} for the gradient of the weight; "
            "what is gathered is one copy for both"
        )
    spec = lowered(cast)
    return module.register_forward_pre_hook(partial(_gathered, mesh, dim, spec), prepend=True)


def _gathered(mesh: DeviceMesh, dim: int, spec: LoweredCast, module: Any, args: Any) -> Any:
    if not args:
        kind = bare_class(module).__name__
        raise ValueError(f"{kind} gathers its first argument, which must be positional")
    x, *rest = args
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Shard(dim)], run_check=False)
    return (_Gather.apply(x, spec) if x.placements[0].is_shard() else x, *rest)


class _Gather(Function):
    """A divided DTensor -> the whole, rounded under a spec, with a straight-through gradient."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, spec: LoweredCast) -> Any:
        ctx.placements = x.placements
        format = format_of(spec)
        scale = whole_scale(x, spec, format)
        assert format.dtype is not None
        part: Tensor = x.to_local()
        y = quantize_operand(part, format, scale=scale, **rounding_of(spec))
        bits = in_dtype(y if scale is None else y / scale, format.dtype).view(torch.uint8)
        values = restored(whole(as_shard(x, bits)).view(format.dtype), scale, x.dtype)
        return DTensor.from_local(values, x.device_mesh, [Replicate()], run_check=False)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.redistribute(placements=ctx.placements), None
