"""A tensor into a low-precision format: `quantize` and its two straight-through autograd
functions."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..common.compiler import apply, own
from ..common.validation import check_name
from .format import Format, dtype_name, get_format
from .random_bits import Key, Seed, bits_from_key, fewer_bits, random_key
from .rounding import LAYOUTS, ROUNDINGS, Grid, round_to_grid

OVERFLOWS = ("saturate", "nonfinite")

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""What can be quantized. The 16-bit types are computed in float32 and the others in themselves: one
rounding."""

CHUNK = 1 << 17
"""Elements per thread and step in eager mode on a CPU: an input, an output and a scratch chunk (1.5
MiB a thread) stay in cache between the half dozen passes. Measured in benchmarks/quantize.py."""


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
    """scale * (x / scale rounded to a value of `format`), with the shape, dtype and memory format
    of `x`.

    x: float32, bfloat16, float16 or float64, any shape and strides. Each is rounded once, from its
    exact value.
    format: a name in `FORMATS` or a `Format`.
    rounding: "nearest" (ties to even); "toward_zero"; "stochastic": to one of the two neighbours,
    so that the expected value is x.
    overflow: "saturate": what is beyond the largest value, Inf included, becomes the largest value
    of its sign. "nonfinite": it becomes Inf where the format has Inf, else NaN. As in IEEE 754 what
    decides is the rounded value, so that toward zero only Inf is beyond.
    scale: the size of one unit of the format: a positive float or a tensor of positive values that
    broadcasts to `x`. Division and product are in float32 (float64 for float64); exact for powers
    of two. In a tensor that is not on a CPU, and in compiled code, what is not positive and finite
    makes the result NaN instead of raising an error.
    seed: for "stochastic", an int, a 0-dim int64 tensor or a sequence of these such as (seed, step,
    stream). The same seed gives the same result in eager and compiled code and on every device;
    element i in row-major order has the same random bits whatever the strides. None draws a seed
    from torch's default generator: repeatable under torch.manual_seed, but then differently in
    eager and compiled code.
    random_bits: for "stochastic", how many random bits decide, 1 to 31 (hardware has few: the
    chance of rounding up is then a multiple of 2**-random_bits).

    NaN stays NaN, also in formats without NaN. -0 stays -0 and negative values round to -0, except
    in formats without -0. In an unsigned format (e8m0) zero becomes the smallest value and negative
    numbers NaN.

    The result is a value of the format that x's dtype can hold: without a scale, the largest value
    that both have is where overflow begins (65280 for format "fp16" in a bfloat16 tensor, and for
    "bf16" in a float16 tensor).

    No gradient flows through: see `quantize_forward` and `quantize_backward`.

    Raises TypeError for what is not a dense tensor of these dtypes, and ValueError for unknown
    names, overflow="nonfinite" with a format that has neither Inf nor NaN, a scale that is not
    positive or does not broadcast to `x`, and a seed without stochastic rounding.
    """
    grid, scale = _check(x, format, rounding, overflow, scale, random_bits)
    return _quantize(x.detach(), grid, rounding, scale, _key(rounding, seed, x.device))


def quantize_operand(
    x: Tensor,
    format: Format,
    *,
    rounding: str,
    overflow: str,
    random_bits: int,
    scale: Tensor | None = None,
    inverse: Tensor | None = None,
) -> Tensor:
    """`quantize` as the casts of products use it: what is not finite stays so, whatever the format.

    Under overflow="saturate" finite values saturate, and +-Inf becomes +-Inf where the format has
    it and NaN elsewhere. So a check of the results, such as GradScaler's, finds what was not finite
    in an operand. scale: one that a rule has found, which is not checked; where it is NaN, so is
    the result. inverse: what x is multiplied by instead of being divided by the scale.
    """
    infinity = (format.nonfinite or math.nan) if overflow == "saturate" else None
    scaled = scale is not None
    grid, _ = _check(x, format, rounding, overflow, None, random_bits, scaled, infinity)
    return _quantize(x.detach(), grid, rounding, scale, _key(rounding, None, x.device), inverse)


def quantize_forward(
    x: Tensor,
    format: str | Format,
    *,
    rounding: str = "nearest",
    overflow: str = "saturate",
    scale: float | Tensor | None = None,
    seed: Seed | None = None,
    random_bits: int = 31,
) -> Tensor:
    """`quantize(x, ...)` whose gradient passes to x unchanged (straight-through), saturated or not.

    Arguments and errors are those of `quantize`. The scale gets no gradient.
    """
    grid, scale = _check(x, format, rounding, overflow, scale, random_bits)
    return apply(_Forward, x, scale, _key(rounding, seed, x.device), rounding, tuple(grid))


def quantize_backward(
    x: Tensor,
    format: str | Format,
    *,
    rounding: str = "nearest",
    overflow: str = "saturate",
    scale: float | Tensor | None = None,
    seed: Seed | None = None,
    random_bits: int = 31,
) -> Tensor:
    """x itself, whose gradient is quantized: grad_x = quantize(grad, ...).

    Arguments and errors are those of `quantize`; a seed that is not given is drawn now, not in the
    backward pass. The scale gets no gradient. The gradient of the gradient passes unchanged.
    """
    grid, scale = _check(x, format, rounding, overflow, scale, random_bits)
    return apply(_Backward, x, scale, _key(rounding, seed, x.device), rounding, tuple(grid))


class _Forward(torch.autograd.Function):
    """Its arguments are tensors, strings and numbers: what may cross compilation.

    The grid is one plain tuple. With *args, torch 2.13 compiled a tensor argument to a wrong place.
    """

    @staticmethod
    def forward(
        x: Tensor, scale: Tensor | None, key: Key | None, rounding: str, grid: tuple[Any, ...]
    ) -> Tensor:
        return own(_quantize(x, Grid(*grid), rounding, scale, key))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad, None, None, None, None


class _Backward(torch.autograd.Function):
    """Arguments as for _Forward. The tensors among them are saved, the rest is on the context."""

    @staticmethod
    def forward(
        x: Tensor, scale: Tensor | None, key: Key | None, rounding: str, grid: tuple[Any, ...]
    ) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, scale, key, ctx.rounding, ctx.grid = inputs
        # Tensors alone: compiled, saved_tensors leaves out None.
        ctx.save_for_backward(*(value for value in (scale, key) if isinstance(value, Tensor)))
        ctx.scaled, ctx.keyed = scale is not None, isinstance(key, Tensor)
        ctx.key = None if ctx.keyed else key

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scale = ctx.saved_tensors[0] if ctx.scaled else None
        key = ctx.saved_tensors[-1] if ctx.keyed else ctx.key
        if torch.compiler.is_compiling():
            # A compiled backward pass is not differentiated again.
            out = _quantize(grad, Grid(*ctx.grid), ctx.rounding, scale, key)
        else:
            out = apply(_Forward, grad, scale, key, ctx.rounding, ctx.grid)
        return out, None, None, None, None


def check_dtype(x: Tensor) -> None:
    """Raises TypeError for what cannot be quantized."""
    if not isinstance(x, Tensor):
        raise TypeError(f"cannot quantize a {type(x).__name__}; give a tensor")
    if x.dtype not in DTYPES:
        allowed = ", ".join(map(dtype_name, DTYPES))
        raise TypeError(f"cannot quantize {x.dtype}; allowed are {allowed}")
    refuse_nested(x)
    if not torch.compiler.is_compiling() and x.layout != torch.strided:
        raise TypeError(f"cannot quantize a tensor of layout {x.layout}; give x.to_dense()")


def is_dense(x: object) -> bool:
    """Whether it is a tensor that casts are for: floating point, with all of its elements."""
    return isinstance(x, Tensor) and x.is_floating_point() and x.layout == torch.strided


def refuse_nested(x: Tensor) -> None:
    """Raises NotImplementedError for a nested tensor: the operator @ hides a TypeError."""
    if not torch.compiler.is_compiling() and x.is_nested:
        raise NotImplementedError(
            "a nested tensor cannot be quantized; give a padded one, or its values()"
        )


def _check(
    x: Tensor,
    format: str | Format,
    rounding: str,
    overflow: str,
    scale: float | Tensor | None,
    random_bits: int,
    scaled: bool = False,
    infinity: float | None = None,
) -> tuple[Grid, Tensor | None]:
    """The arguments of `quantize`, validated, as the numbers that the arithmetic needs.

    scaled: whether there is a scale that is not to be validated. infinity: as in `Grid`.
    """
    check_dtype(x)
    check_name("rounding", rounding, ROUNDINGS)
    check_name("overflow", overflow, OVERFLOWS)
    if not 1 <= random_bits <= 31:
        raise ValueError(f"random_bits must be 1 to 31, got {random_bits}")
    scaled = scaled or scale is not None
    grid = _grid(get_format(format), overflow, x.dtype, scaled, random_bits, infinity)
    return grid, _scale(x, scale)


def _grid(
    format: Format,
    overflow: str,
    dtype: torch.dtype,
    scaled: bool,
    random_bits: int,
    infinity: float | None,
) -> Grid:
    """The values of `format` that `dtype` can hold (all of them under a scale), and where overflow
    goes."""
    largest, smallest = format.max, 0.0 if format.signed else format.min_subnormal
    if not scaled and dtype in (torch.bfloat16, torch.float16):
        limits = torch.finfo(dtype)
        if largest > limits.max or format.mantissa_bits > -math.log2(limits.eps):
            largest = _largest_of_both(format, limits)
        smallest = smallest and max(smallest, limits.smallest_normal * limits.eps)
    beyond: float | None = largest if overflow == "saturate" else format.nonfinite
    if beyond is None:
        raise ValueError(
            f"format {format.name!r} has neither Inf nor NaN for overflow='nonfinite'; "
            "use overflow='saturate'"
        )
    return Grid(
        format.mantissa_bits,
        format.min_exponent,
        largest,
        beyond,
        format.negative_zero,
        smallest,
        random_bits,
        infinity,
    )


def _largest_of_both(format: Format, limits: torch.finfo) -> float:
    """The largest number that is a value of the format and of the dtype with these limits."""
    largest = min(format.max, limits.max)
    mantissa_bits = min(format.mantissa_bits, -int(math.log2(limits.eps)))
    step = 2.0 ** (math.frexp(largest)[1] - 1 - mantissa_bits)
    return math.floor(largest / step) * step


def _scale(x: Tensor, scale: float | Tensor | None) -> Tensor | None:
    """The scale as a tensor on x's device, in the dtype the arithmetic is done in."""
    if scale is None:
        return None
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    if not isinstance(scale, Tensor):
        if not isinstance(scale, int | float):
            raise TypeError(f"scale is a {type(scale).__name__}; give a number or a tensor")
        if not 0 < scale < math.inf:
            raise ValueError(f"scale is {scale}, not positive and finite")
        return torch.full((), scale, dtype=dtype, device=x.device)
    extra = x.dim() - scale.dim()
    sizes = zip(scale.shape, x.shape[extra:], strict=False)
    if extra < 0 or any(s != n for s, n in sizes if s != 1):  # not s in (1, n), of a symbolic n
        raise ValueError(
            f"scale of shape {tuple(scale.shape)} does not broadcast to x of shape {tuple(x.shape)}"
        )
    return _positive(scale.detach().to(x.device, dtype))


def _positive(scale: Tensor) -> Tensor:
    """``scale``; raises ValueError where it is not positive and finite. NaN takes the place of what
    is not where that cannot be known now: in a graph, under vmap, on a device to be waited for."""
    valid = (scale > 0) & (scale < torch.inf)
    if not torch.compiler.is_compiling() and scale.device.type == "cpu":
        try:
            if bool(valid.all()):
                return scale
        except RuntimeError:  # under vmap
            return torch.where(valid, scale, torch.nan)
        raise ValueError(f"scale has {float(scale[~valid][0])}, not positive and finite")
    return torch.where(valid, scale, torch.nan)


def _key(rounding: str, seed: Seed | None, device: torch.device) -> Key | None:
    """The key of the random bits, or None where none are needed."""
    if rounding != "stochastic":
        if seed is not None:
            raise ValueError(
                f"a seed is given with rounding={rounding!r}; only 'stochastic' uses one"
            )
        return None
    if seed is not None:
        return random_key(seed)
    if torch.compiler.is_compiling():
        return random_key(torch.randint(2**63 - 1, (), device=device))
    return random_key(int(torch.randint(2**63 - 1, ())))


def _quantize(
    x: Tensor,
    grid: Grid,
    rounding: str,
    scale: Tensor | None,
    key: Key | None,
    inverse: Tensor | None = None,
) -> Tensor:
    x = x.resolve_neg()  # the bits of a view such as x.conj().imag are those of -x
    if torch.compiler.is_compiling() or not _is_plain(x) or (scale is not None and scale.dim()):
        return _whole(x, grid, rounding, scale, key, inverse)
    size = CHUNK * torch.get_num_threads()
    if x.numel() <= size:
        return _whole(x, grid, rounding, scale, key)
    return _in_chunks(x, grid, rounding, scale, key, size)


def _is_plain(x: Tensor) -> bool:
    """Whether `x` can be worked through piece by piece: in main memory, and no subclass that means
    more."""
    return x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter)


def _whole(
    x: Tensor,
    grid: Grid,
    rounding: str,
    scale: Tensor | None,
    key: Key | None,
    inverse: Tensor | None = None,
    *,
    start: int = 0,
    out: Tensor | None = None,
    scratch: Tensor | None = None,
) -> Tensor:
    """All of `x` at once: what a compiler fuses, and what a chunk is put through."""
    y = x if x.dtype in LAYOUTS else x.float()
    if scale is not None:
        y = y / scale if inverse is None else y * inverse
    bits = None if key is None else bits_from_key(x.shape, key, device=x.device, start=start)
    if bits is not None:
        bits = fewer_bits(bits, grid.random_bits)
    y = round_to_grid(y, grid, rounding, bits=bits, out=out, scratch=scratch)
    if scale is not None:
        y.mul_(scale)
    return y if x.dtype in LAYOUTS else y.to(x.dtype)


def _in_chunks(
    x: Tensor, grid: Grid, rounding: str, scale: Tensor | None, key: Key | None, size: int
) -> Tensor:
    """`_whole` on pieces that stay in cache, with reused scratch: a third of the time or less."""
    out = torch.empty_like(x)
    if key is not None and not x.is_contiguous():
        # Random bits go by row-major index.
        return out.copy_(_in_chunks(x.contiguous(), grid, rounding, scale, key, size))
    if x.stride() != out.stride():
        x = x.clone()
    source, target = (t.as_strided((t.numel(),), (1,)) for t in (x, out))
    layout = LAYOUTS.get(x.dtype)
    scratch = None if layout is None else torch.empty(size, dtype=layout.integer)
    for start in range(0, x.numel(), size):
        piece, to = source[start : start + size], target[start : start + size]
        if layout is None:
            to.copy_(_whole(piece, grid, rounding, scale, key, start=start))
        else:
            assert scratch is not None
            _whole(
                piece,
                grid,
                rounding,
                scale,
                key,
                start=start,
                out=to,
                scratch=scratch[: len(piece)],
            )
    return out
