"""Products by torch's FP8 kernels: operands of one byte an element, scales applied by the kernel.

The same casts as in simulation, and the same three products; what is kept for the backward pass are
the bytes. A kernel takes two matrices (m, k) and (k, n) with a scale for each, or for each row of
the first and each column of the second.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from .casting import Spec, format_of
from .function import apply, own
from .kept import once
from .quantize import quantize
from .recipe import Cast, Recipe
from .scaled_tensor import ScaledTensor, plain
from .scaling import delayed_scale, scale_of, scaled_tiles

__all__ = [
    "ALIGNMENT",
    "Stored",
    "fits",
    "multiply",
    "product",
    "store",
    "takes",
    "why_not_device",
    "why_not_recipe",
]

ALIGNMENT = 16
"""The sizes of a weight must be multiples of this: the kernels of CUDA read 16 bytes at a time.
Asked for on every device, so that what runs natively on one does on all."""

_FORMATS = ("e4m3", "e5m2")
_SCALINGS = ("unit", "tensor", "delayed", "row")
_OTHER_KERNELS = {"block": "9.0", "mx": "10.0", "nv": "10.0"}
"""Scaling -> the compute capability from which on torch has kernels for it, not called here."""
_CAPABILITY = (8, 9)
"""CUDA devices before this (Ada; Hopper is 9.0) have no FP8 product."""


def why_not_recipe(recipe: Recipe) -> str:
    """Why the kernels cannot compute the products of ``recipe``; "" if they can."""
    casts = [*recipe.forward, *recipe.grad_input, *recipe.grad_weight]
    if any(cast is None for cast in casts):
        return "an operand stays in high precision"
    for cast in casts:
        assert cast is not None
        if cast.format not in _FORMATS:
            return f"the kernels have no format {str(cast.format)!r}"
        if cast.scaling not in _SCALINGS:
            least = _OTHER_KERNELS[cast.scaling]
            return f"the kernels for scaling {cast.scaling!r} (CUDA {least}) are not called yet"
        if cast.hadamard:
            return "a rotated operand has another size"
    if any(a.format == b.format == "e5m2" for a, b in _pairs(recipe)):
        return "no kernel multiplies e5m2 by e5m2"
    return ""


def _pairs(recipe: Recipe) -> list[tuple[Cast, Cast]]:
    pairs = (recipe.forward, recipe.grad_input, recipe.grad_weight)
    return [(a, b) for a, b in pairs if a is not None and b is not None]


def why_not_device(device: torch.device) -> str:
    """Why ``device`` has no FP8 product; "" if it has."""
    if device.type == "cpu":
        old = torch.__version__ < (2, 12)
        return f"torch {torch.__version__} has no FP8 product for CPUs, 2.12 has" if old else ""
    if device.type != "cuda":
        return f"no FP8 product is known for {device.type}"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < _CAPABILITY:
        return f"compute capability {major}.{minor}, FP8 needs 8.9"
    return ""


def takes(backend: str, a: Tensor, b: Tensor) -> bool:
    """Whether a product of a (m, k) and b (n, k) under a recipe with kernels runs on them.

    Raises RuntimeError where "native" is asked for on a device without.
    """
    if backend == "simulate" or not fits(a, b):
        return False
    why_not = why_not_device(a.device)
    if why_not and backend == "native":
        raise RuntimeError(f"backend='native': {why_not}; 'simulate' runs everywhere")
    return not why_not and (backend == "native" or a.device.type == "cuda")


def fits(a: Tensor, b: Tensor) -> bool:
    """Whether the kernels take a (m, k) by b (n, k), and their gradients."""
    return (
        a.dim() == b.dim() == 2
        and a.dtype in (torch.float32, torch.bfloat16, torch.float16)
        and min(*a.shape, *b.shape) > 0
        and b.shape[0] % ALIGNMENT == 0
        and b.shape[1] % ALIGNMENT == 0
    )


class Stored(NamedTuple):
    """An operand: bytes (rows, columns) of an FP8 dtype, and the value of one unit of them: 0-dim,
    (rows, 1) or (1, columns)."""

    data: Tensor
    scale: Tensor


def store(
    x: Tensor, spec: Spec, axis: int = -1, history: Tensor | None = None, record: bool = False
) -> Stored:
    """``x`` under a spec, in bytes. axis: the one that the product sums over. history, record: as
    in `fp8.casting.round_straight`."""
    format = format_of(spec)
    _, rule, tile, margin, rounding, overflow, random_bits, *_ = spec
    assert format.dtype is not None
    scale = torch.ones((), dtype=torch.float32, device=x.device)
    x = plain(x, torch.float32)
    if history is not None:
        assert rule is not None
        scale = delayed_scale(x, history, format, rule, record) * 2.0**margin
        x = x / scale
    elif rule is not None:
        tiles, dims = scaled_tiles(x, tile, axis)
        scale = scale_of(tiles, dims, format, rule) * 2.0**margin
        x = x / scale
    y = quantize(x, format, rounding=rounding, overflow=overflow, random_bits=random_bits)
    return Stored(y.to(format.dtype), scale)


def _handed_on(x: Tensor, spec: Spec) -> Stored | None:
    """The bytes and scale of a ScaledTensor in the format of a cast without scales; None of all
    else."""
    if not isinstance(x, ScaledTensor) or spec[1] is not None:
        return None
    same = x.stored.dtype == format_of(spec).dtype
    return Stored(x.stored, x.scale) if same else None


def multiply(a: Stored, b: Stored, factor: float, dtype: torch.dtype) -> Tensor:
    """``factor * a @ b`` in ``dtype``, for a (m, k) and b (k, n). The factor rides in a's scale."""
    (m, k), n = a.data.shape, b.data.shape[1]
    left, right, kind = a.scale * factor, b.scale, F.ScalingType.TensorWise
    if left.dim() or right.dim():
        kind = F.ScalingType.RowWise
        left, right = left.expand(m, 1).flatten()[:, None], right.expand(1, n).flatten()[None]
    x, y = a.data, b.data
    if missing := -k % ALIGNMENT:  # zeros add nothing; an odd number of tokens
        x, y = F.pad(_bytes(x), (0, missing)), F.pad(_bytes(y), (0, 0, 0, missing))
        x, y = x.view(a.data.dtype), y.view(b.data.dtype)
    # The layout that Hopper asks for: rows of the first and columns of the second in one piece.
    return F.scaled_mm(
        x.contiguous(),
        y.t().contiguous().t(),
        left,
        kind,
        right,
        kind,
        output_dtype=dtype,
    )


def _bytes(x: Tensor) -> Tensor:
    """float8 tensors cannot be padded."""
    return x.view(torch.uint8)


class _Native(Function):
    """``s_y * a b^T (+ bias)`` for a (m, k) and b (n, k), which only carry the gradients.

    Arguments: a, b and bias; their bytes and scales for this product, then for the backward ones
    (None where one copy serves both); the history of the gradient or None; three scales; the specs
    of the gradient.
    """

    @staticmethod
    def forward(
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        a_data: Tensor,
        a_scale: Tensor,
        b_data: Tensor,
        b_scale: Tensor,
        a_again: Tensor | None,
        a_again_scale: Tensor | None,
        b_again: Tensor | None,
        b_again_scale: Tensor | None,
        history: Tensor | None,
        s_y: float,
        s_a: float,
        s_b: float,
        specs: tuple[Any, ...],
        dtype: str,
    ) -> Tensor:
        transposed = Stored(b_data.t(), b_scale.mT if b_scale.dim() else b_scale)
        y = multiply(Stored(a_data, a_scale), transposed, s_y, getattr(torch, dtype))
        return y if bias is None else own(y.add_(bias))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        *_, ctx.history, _, ctx.s_a, ctx.s_b, ctx.specs, _ = inputs
        used, again = inputs[3:7], inputs[7:11]
        pairs = zip(used, again, strict=True)
        ctx.save_for_backward(*(first if other is None else other for first, other in pairs))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        once(ctx)
        a, a_scale, b, b_scale = ctx.saved_tensors
        for_a, for_b = ctx.specs
        da = db = dbias = g = None
        if ctx.needs_input_grad[0]:
            g = store(grad, for_a, -1, ctx.history, record=True)
            da = multiply(g, Stored(b, b_scale), ctx.s_a, grad.dtype)
        if ctx.needs_input_grad[1]:
            if g is None or for_a != for_b or g.scale.dim():
                g = store(grad, for_b, -2, ctx.history, record=True)
            scale = g.scale.mT if g.scale.dim() else g.scale
            db = multiply(Stored(g.data.t(), scale), Stored(a, a_scale), ctx.s_b, grad.dtype)
        if ctx.needs_input_grad[2]:
            dbias = grad.sum(0) * ctx.s_b
        return da, db, dbias, *[None] * 14


def _again(x: Tensor, stored: Stored, spec: Spec, other: Spec) -> tuple[Tensor | None, ...]:
    """``x`` for a product along the other axis, (None, None) where ``stored`` serves there too."""
    serves = spec == other and not stored.scale.dim()
    return (None, None) if serves else store(x, other, -2)


def product(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    scales: tuple[float, float, float],
    casts: tuple[Spec, ...],
    histories: list[Tensor | None],
    dtype: torch.dtype,
) -> Tensor:
    """``s_y * a b^T + bias`` in ``dtype``, for a (m, k) and b (n, k) that the kernels take.

    casts: as in `fp8.matmul.Casts`. histories: of a, b and the output's gradient, None where the
    scaling is not "delayed". The gradient of the bias is s_b times the sum of the output's.
    An a that was handed on in the format of its cast (`fp8.norm`) is not cast again: its bytes are
    the operand.
    """
    for_a, for_b, grad_for_a, b_again, grad_for_b, a_again = casts
    of_a, of_b, of_grad = histories
    record = torch.is_grad_enabled()
    with torch.no_grad():
        left = _handed_on(a, for_a) or store(a, for_a, -1, of_a, record)
        right = store(b, for_b, -1, of_b, record)
        left_again = _again(a, left, for_a, a_again)
        right_again = _again(b, right, for_b, b_again)
    specs, name = (grad_for_a, grad_for_b), str(dtype).removeprefix("torch.")
    operands = (*left, *right, *left_again, *right_again)
    return apply(_Native, a, b, bias, *operands, of_grad, *scales, specs, name)
