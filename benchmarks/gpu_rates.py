"""What a GPU sustains: products, copies and launches.

A card that is idle multiplies faster than one that has computed for a second, which reaches its
limit of power: rates are measured after a second of the same load, and while it goes on.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from datetime import date
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import fp8
from benchmarks.common import Row
from benchmarks.gpu_cases import DTYPE, Sizes
from fp8.casts.casting import QuantizedOperand
from fp8.common.step import described
from fp8.kernels.product import why_not_here
from fp8.kernels.table import kernel_of, multiply, store
from fp8.lab.hardware import BF16
from fp8.torch_internals import inductor

Call = Callable[[], object]

RECIPES = {"tensor": "fp8", "row": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
"""Recipe whose products are measured -> the kind of matrix unit that computes them."""

PASSES = ("forward", "grad_input")
"""Products of a recipe: with and without fast accumulation."""

LENGTHS = (4, 20)
"""Kernels of two chains, whose difference tells what a launch takes."""


class Load(NamedTuple):
    """A call that is repeated without a wait in between.

    cold, warm: seconds of a call, by itself on a card that was idle and under sustained load.
    state: the clock and the power under that load, where NVML tells them.
    """

    cold: float
    warm: float
    state: Row


def sustained(call: Call, device: str, seconds: float) -> Load:
    """The time of a call after so many seconds of load, and for as long."""
    timed(call, 3, device)
    time.sleep(seconds / 4)
    cold = timed(call, 8, device) / 8
    count = max(1, int(seconds / cold))
    late = time.perf_counter() + 0.8 * seconds
    for _ in range(count):
        call()
    time.sleep(max(0.0, late - time.perf_counter()))  # the calls go on
    state = state_of(device)
    return Load(cold, timed(call, count, device) / count, state)


def timed(call: Call, count: int, device: str) -> float:
    """Seconds of so many calls."""
    wait(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    wait(device)
    return time.perf_counter() - start


def rounded(rate: float) -> float:
    return float(f"{rate:.4g}")


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def state_of(device: str) -> Row:
    """The clock of the multiprocessors and the power of the card; {} without NVML."""
    if device != "cuda":
        return {}
    try:
        clock, milliwatts = torch.cuda.clock_rate(), torch.cuda.power_draw()
    except Exception:  # of NVML: absent, or refused by a virtual machine
        return {}
    return {"MHz": clock, "W": round(milliwatts / 1e3)}


# Products and copies


def rates(device: str, sizes: Sizes) -> Iterator[Row]:
    """Rows of products and copies, and the fields of a `fp8.lab.hardware.Hardware`: rates of
    squares and copies, of which all is achieved; "host" has the fields of its `Host`."""
    torch.manual_seed(0)
    tokens, inputs, outputs = sizes.head
    shapes = {
        "square": (sizes.square,) * 3,
        "layer": sizes.linear,
        "head": sizes.head,
        "head, gradient of the input": (tokens, outputs, inputs),
    }
    best: dict[tuple[str, str], float] = {}
    for shape, size in shapes.items():
        seconds = sizes.load if shape == "square" else sizes.load / 4
        for row in products(shape, size, device, seconds):
            yield row
            key = shape, RECIPES.get(row["recipe"], BF16)
            best[key] = max(best.get(key, 0.0), 1e12 * row.get("TFLOPS", 0.0))
    copy = copies(device, sizes)
    yield copy
    host = launches(device)
    yield {"host": host}
    peak = {unit: rate for (shape, unit), rate in best.items() if shape == "square"}
    achieved = dict.fromkeys([*peak, "memory"], 1.0)
    if peak.get("fp8") and ("head", "fp8") in best:
        narrow = min(1.0, best["head", "fp8"] / peak["fp8"])
        achieved["fp8, narrow"] = round(narrow, 3)
    yield {
        "hardware": {
            "name": "here",
            "device": torch.cuda.get_device_name() if device == "cuda" else device,
            "peak": peak,
            "bandwidth": 1e12 * copy["TBps"],
            "source": f"benchmarks.gpu, torch {torch.__version__} ({date.today():%Y-%m})",
            "achieved": achieved,
            "host": host,
        }
    }


def products(
    shape: str, size: tuple[int, int, int], device: str, seconds: float
) -> Iterator[Row]:
    """Products of rows, inner size and columns: in bfloat16, and by the kernels of RECIPES that the
    device has."""
    names = [BF16]
    where = torch.device(device)
    names += [n for n in RECIPES if not why_not_here(fp8.RECIPES[n], where, DTYPE)]
    for name, of in itertools.product(names, PASSES):
        row: Row = {"shape": shape, "recipe": name, "product": of}
        if name == BF16 and of != PASSES[0]:
            continue  # the same
        try:
            load = sustained(product(size, name, of, device), device, seconds)
            flops = 2e-12 * math.prod(size)
            row["TFLOPS_cold"] = rounded(flops / load.cold)
            row["TFLOPS"] = rounded(flops / load.warm)
            yield row | load.state
        except Exception as error:  # of a kernel or of the memory: a result
            yield row | {"error": described(error)}


def product(size: tuple[int, int, int], name: str, of: str, device: str) -> Call:
    """A product of normal numbers, cast as one of PASSES under a recipe."""
    rows, inner, columns = size
    x = torch.randn(rows, inner, device=device, dtype=DTYPE)
    w = torch.randn(columns, inner, device=device, dtype=DTYPE)
    if name == BF16:
        return partial(torch.mm, x, w.t())
    recipe = fp8.RECIPES[name]
    a, b = getattr(recipe, of)
    kind, _ = kernel_of(a, b)
    fast = of in recipe.fast_sums
    return partial(multiply, kind, store(x, a), store(w, b), 1.0, DTYPE, fast)


def copies(device: str, sizes: Sizes) -> Row:
    """Copies of 4 GB, or of a fourth of the memory that is free."""
    count = sizes.copied
    if device == "cuda":
        count = min(count, torch.cuda.mem_get_info()[0] // 4)
    x = torch.empty(count, device=device, dtype=torch.uint8)
    load = sustained(partial(torch.empty_like(x).copy_, x), device, sizes.load)
    moved = 2e-12 * count
    return {
        "copy_GB": round(count / 1e9, 2),
        "TBps_cold": rounded(moved / load.cold),
        "TBps": rounded(moved / load.warm),
        **load.state,
    }


# Launches


def launches(device: str) -> dict[str, float]:
    """The fields of a `fp8.lab.hardware.Host`: seconds of the host for a compiled graph, and for
    each launch of a Triton kernel, of a product in bfloat16, and what one in FP8 takes more."""

    def slope(make: Callable[[int, str], Call]) -> tuple[float, float]:
        few, many = (seconds_of(make(n, device), device) for n in LENGTHS)
        each = (many - few) / (LENGTHS[1] - LENGTHS[0])
        return each, few - LENGTHS[0] * each

    both, rest = slope(chain)
    library, _ = slope(partial(multiplied, in_fp8=False))
    in_fp8 = library
    if not why_not_here(fp8.RECIPES["tensor"], torch.device(device), DTYPE):
        in_fp8, _ = slope(partial(multiplied, in_fp8=True))
    seconds = {
        "graph": max(0.0, rest / 2),  # of the forward and of the backward pass
        "triton": both / 2,
        "library": library,
        "python": max(0.0, in_fp8 - library),
    }
    return {name: float(f"{value:.3g}") for name, value in seconds.items()}


def seconds_of(step: Call, device: str) -> float:
    """The time of a step whose kernels take less time than their launches."""
    timed(step, 50, device)
    return min(timed(step, 50, device) for _ in range(5)) / 50


def chain(length: int, device: str) -> Call:
    """A compiled forward and backward pass with so many Triton kernels in each: reductions over
    rows and over columns in turns, which inductor cannot fuse."""

    def forward(x: Tensor) -> Tensor:
        for i in range(length):
            x = x + x.sum(i % 2, keepdim=True) / 64
        return x

    backend = "inductor" if device == "cuda" else "eager"
    function = torch.compile(forward, backend=backend, fullgraph=True, dynamic=False)
    x = torch.ones(64, 64, device=device, dtype=DTYPE, requires_grad=True)
    grad = torch.ones_like(x)

    def step() -> None:
        function(x).backward(grad)
        x.grad = None

    return step


def multiplied(length: int, device: str, in_fp8: bool) -> Call:
    """So many compiled products of 64 x 64 in bfloat16, or by the kernel of the recipe "tensor"."""
    casts = fp8.RECIPES["tensor"].forward if in_fp8 else (None, None)
    kind, _ = kernel_of(*casts)
    x = torch.randn(64, 64, device=device, dtype=DTYPE)
    left, right = store(x, casts[0]), store(x.repeat(length, 1), casts[1])

    def forward(x: Tensor, w: Tensor, *scales: Tensor) -> list[Tensor]:
        a, b = (partial(QuantizedOperand, scale=scale) for scale in scales)
        return [multiply(kind, a(x), b(y), 1.0, DTYPE, True) for y in w.split(64)]

    tensors = left.values, right.values, left.scale, right.scale
    if device != "cuda":
        return partial(forward, *tensors)
    return partial(inductor.compiled(forward, *tensors), *tensors)
