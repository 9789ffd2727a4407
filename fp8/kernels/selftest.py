"""Self-test: does a kernel compute on a device what simulation computes?

The first product of a kind on a device multiplies two small matrices with scales that differ
between tiles. If the kernel raises or is wrong, products of that kind are simulated on the device,
and `fp8.report` and ``fp8 doctor`` give the reason. The first graph with one casts every bfloat16
number to e4m3 and e5m2, and transposes them, in each configuration of the kernels for four sizes.
If a byte is wrong, all products of compiled code are simulated on the device, with a warning:
Triton may store transposed bytes that were never computed, in some configurations (triton-lang/
triton issue 11111). On a CPU this takes 1 to 2 s of processor time in a process.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..casts.casting import QuantizedOperand, rounded
from ..casts.operands import casts_of
from ..common.compiler import compiled_as
from ..recipes.cast import Cast
from ..torch_internals.decorators import taken_as_constant
from ..torch_internals.flop_counter import SCALED, count_flops
from .kernel import Capability, assume
from .table import kernel_of, multiply, store, why_not_kernel

Pair = tuple[Cast | None, Cast | None]

_PRODUCTS = {
    "output": (-1, -1),
    "gradient of the input": (-1, -2),
    "gradient of the weight": (-2, -2),
}
"""Name -> the axes along which the two operands are multiplied."""

_TRUSTED = [False]
"""Whether all kernels count as right, without a test: see `trusted`."""

# Sizes that every layout pads, but for the number of outputs, a multiple of all.
_ROWS, _INNER, _OUTER = 130, 600, 256
_FACTOR = 0.5
#: The share of nonzero elements in a sample: sums have so few terms that they are nearly exact.
_SHARE = 1 / 8
#: The error of a term of a sum relative to the largest term: the FP8 products of Hopper align terms
#: to the largest and keep 14 bits (DeepSeek-V3, arXiv:2412.19437, section 3.3.2).
_BITS = 2.0**-13


@cache
def _kernels(
    compiled: bool, backend: str, casts: str, device: str, dtype: str
) -> tuple[str, ...]:
    """The kernels of the products; () if they are to be simulated. Warns, once, of a failed
    self-test and, for "native", of a missing kernel. casts: as in `Constants`; the others as in
    `why_not`."""
    which, pairs = "products", casts_of(casts).pairs
    why = why_not(pairs, device, dtype)
    if compiled and not why:
        which = "products of compiled code"
        why = why_not_compiled(device)
    if not why:
        # Before the first product, so that counters that are open see it.
        count_flops(SCALED)
        return tuple(kernel_of(*pair)[0] for pair in pairs)
    if backend == "native" or not _why_not_expected(pairs, device):
        message = f"{which} are simulated on {device}: {why}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
    return ()


@taken_as_constant
def _kernels_in_graph(*key: Any) -> tuple[str, ...]:
    return _kernels(True, *key)


kernels = compiled_as(_kernels_in_graph)(lambda *key: _kernels(False, *key))


@cache
def why_not(pairs: tuple[Pair, ...], device: str, dtype: str) -> str:
    """Why kernels do not compute these products on a device that has FP8 products; "" if they do,
    by the self-test. pairs: the casts of both operands of the output and of the two gradients.
    device, dtype: names of the device and of the results' dtype, like "cuda:0" and "bfloat16"."""
    why = _why_not_expected(pairs, device)
    if why or _TRUSTED[0]:
        return why
    for (name, axes), (a, b) in zip(_PRODUCTS.items(), pairs, strict=True):
        if a is None or b is None:  # both are, and torch computes the product
            continue
        why = _in_new_thread(_failure, _tested(a), _tested(b), axes, device, dtype)
        if why:
            return f"{name}: {why}"
    return ""


def _tested(cast: Cast) -> Cast:
    """The cast with what a kernel sees of it."""
    return replace(cast.unrotated.stateless, rounding="nearest")


@cache
def why_not_compiled(device: str) -> str:
    """Why casts in compiled code are wrong on a device; "" if they are right."""
    if _TRUSTED[0]:
        return ""
    return _in_new_thread(_compiled_failure, device)


def _in_new_thread(test: Callable[..., str], *args: Any) -> str:
    """``test(*args)`` without the caller's modes."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(test, *args).result()


_CASTS = [Cast(format=name) for name in ("e4m3", "e5m2")]


#: Of samples. Inductor tries 22 configurations for them, 10 different ones (torch 2.14, H100). The
#: code for a CPU has none: the first size suffices.
_SIZES = ((256, 1024), (4096, 64), (48, 5472), (1001, 333))


def _casts(x: Tensor) -> list[Tensor]:
    """``x`` and its transpose under each of _CASTS."""
    stored = []
    for spec in _CASTS:
        for axis in (-1, -2):
            operand = store(x, spec, axis)
            stored.append(operand.values.contiguous())
    return stored


def _compiled_failure(device: str) -> str:
    from ..torch_internals.inductor import in_each_configuration  # imports the compiler

    generator = torch.Generator().manual_seed(0)
    # Every bfloat16 number six times, which the largest sample needs.
    orders = [torch.randperm(1 << 16, generator=generator) for _ in range(6)]
    codes = torch.cat(orders) - (1 << 15)
    numbers = codes.to(torch.int16).view(torch.bfloat16)
    sizes = _SIZES[:1] if device == "cpu" else _SIZES
    for rows, columns in sizes:
        x = numbers[: rows * columns].view(rows, columns).to(device)
        try:
            for stored in in_each_configuration(_casts, x):
                why = _difference(stored, x)
                if why:
                    return why
        except Exception as error:
            return f"the compiler raised {_named(error)}"
    return ""


def _difference(stored: Sequence[Tensor], x: Tensor) -> str:
    """How the results of `_casts` for ``x`` differ from the simulation; "" if they do not."""
    cases = product(_CASTS, (False, True))
    for got, (spec, is_transposed) in zip(stored, cases, strict=True):
        want, _ = rounded(x, spec)
        what = "a cast"
        if is_transposed:
            want, what = want.T, "the transpose of a cast"
        wrong = _wrong(got, want)
        if wrong:
            return f"{what} to {spec.number_format} has {wrong} wrong bytes of {got.numel()}"
    return ""


def _wrong(got: Tensor, want: Tensor) -> int:
    """The number of wrong bytes of ``got``; where ``want`` is not finite, of finite ones."""
    expected = want.to(got.dtype).contiguous().view(torch.uint8)
    differs = got.view(torch.uint8) != expected
    wrong = torch.where(want.isfinite(), differs, got.float().isfinite())
    return int(wrong.sum())


def _named(error: Exception) -> str:
    """The class of an error and the first line of its message."""
    line, _, _ = str(error).partition("\n")
    return f"{type(error).__name__}: {line}"


def _why_not_expected(pairs: tuple[Pair, ...], device: str) -> str:
    """Why the table has no kernel of a product on a device; "" if it has all."""
    for pair in pairs:
        kind, why = kernel_of(*pair)
        why = why or why_not_kernel(kind, torch.device(device))
        if why:
            return why
    return ""


@cache
@torch.no_grad()
def _failure(
    a: Cast,
    b: Cast,
    axes: tuple[int, int],
    device: str,
    dtype: str,
) -> str:
    """How the kernel for these operands fails; "" if it passes."""
    kind, _ = kernel_of(a, b)
    wanted = getattr(torch, dtype)
    x = _sample(_ROWS, a, seed=0).to(device)
    y = _sample(_OUTER, b, seed=1).to(device)
    try:
        left = _operand(x, a, axes[0])
        right = _operand(y, b, axes[1])
        exact_x = rounded(x, a)[0].double()
        exact_y = rounded(y, b)[0].double()
        excess = 0.0
        for fast in (False, True):  # two kernels on Hopper
            got = multiply(kind, left, right, _FACTOR, wanted, fast)[:_ROWS]
            if got.dtype != wanted:
                return f"the kernel gives {got.dtype}, asked for {wanted}"
            excess = max(excess, _excess(got.double(), exact_x, exact_y))
    except Exception as error:  # any error means that the product is not available
        return f"the kernel raised {_named(error)}"
    if excess <= 1:
        return ""
    return f"the kernel is off by {excess:.2g} times what rounding explains"


def _operand(x: Tensor, cast: Cast, axis: int) -> QuantizedOperand:
    """``x``, to be multiplied along its rows, stored as an operand that is cast along ``axis``."""
    if axis != -1:
        x = x.T.contiguous()
    return store(x, cast, axis)


def _sample(rows: int, spec: Cast, seed: int) -> Tensor:
    """Values 0, 1 and -1 times a power of two per tile, which the cast does not change."""
    generator = torch.Generator().manual_seed(seed)
    across = spec.tile[0] or rows
    along = spec.tile[1] or _INNER
    tiles = (-(-rows // across), -(-_INNER // along))
    powers = 2.0 ** torch.randint(-2, 3, tiles, generator=generator)
    spread = powers.repeat_interleave(across, 0).repeat_interleave(along, 1)
    draw = torch.rand(rows, _INNER, generator=generator)
    positive = (draw < _SHARE / 2).float()
    negative = (draw > 1 - _SHARE / 2).float()
    signs = positive - negative
    return signs * spread[:rows, :_INNER]


def _excess(got: Tensor, a: Tensor, b: Tensor) -> float:
    """The largest error of ``got``, `_FACTOR` * a b^T, relative to the bound of rounding: n terms
    lose at most n * 2**-13 of the largest term. Scales and the result are rounded three times to
    float32 and once to a dtype of at least 8 bits, which is at most 2**-8 of the sum."""
    terms = (a != 0).double() @ (b != 0).double().T
    sums = _FACTOR * (a.abs() @ b.abs().T)
    allowed = sums * (terms * _BITS + 2.0**-8 + 2.0**-22)
    error = (got - _FACTOR * a @ b.T).abs()
    # A sum without a nonzero term is 0 of 0.
    excess = error / allowed.clamp(min=2.0**-40)
    return float(excess.nan_to_num(nan=torch.inf).amax())


@contextmanager
def trusted(capability: Capability | None = None) -> Iterator[None]:
    """Skips the self-test, for code that is compiled and not run: all kernels count as right.
    capability: that of every device, if nothing is multiplied; None: what they have."""
    try:
        _trust(True, capability)
        yield
    finally:
        _trust(False, None)


def _trust(trusts: bool, capability: Capability | None) -> None:
    """Sets `_TRUSTED`, and clears the verdicts that depend on it."""
    _TRUSTED[0] = trusts
    assume(capability)
    for verdicts in (_kernels, why_not, why_not_compiled):
        verdicts.cache_clear()
