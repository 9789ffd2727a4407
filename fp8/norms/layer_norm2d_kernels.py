"""Triton kernels of `fp8.norms.layer_norm2d`: one pass forward, one backward.

A program processes tiles of all channels by some pixels. For contiguous inputs a tile lies within
an image; for channels-last inputs all pixels form one row. The backward pass accumulates its part
of the weight and bias gradients while it iterates over tiles, so input and gradient are read once.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..common.compiler import eager_only

__all__ = ["backward", "backward_kernel", "forward", "forward_kernel", "take"]

TILE = 4096
"""Elements of a tile with few channels. Not tuned: nothing here has run on a GPU."""

WIDTHS = (16, 64)
"""Pixels of a tile: the minimum if pixels are contiguous (a 32-byte sector of 16-bit numbers), and
the maximum."""

PER_WARP = 1024
"""Elements of a tile per warp: 32 float32 registers per thread for each array of the kernel."""

PROGRAMS = 4
"""Programs of the backward pass per multiprocessor."""

MAX_CHANNELS = 2048


@eager_only(False)
def take(x: Tensor) -> bool:
    """Whether eager code uses the kernels for ``x``: on CUDA, with Triton, dense, and with
    storage."""
    return x.is_cuda and x.dtype != torch.float64 and _fits(x) and _available()


def _fits(x: Tensor) -> bool:
    """Whether ``x`` is (batch, channels, ...), contiguous or channels-last, nonempty, and has
    storage, which tensors under torch.func do not have."""
    plain = type(x) in (Tensor, torch.nn.Parameter)
    if not plain or x.dim() < 2 or not x.numel() or x.shape[1] > MAX_CHANNELS:
        return False
    try:
        x.data_ptr()
    except RuntimeError:
        return False
    return x.is_contiguous() or x.movedim(1, -1).is_contiguous()


@functools.cache
def _available() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


class _Tiles(NamedTuple):
    """The tiling of a tensor: rows of ``pixels``, ``row`` elements apart. The offset of an element
    in its row is channel * ``channel`` + pixel * ``pixel``."""

    rows: int
    pixels: int
    row: int
    channel: int
    pixel: int
    channels: int
    padded: int
    width: int

    @property
    def per_row(self) -> int:
        """The number of tiles in a row."""
        return -(-self.pixels // self.width)

    @property
    def settings(self) -> dict[str, int]:
        """The compile-time parameters of a kernel."""
        warps = min(16, max(4, self.padded * self.width // PER_WARP))
        return {"C": self.channels, "PADDED": self.padded, "WIDTH": self.width, "num_warps": warps}


def _tiles(x: Tensor) -> _Tiles:
    """The tiling of a tensor that `_fits`."""
    batch, channels = x.shape[:2]
    pixels = math.prod(x.shape[2:])
    padded = 1 << (channels - 1).bit_length()
    width = min(WIDTHS[1], max(1, TILE // padded))
    if x.movedim(1, -1).is_contiguous():
        return _Tiles(1, batch * pixels, 0, 1, channels, channels, padded, width)
    width = max(WIDTHS[0], width)
    return _Tiles(batch, pixels, channels * pixels, pixels, 1, channels, padded, width)


@functools.cache
def forward_kernel() -> Any:
    """Arguments: (x, weight, bias, y, mean, rstd, eps, tiling)."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(  # type: ignore[no-untyped-def]
        x_at, w_at, b_at, y_at, mean_at, rstd_at, eps, rows, pixels, row, channel, pixel,
        C: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr,
        WEIGHT: tl.constexpr, BIAS: tl.constexpr,
    ):  # fmt: skip
        per_row = tl.cdiv(pixels, WIDTH)
        tile = tl.program_id(0)
        image = (tile // per_row).to(tl.int64)
        p = (tile % per_row) * WIDTH + tl.arange(0, WIDTH)
        c = tl.arange(0, PADDED)
        real = c < C
        mask = real[:, None] & (p < pixels)[None, :]
        at = image * row + c[:, None] * channel + p[None, :].to(tl.int64) * pixel
        x = tl.load(x_at + at, mask=mask, other=0.0).to(tl.float32)
        mean = tl.sum(x, axis=0) / C
        rest = tl.sum(tl.where(mask, x - mean[None, :], 0.0), axis=0) / C
        centred = tl.where(mask, x - mean[None, :] - rest[None, :], 0.0)
        rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / C + eps)
        y = centred * rstd[None, :]
        if WEIGHT:
            y *= tl.load(w_at + c, mask=real, other=0.0).to(tl.float32)[:, None]
        if BIAS:
            y += tl.load(b_at + c, mask=real, other=0.0).to(tl.float32)[:, None]
        tl.store(y_at + at, y.to(y_at.dtype.element_ty), mask=mask)
        tl.store(mean_at + image * pixels + p, mean + rest, mask=p < pixels)
        tl.store(rstd_at + image * pixels + p, rstd, mask=p < pixels)

    return kernel


@functools.cache
def backward_kernel() -> Any:
    """Arguments: (grad, x, weight, mean, rstd, dx, partial dweight and dbias, tiling)."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(  # type: ignore[no-untyped-def]
        g_at, x_at, w_at, mean_at, rstd_at, dx_at, dw_at, db_at, rows, pixels, row, channel, pixel,
        C: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr, WEIGHT: tl.constexpr,
    ):  # fmt: skip
        per_row = tl.cdiv(pixels, WIDTH)
        c = tl.arange(0, PADDED)
        real = c < C
        dw = tl.zeros((PADDED,), tl.float32)
        db = tl.zeros((PADDED,), tl.float32)
        if WEIGHT:
            w = tl.load(w_at + c, mask=real, other=0.0).to(tl.float32)
        for tile in range(tl.program_id(0), rows * per_row, tl.num_programs(0)):
            image = (tile // per_row).to(tl.int64)
            p = (tile % per_row) * WIDTH + tl.arange(0, WIDTH)
            mask = real[:, None] & (p < pixels)[None, :]
            at = image * row + c[:, None] * channel + p[None, :].to(tl.int64) * pixel
            g = tl.load(g_at + at, mask=mask, other=0.0).to(tl.float32)
            x = tl.load(x_at + at, mask=mask, other=0.0).to(tl.float32)
            mean = tl.load(mean_at + image * pixels + p, mask=p < pixels, other=0.0)
            rstd = tl.load(rstd_at + image * pixels + p, mask=p < pixels, other=0.0)
            normal = tl.where(mask, (x - mean[None, :]) * rstd[None, :], 0.0)
            dw += tl.sum(g * normal, axis=1)
            db += tl.sum(g, axis=1)
            if WEIGHT:
                g *= w[:, None]
            along = normal * (tl.sum(g * normal, axis=0) / C)[None, :]
            dx = (g - (tl.sum(g, axis=0) / C)[None, :] - along) * rstd[None, :]
            tl.store(dx_at + at, dx.to(dx_at.dtype.element_ty), mask=mask)
        tl.store(dw_at + tl.program_id(0) * C + c, dw, mask=real)
        tl.store(db_at + tl.program_id(0) * C + c, db, mask=real)

    return kernel


def forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(output, mean, 1/sqrt(var + eps)) of a tensor that `_fits`; the last two in float32."""
    cut = _tiles(x)
    y = torch.empty_like(x)
    mean, rstd = (_float32(x, len(x), 1, *x.shape[2:]) for _ in range(2))
    given = {"WEIGHT": weight is not None, "BIAS": bias is not None}
    with torch.cuda.device_of(x):
        forward_kernel()[(cut.rows * cut.per_row,)](
            x, _or(x, weight), _or(x, bias), y, mean, rstd, eps, *cut[:5], **cut.settings, **given
        )
    return y, mean, rstd


def backward(
    grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input (in its dtype), weight and bias (float32)."""
    cut = _tiles(x)
    dx = torch.empty_like(x)
    grad = grad if grad.stride() == x.stride() else torch.empty_like(x).copy_(grad)
    programs = min(cut.rows * cut.per_row, PROGRAMS * _multiprocessors(x.device))
    dw, db = (_float32(x, programs, cut.channels) for _ in range(2))
    with torch.cuda.device_of(x):
        backward_kernel()[(programs,)](
            grad, x, _or(x, weight), mean, rstd, dx, dw, db, *cut[:5], **cut.settings,
            WEIGHT=weight is not None,
        )  # fmt: skip
    return dx, dw.sum(0), db.sum(0)


def _float32(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _or(x: Tensor, parameter: Tensor | None) -> Tensor:
    """``parameter``, or without one a pointer that is not read."""
    return x if parameter is None else parameter.contiguous()


def _multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors of a CUDA device; 1 for other devices."""
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
