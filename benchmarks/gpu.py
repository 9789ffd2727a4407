"""What FP8 gains where it runs: products, an MLP and a transformer layer on a GPU.

python -m benchmarks.gpu [--device cuda] [--small] [case ...] [hardware]

One run compares bfloat16 with the recipes here, natively, and with torchao's where that is
installed, each compiled: forward and backward, the median over rounds in which all take turns.
"delayed" leaves the attention of the transformer layer in bfloat16: its history is of one product.
A recipe whose kernels the device does not have, or that fail their proof there, is a row that says
so: simulation is not timed. "--device cpu --small" only shows that the script runs; it is not
compiled to code, and nothing is written.

"hardware" measures the rates of products and of memory, and writes them to
results/gpu_hardware.json as the fields of a `fp8.lab.hardware.Hardware`:
`Hardware(**json.load(file)["rows"][0])` is a row for `fp8.lab.hardware.estimate`.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import time
from collections.abc import Callable, Iterable
from datetime import date
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

import fp8
from benchmarks.common import Row, compare, fix_allocator, report, show
from fp8.casts.casting import lowered
from fp8.native.kernels import kernel_of, multiply, store
from fp8.native.product import why_not_here

QUESTION = "what does a step of a bf16 layer cost under an FP8 recipe on a GPU, relative to bf16?"

WIDTHS, TOKENS = (1024, 2048, 4096, 8192), (4096, 8192, 16384, 32768)
SMALL = ((128,), (128,))
OURS = ("unit", "tensor", "row", "delayed", "block", "mxfp8", "nvfp4")
TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
CONTEXT, HEAD = 1024, 64
DTYPE = torch.bfloat16
TARGET = (4096, 16384, 1 / 1.5)
"""Width, tokens, and what "unit" may cost there, in steps of bf16."""


def linear(width: int) -> nn.Module:
    return nn.Linear(width, width, bias=False)


def mlp(width: int) -> nn.Module:
    up, down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
    return nn.Sequential(up, nn.GELU(), down)


def layer(width: int) -> nn.Module:
    options: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True}
    return nn.TransformerEncoderLayer(width, width // HEAD, 4 * width, **options)


CASES: dict[str, Callable[[int], nn.Module]] = {"linear": linear, "mlp": mlp, "layer": layer}


def as_torchao(model: nn.Module, recipe: str) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(model, config=config)


def variants(model: nn.Module, names: Iterable[str] = OURS) -> dict[str, nn.Module]:
    """Name -> the model under it; "bf16" is the model itself."""
    found = {"bf16": model}
    found |= {name: fp8.convert(copy.deepcopy(model), name, backend="native") for name in names}
    if importlib.util.find_spec("torchao"):
        found |= {f"torchao {name}": as_torchao(copy.deepcopy(model), name) for name in TORCHAO}
    return found


def step(model: nn.Module, x: torch.Tensor) -> Callable[[], None]:
    """Forward and backward, waited for."""
    run = torch.compile(model, backend="inductor" if x.device.type == "cuda" else "eager")

    def call() -> None:
        run(x).sum().backward()
        model.zero_grad(set_to_none=True)
        if x.device.type == "cuda":
            torch.cuda.synchronize()

    return call


def measure(case: str, width: int, tokens: int, device: str, rounds: int) -> list[Row]:
    """One row for each variant of a case at one size; of one that fails, the error."""
    torch.compiler.reset()
    torch.manual_seed(0)
    model = CASES[case](width).to(device, DTYPE)
    context = min(CONTEXT, tokens)
    x = torch.randn(tokens // context, context, width, device=device, dtype=DTYPE)
    x.requires_grad_()
    where = {"case": case, "width": width, "tokens": tokens}
    why = {name: why_not_here(fp8.RECIPES[name], x.device, DTYPE) for name in OURS}
    failed = [{**where, "name": name, "error": why[name]} for name in OURS if why[name]]
    steps = {}
    for name, variant in variants(model, [n for n in OURS if not why[n]]).items():
        call = step(variant, x)
        try:
            call()
        except Exception as error:  # a kernel that refuses is a result
            failed.append({**where, "name": name, "error": str(error).partition("\n")[0]})
            continue
        steps[name] = call
    rows = compare(steps.pop("bf16"), steps, rounds=rounds)
    return [{**where, **row, **_target(row, width, tokens)} for row in rows] + failed


def _target(row: Row, width: int, tokens: int) -> Row:
    if (row["name"], width, tokens) != ("unit", *TARGET[:2]):
        return {}
    return {"target": round(TARGET[2], 3), "met": row["ratio"] <= TARGET[2]}


MEASURED = {"fp8": "tensor", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
"""Kind of matrix unit -> the recipe whose forward product measures it."""

ASKED = (*CASES, "hardware")

RATES = "which rates do matrix products and copies reach on this device?"


def seconds(call: Callable[[], object], rounds: int = 30) -> float:
    """The median time of a call, waited for."""

    def timed() -> float:
        start = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(3):
        timed()
    return median(timed() for _ in range(rounds))


def hardware_row(
    device: str, size: int, seconds: Callable[[Callable[[], object]], float] = seconds
) -> Row:
    """The fields of a `fp8.lab.hardware.Hardware`: what products of ``size`` x ``size`` and
    copies reach, as peaks of which all is achieved."""
    torch.manual_seed(0)
    x = torch.randn(size, size, device=device, dtype=DTYPE)
    calls: dict[str, Callable[[], object]] = {"bf16": partial(torch.matmul, x, x.t())}
    for unit, name in MEASURED.items():
        recipe = fp8.RECIPES[name]
        if not why_not_here(recipe, x.device, DTYPE):
            a, b = (lowered(cast) for cast in recipe.forward if cast is not None)
            kind, _ = kernel_of(a, b)
            calls[unit] = partial(multiply, kind, store(x, a), store(x, b), 1.0, DTYPE)
    peak = {unit: 2 * size**3 / seconds(call) for unit, call in calls.items()}
    moved = 2 * x.numel() * x.element_size()
    if x.is_cuda:
        memory = torch.cuda.get_device_properties(x.device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "name": "here",
        "device": torch.cuda.get_device_name(x.device) if x.is_cuda else device,
        "peak": peak,
        "bandwidth": moved / seconds(partial(torch.empty_like(x).copy_, x)),
        "memory": memory,
        "source": f"benchmarks.gpu, torch {torch.__version__}",
        "date": date.today().strftime("%Y-%m"),
        "achieved": dict.fromkeys([*peak, "memory"], 1.0),
    }


def main(arguments: list[str] | None = None) -> None:
    """Measures what the arguments ask for and writes results/gpu.json and gpu_hardware.json; with
    --small, or on another device, it prints only."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="one small size, to try the script")
    parser.add_argument("cases", nargs="*", default=[], help=f"of {', '.join(ASKED)}")
    given = parser.parse_args(arguments)
    unknown = [case for case in given.cases if case not in ASKED]
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}; choose one of {', '.join(ASKED)}")
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device; --device cpu --small shows that the script runs")
    widths, tokens = SMALL if given.small else (WIDTHS, TOKENS)
    cases = given.cases or ASKED
    rows = [
        row
        for case in cases
        if case in CASES
        for width in widths
        for count in tokens
        for row in measure(case, width, count, given.device, 3 if given.small else 30)
    ]
    device = torch.cuda.get_device_name() if given.device == "cuda" else given.device
    rows = [{"device": device, **row} for row in rows]
    finish = report if device != given.device and not given.small else show
    if "hardware" in cases:
        finish("gpu_hardware", RATES, [hardware_row(given.device, 2 * widths[-1])])
    if rows:
        finish("gpu", QUESTION, rows)


if __name__ == "__main__":
    fix_allocator("benchmarks.gpu")
    main()
