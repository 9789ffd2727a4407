"""Rounds tensors to low-precision formats: `quantize` and its two straight-through variants."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..common.compiler import eager_only, is_differentiated_again, reads_values
from ..common.validation import check_between, check_name
from ..torch_internals import Arguments, Context
from ..torch_internals.autograd_functions import apply, same, unaliased
from .format import Format, dtype_name, get_format
from .random_bits import Key, Seed, bits_from_key, drawn_key, fewer_bits, random_key
from .rounding import (
    LAYOUTS,
    ROUNDINGS,
    Grid,
    divided,
    makes_finite,
    round_to_grid,
)

__all__ = ["quantize", "quantize_backward", "quantize_forward"]

OVERFLOWS = ("saturate", "nonfinite")

#: The dtypes that can be quantized; 16-bit dtypes are computed in float32.
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

#: Elements per thread and step in eager mode on a CPU: three chunks stay in cache.
CHUNK = 1 << 17


def quantize(
    x: Tensor,
    format: str | Format,
    *,
    rounding: str = "nearest",
    overflow: str = "saturate",
    scale: float | Tensor | None = None,
    seed: Seed | None = None,
    random_bits: int = 31,
) -> Tensor:
    """Rounds ``x / scale`` to `format` and multiplies by ``scale``. Not differentiable.

    NaN stays NaN, also in formats without NaN. -0 stays -0 and negative values round to -0, except
    in formats without -0. The result is a value of the format that the dtype of x can represent.
    Without a scale, overflow therefore starts at the largest common value of the two (65280 for
    format "fp16" in a bfloat16 tensor, and for "bf16" in a float16 tensor).

    Args:
        x: float32, bfloat16, float16 or float64, any shape and strides. Each element is rounded
            once, from its exact value.
        format: a name in `FORMATS`, or a `Format`.
        rounding: "nearest" (ties to even); "toward_zero"; "stochastic": to one of the two
            neighbours, so that the expected value is x.
        overflow: "saturate": values beyond the largest value, including Inf, become the largest
            value with their sign. "nonfinite": they become Inf if the format has Inf, else NaN. As
            in IEEE 754 the rounded value decides; under "toward_zero" only Inf overflows.
        scale: a positive float, or a tensor of positive values that broadcasts to `x`, applied in
            float32 (float64 for float64), exactly for powers of two. For tensors outside of the CPU
            and in compiled code, other values give NaN instead of an error.
        seed: for "stochastic", an int, a 0-dim int64 tensor, or a sequence of these such as (seed,
            step, stream). The same seed gives the same result in eager and compiled code, on every
            device and for all strides. None draws one by the state of torch's CPU generator:
            reproducible under torch.manual_seed, and no number that torch draws changes. A graph
            may draw the seeds of several casts in another order than eager code.
        random_bits: for "stochastic", the number of random bits, 1 to 31; hardware has few. The
            probability of rounding up is a multiple of 2**-random_bits.

    Returns:
        A tensor with the shape, dtype and memory format of `x`.

    Raises:
        TypeError: unless ``x`` is a dense tensor of one of these dtypes.
        ValueError: for unknown names, overflow="nonfinite" with a format that has neither Inf nor
            NaN, a scale that is not positive or does not broadcast to `x`, and a seed without
            stochastic rounding.
    """
    options = _checked(x, format, rounding, overflow, scale, seed, random_bits)
    return _quantize(x.detach(), *options)


def quantize_operand(
    x: Tensor,
    format: Format,
    *,
    rounding: str = "nearest",
    overflow: str = "saturate",
    scale: Tensor | None = None,
) -> Tensor:
    """`quantize` for casts of products: NaN and Inf stay nonfinite in every format, so that a check
    of the results (GradScaler's) detects them. scale: not validated."""
    grid = operand_grid(format, overflow, x.dtype, scale is not None, rounding)
    return _quantize(x.detach(), grid, scale, _key(rounding, None, x.device))


def operand_grid(
    format: Format,
    overflow: str,
    dtype: torch.dtype,
    scaled: bool,
    rounding: str,
) -> Grid:
    """The grid of `quantize_operand` for tensors of ``dtype``, with or without a scale."""
    infinity = (format.nonfinite or math.nan) if overflow == "saturate" else None
    return _grid(format, overflow, dtype, scaled, 31, infinity, rounding)


def quantize_forward(x: Tensor, format: str | Format, **options: Any) -> Tensor:
    """`quantize(x, ...)`, whose arguments it has, with a straight-through gradient: it passes to x
    unchanged, even where saturated. The scale gets no gradient."""
    return apply(_Forward, x, *_checked(x, format, **options))


def quantize_backward(x: Tensor, format: str | Format, **options: Any) -> Tensor:
    """A view of x, whose gradient is ``quantize(grad, ...)``, whose arguments it has; the gradient
    of the gradient passes unchanged. Without a seed, one is drawn in the forward pass. The scale
    gets no gradient."""
    return apply(_Backward, x, *_checked(x, format, **options))


class _Forward(torch.autograd.Function):
    """The forward pass. It takes no *args: torch 2.13 compiles a tensor among them into a wrong
    position."""

    @staticmethod
    def forward(
        x: Tensor,
        grid: Arguments,
        scale: Tensor | None,
        key: Key | None,
    ) -> Tensor:
        return unaliased(_quantize(x, grid, scale, key))

    @staticmethod
    def setup_context(ctx: Context, inputs: Arguments, output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor,
        grid: Arguments,
        scale: Tensor | None,
        key: Key | None,
    ) -> Tensor:
        return same(x)

    @staticmethod
    def setup_context(ctx: Context, inputs: Arguments, output: Tensor) -> None:
        _, ctx.grid, scale, key = inputs
        # Tensors only: in compiled code saved_tensors omits None.
        ctx.scaled = scale is not None
        ctx.keyed = False
        ctx.key = key
        tensors = [] if scale is None else [scale]
        if isinstance(key, Tensor):
            tensors.append(key)
            ctx.keyed = True
            ctx.key = None
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        scale = tensors[0] if ctx.scaled else None
        options = (ctx.grid, scale, tensors[-1] if ctx.keyed else ctx.key)
        if is_differentiated_again():
            return apply(_Forward, grad, *options), None, None, None
        return _quantize(grad, *options), None, None, None


def convertible(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` for a conversion to an FP8 ``dtype``, after which Inf and NaN are not finite."""
    if dtype != torch.float8_e5m2 or not makes_finite(x):
        return x
    return torch.add(x, x, alpha=0.0)  # Inf * 0 is NaN: one multiply-add


def in_dtype(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """``x`` in the FP8 dtype of a format, which has one. Inf and NaN stay nonfinite."""
    assert dtype is not None
    return convertible(x, dtype).to(dtype)


def check_dtype(x: Tensor) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"cannot quantize a {type(x).__name__}; give a tensor")
    if x.dtype not in DTYPES:
        allowed = ", ".join(map(dtype_name, DTYPES))
        raise TypeError(f"cannot quantize {x.dtype}; allowed are {allowed}")
    _refuse_sparse(x)


@eager_only()  # the compiler knows the layout of inputs alone
def _refuse_sparse(x: Tensor) -> None:
    refuse_nested(x)
    if x.layout != torch.strided:
        kind = f"a tensor of layout {x.layout}"
        raise TypeError(f"cannot quantize {kind}; give x.to_dense()")


@eager_only()
def refuse_nested(x: Tensor) -> None:
    """Raises NotImplementedError for a nested tensor; the operator @ would hide a TypeError."""
    if x.is_nested:
        raise NotImplementedError(
            "a nested tensor cannot be quantized; pad it, or give values()"
        )


def _checked(
    x: Tensor,
    format: str | Format,
    rounding: str = "nearest",
    overflow: str = "saturate",
    scale: float | Tensor | None = None,
    seed: Seed | None = None,
    random_bits: int = 31,
) -> tuple[Arguments, Tensor | None, Key | None]:
    """Validates the arguments of `quantize` and converts them to the arguments of `_quantize`."""
    check_dtype(x)
    check_name("rounding", rounding, ROUNDINGS)
    check_name("overflow", overflow, OVERFLOWS)
    check_between("random_bits", random_bits, 1, 31)
    limits = (overflow, x.dtype, scale is not None, random_bits, None, rounding)
    grid = _grid(get_format(format), *limits)
    return tuple(grid), _scale(x, scale), _key(rounding, seed, x.device)


def _grid(
    format: Format,
    overflow: str,
    dtype: torch.dtype,
    scaled: bool,
    random_bits: int,
    infinity: float | None,
    rounding: str,
) -> Grid:
    """The values of `format` that `dtype` can represent (with a scale, all), and overflow."""
    largest = format.max
    if not scaled and dtype in (torch.bfloat16, torch.float16):
        limits = torch.finfo(dtype)
        largest = min(format.max, limits.max)
        mantissa_bits = min(format.mantissa_bits, -int(math.log2(limits.eps)))
        step = 2.0 ** (math.frexp(largest)[1] - 1 - mantissa_bits)
        largest = math.floor(largest / step) * step
    beyond: float | None = largest
    if overflow != "saturate":
        beyond = format.nonfinite
    if beyond is None:
        raise ValueError(
            f"format {format.name!r} has neither Inf nor NaN for overflow='nonfinite'"
        )
    grid = Grid(
        mantissa_bits=format.mantissa_bits,
        min_exponent=format.min_exponent,
        largest=largest,
        beyond=beyond,
        negative_zero=format.negative_zero,
        random_bits=random_bits,
        infinity=infinity,
        truncates=rounding == "toward_zero",
    )
    return grid.in_dtype(dtype if dtype in LAYOUTS else torch.float32)


def _scale(x: Tensor, scale: float | Tensor | None) -> Tensor | None:
    if scale is None:
        return None
    dtype = torch.promote_types(x.dtype, torch.float32)
    if not isinstance(scale, Tensor):
        if not isinstance(scale, int | float):
            kind = type(scale).__name__
            raise TypeError(f"scale is a {kind}; give a number or a tensor")
        if not 0 < scale < math.inf:
            raise ValueError(f"scale is {scale}, not positive and finite")
        return torch.full((), scale, dtype=dtype, device=x.device)
    extra = x.ndim - scale.ndim
    sizes = zip(scale.shape, x.shape[extra:], strict=False)
    # Not `s in (1, n)`, as n may be symbolic.
    if extra < 0 or any(s != n for s, n in sizes if s != 1):
        raise ValueError(
            f"scale {tuple(scale.shape)} does not broadcast to x {tuple(x.shape)}"
        )
    scale = scale.detach().to(x.device, dtype)
    valid = (scale > 0) & (scale < torch.inf)
    if reads_values(scale):
        with suppress(RuntimeError):  # under vmap
            if bool(valid.all()):
                return scale
            wrong = float(scale[~valid][0])
            raise ValueError(f"scale has {wrong}, not positive and finite")
    return torch.where(valid, scale, torch.nan)


def _key(rounding: str, seed: Seed | None, device: torch.device) -> Key | None:
    if rounding == "stochastic":
        return drawn_key(device) if seed is None else random_key(seed)
    if seed is not None:
        raise ValueError(f"rounding={rounding!r} takes no seed; 'stochastic' does")
    return None


def _quantize(
    x: Tensor,
    grid: Arguments,
    scale: Tensor | None,
    key: Key | None,
) -> Tensor:
    """``x`` rounded, stochastically if there is a key."""
    x = x.resolve_neg()  # x.conj().imag holds -x
    compiles = torch.compiler.is_dynamo_compiling()
    return round_values(x, Grid(*grid), scale, None, key, at_once=compiles)


def round_values(
    x: Tensor,
    grid: Grid,
    scale: Tensor | None = None,
    inverse: Tensor | None = None,
    key: Key | None = None,
    *,
    start: int = 0,
    at_once: bool = False,
) -> Tensor:
    """``x / scale`` on a grid, times the scale. inverse: replaces the division. key: the key of
    stochastic rounding. start: the index of the first element. at_once: not in chunks, which in a
    graph would be a guard on the size."""
    usual = type(x) is Tensor or type(x) is torch.nn.Parameter
    # Larger than the cache, and with one scale.
    if (
        usual
        and not at_once
        and x.is_cpu
        and (scale is None or not scale.ndim)
        and x.numel() > CHUNK * torch.get_num_threads()
    ):
        return _in_chunks(x, grid, scale, inverse, key)
    y = x
    bits = None
    if x.dtype not in LAYOUTS:
        y = x.float()
    if inverse is not None:
        y = y * inverse
    elif scale is not None:
        y = divided(y, scale)
    if key is not None:
        bits = bits_from_key(x.shape, key, device=x.device, start=start)
        bits = fewer_bits(bits, grid.random_bits)
    y = round_to_grid(y, grid, bits)
    if scale is not None:
        y.mul_(scale)
    if x.dtype in LAYOUTS:
        return y
    return y.to(x.dtype)


def _in_chunks(
    x: Tensor,
    grid: Grid,
    scale: Tensor | None,
    inverse: Tensor | None,
    key: Key | None,
) -> Tensor:
    """`round_values` on chunks that stay in cache: at most a third of the time."""
    out = torch.empty_like(x)
    if key is not None and not x.is_contiguous():
        # Random bits are assigned by row-major index.
        return out.copy_(_in_chunks(x.contiguous(), grid, scale, inverse, key))
    if x.stride() != out.stride():
        x = x.clone()
    source, target = (t.as_strided((t.numel(),), (1,)) for t in (x, out))
    size = CHUNK * torch.get_num_threads()
    for start in range(0, x.numel(), size):
        part = source[start : start + size]
        y = round_values(part, grid, scale, inverse, key, start=start, at_once=True)
        target[start : start + size] = y
    return out
