"""The stages of `benchmarks.gpu`: each a function of the device and of sizes that gives rows."""

from __future__ import annotations

import copy
import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fp8
from benchmarks.common import Row, compare
from benchmarks.forecast import PUBLISHED as LAYERS_AND_MODELS
from benchmarks.forecast import TORCHAO, Block, Readout
from fp8.common.step import Batch, call, tensors
from fp8.kernels.product import why_not_here
from fp8.kernels.selftest import why_not_compiled
from fp8.kernels.table import kernel_of, multiply, store
from fp8.lab.forecast.card import CARDS
from fp8.lab.hardware import BF16

DTYPE = torch.bfloat16
RECIPES = (
    "unit",
    "tensor",
    TORCHAO[0],
    "row",
    TORCHAO[1],
    "block",
    "row_gw_hp",
    TORCHAO[2],
    "static",
)
"""In the order in which they are measured."""

GRAPHS = 256
"""The most graphs of a function, which has one under each recipe."""

NANOCHAT = {"linear": "nanochat, MLP", "head": "nanochat, head"}
"""Case -> what the names of its rows in `benchmarks.forecast.PUBLISHED` begin with."""

PUBLISHED = {
    (case, recipe): milliseconds
    for case, prefix in NANOCHAT.items()
    for name, row in LAYERS_AND_MODELS.items()
    if name.startswith(prefix)
    for recipe, milliseconds in ((BF16, row.bf16), (row.recipe, row.low))
}
"""(case, recipe) -> published milliseconds."""


@dataclass(frozen=True)
class Sizes:
    """linear, head: tokens, inputs and outputs. block: batch, length, width, MLP and heads. layers,
    vocabulary: those of the model, which has 1.5B parameters. square: of the products whose rate is
    measured. rounds, seconds: of a comparison; each timing repeats a step for so long."""

    linear: tuple[int, int, int] = (65536, 1664, 6656)
    head: tuple[int, int, int] = (65536, 768, 32768)
    block: tuple[int, int, int, int, int] = (2, 2048, 2048, 5632, 16)
    layers: int = 26
    vocabulary: int = 32768
    square: int = 8192
    rounds: int = 20
    seconds: float = 0.03

    @staticmethod
    def small() -> Sizes:
        """Sizes that show that the stages run."""
        return Sizes(
            linear=(64, 32, 64),
            head=(64, 32, 64),
            block=(1, 16, 32, 64, 2),
            layers=2,
            vocabulary=64,
            square=64,
            rounds=2,
            seconds=0.0,
        )


class Case:
    """A model and its batch. The backward pass of an output that is no loss begins with a gradient
    of normal numbers."""

    def __init__(self, name: str, model: nn.Module, batch: Batch, device: str) -> None:
        self.name, self.device = name, device
        self.model = model.to(device, DTYPE)
        self.batch = batch
        self._grad: Tensor | None = None

    def step(self, model: nn.Module) -> None:
        """Forward and backward; it is not waited for."""
        output = call(model, self.batch)
        if output.dim():
            if self._grad is None:
                self._grad = torch.randn_like(output) / output.numel() ** 0.5
            output.backward(self._grad)
        else:
            output.backward()
        for tensor in (*model.parameters(), *tensors(self.batch)):
            tensor.grad = None

    def variant(self, recipe: str) -> nn.Module:
        """`converted`, and compiled."""
        model = self.converted(recipe)
        backend = "inductor" if self.device == "cuda" else "eager"
        for part in model.parts() if isinstance(model, Decoder) else [model]:
            part.compile(backend=backend, fullgraph=True, dynamic=False)
        return model

    def converted(self, recipe: str) -> nn.Module:
        """A copy under a recipe that shares the parameters."""
        shared = {id(x): x for x in (*self.model.parameters(), *self.model.buffers())}
        model = copy.deepcopy(self.model, shared)
        if recipe.startswith("torchao "):
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig.from_recipe_name(
                recipe.removeprefix("torchao ")
            )
            model = convert_to_float8_training(model, config=config)
        elif recipe != BF16:
            model = fp8.convert(model, recipe, backend="native")
        if recipe == "static":
            fp8.calibrate(model, self.batch)
        return model


class Decoder(nn.Module):
    """Tokens, (batch, length), to the mean cross entropy of the next ones."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        _, _, width, inner, heads = sizes.block
        self.tokens = nn.Embedding(sizes.vocabulary, width)
        self.blocks = nn.ModuleList(
            Block(width, inner, heads) for _ in range(sizes.layers)
        )
        self.readout = Readout(width, sizes.vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.readout(x, ids)

    def parts(self) -> list[nn.Module]:
        """What is compiled alone. Blocks share a graph."""
        return [*self.blocks, self.readout]


class Layer(nn.Module):
    """A linear layer alone: the compiler skips the code of torch's own modules."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def linear(sizes: tuple[int, int, int], needs_grad: bool) -> tuple[nn.Module, Tensor]:
    tokens, inputs, outputs = sizes
    x = torch.randn(tokens, inputs, dtype=DTYPE)
    return Layer(inputs, outputs).to(DTYPE), x.requires_grad_(needs_grad)


def block(sizes: Sizes) -> tuple[nn.Module, Tensor]:
    batch, length, width, inner, heads = sizes.block
    x = torch.randn(batch, length, width, dtype=DTYPE)
    return Block(width, inner, heads).to(DTYPE), x.requires_grad_()


def readout(sizes: Sizes) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    batch, length, width, *_ = sizes.block
    x = torch.randn(batch, length, width, dtype=DTYPE).requires_grad_()
    ids = torch.randint(sizes.vocabulary, (batch, length))
    return Readout(width, sizes.vocabulary).to(DTYPE), (x, ids)


def decoder(sizes: Sizes) -> tuple[nn.Module, Tensor]:
    return Decoder(sizes), torch.randint(sizes.vocabulary, sizes.block[:2])


MODELS: dict[str, Callable[[Sizes], tuple[nn.Module, Any]]] = {
    "linear": lambda sizes: linear(sizes.linear, False),
    "head": lambda sizes: linear(sizes.head, True),
    "block": block,
    "readout": readout,
    "model": decoder,
}
"""Case -> its model and batch."""


def recipes(theirs: bool) -> list[str]:
    """Ours of RECIPES, or torchao's, if that is installed. These run in another process: its
    conversion changes how inductor compiles for the whole process (torchao/float8/
    _inductor_patch.py), by which our kernels had 5 to 44 % more instructions."""
    if theirs and importlib.util.find_spec("torchao") is None:
        return []
    return [name for name in RECIPES if (name in TORCHAO) == theirs]


# The stages


def selftest(device: str, sizes: Sizes) -> Iterator[Row]:
    """For each recipe why it is simulated on the device; "" where kernels pass the self-test."""
    where = torch.device(device)
    for name, recipe in fp8.RECIPES.items():
        yield {"recipe": name, "eager": why_not_here(recipe, where, DTYPE)}
    yield {"recipe": "casts of compiled code", "compiled": why_not_compiled(str(where))}


def rates(device: str, sizes: Sizes) -> Iterator[Row]:
    """The fields of a `fp8.lab.hardware.Hardware`."""
    yield {"hardware": hardware_row(device, sizes.square)}


def measured(
    names: tuple[str, ...], theirs: bool, device: str, sizes: Sizes
) -> Iterator[Row]:
    """A row for each case and recipe, as soon as it is measured; of one that fails, the error."""
    if theirs and not recipes(theirs):
        return
    torch._dynamo.config.recompile_limit = GRAPHS
    for name in names:
        torch.manual_seed(0)
        with torch.device(device):
            case = Case(name, *MODELS[name](sizes), device)
        high = case.variant(BF16)
        case.step(high)  # compiled before torchao changes the compiler
        ours = [] if theirs else [BF16]
        for recipe in [*ours, *recipes(theirs)]:
            row: Row = {"case": name, "recipe": recipe}
            if (name, recipe) in PUBLISHED:
                row["published_ms"] = PUBLISHED[name, recipe]
            try:
                yield {**row, **against(case, high, recipe, sizes)}
            except Exception as error:  # of a kernel or of the compiler: a result
                yield {
                    **row,
                    "error": f"{type(error).__name__}: {error}".partition("\n")[0],
                }


def against(case: Case, high: nn.Module, recipe: str, sizes: Sizes) -> Row:
    """The figures of a recipe beside those of bf16; why it would be simulated."""
    if why := why_not(recipe, case.device):
        return {"error": why}
    return paired(case, high, high if recipe == BF16 else case.variant(recipe), sizes)


def why_not(recipe: str, device: str) -> str:
    """Why the device simulates a recipe; "" if it does not."""
    ours = recipe in fp8.RECIPES and recipe != BF16
    return (
        why_not_here(fp8.RECIPES[recipe], torch.device(device), DTYPE) if ours else ""
    )


def paired(case: Case, high: nn.Module, low: nn.Module, sizes: Sizes) -> Row:
    """The time of a step under a recipe and in bf16, in turns; on a GPU the same of replayed graphs
    ("gpu_..."), between whose kernels no launch of the host is waited for, the kernels that take
    most of the time, and the peak of the memory."""
    steps = [partial(case.step, model) for model in (high, low)]
    row = in_turns(*steps, case.device, sizes)
    if case.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        steps[1]()
        row["peak_GB"] = round(torch.cuda.max_memory_allocated() / 1e9, 2)
        try:
            row["kernels"] = longest_kernels(steps[1])
            replayed = in_turns(*map(captured, steps), case.device, sizes)
            row |= {f"gpu_{key}": value for key, value in replayed.items()}
        except Exception as error:  # what was measured before stays
            row["gpu_error"] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return row


def in_turns(
    high: Callable[[], object], low: Callable[[], object], device: str, sizes: Sizes
) -> Row:
    """The row of `compare` for two functions."""
    clock = clock_of(device)
    row = compare(
        high, {"": low}, rounds=sizes.rounds, seconds=sizes.seconds, clock=clock
    )[0]
    del row["name"]
    return row


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """The replay of a step, captured as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def longest_kernels(
    step: Callable[[], object], count: int = 8
) -> list[tuple[str, float]]:
    """The names of kernels of a step and their microseconds, the longest first."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    times = {
        e.key[:120]: float(e.self_device_time_total) for e in profiled.key_averages()
    }
    return sorted(times.items(), key=lambda item: -item[1])[:count]


def clock_of(device: str) -> Callable[[], float]:
    """A clock that waits for the device."""

    def clock() -> float:
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    return clock


def tests(device: str, sizes: Sizes) -> Iterator[Row]:
    """``pytest -m gpu``: for each file the counts, and the names of those that fail."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "-rf",
        "-p",
        "no:cacheprovider",
    ]
    files = [
        path
        for path in Path("tests").rglob("test_*.py")
        if "mark.gpu" in path.read_text()
    ]
    for file in sorted(files, key=lambda path: ("native" not in path.parts, path)):
        done = subprocess.run([*command, str(file)], stdout=subprocess.PIPE, text=True)
        counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)", done.stdout)
        failed = re.findall(r"^FAILED (\S+)", done.stdout, re.M)
        yield {
            "file": str(file),
            **{what: int(n) for n, what in counts},
            "names": failed,
        }


def forecast(name: str, theirs: bool, device: str, sizes: Sizes) -> Iterator[Row]:
    """What `fp8.forecast` says of a case; bf16 first, with our recipes."""
    if theirs and not recipes(theirs):
        return
    hardware = next((known for known in CARDS if known in device.lower()), "h100")
    with torch.device("meta"):
        model, batch = MODELS[name](sizes)
    result = fp8.forecast(model, batch, recipes=recipes(theirs), hardware=hardware)
    for variant in result.variants[theirs:]:
        yield {
            "case": name,
            "recipe": variant.recipe,
            "ms": round(1e3 * variant.seconds, 4),
            "ratio": round(result.ratio(variant.recipe), 3),
            "times_in_model": {"block": sizes.layers, "readout": 1}.get(name, 0),
            "kernels": variant.kernels,
            "source": result.source,
        }


CASES = ("linear", "head", "block", "readout")
FORECASTS = tuple(f"forecast {name}{of}" for of in ("", " torchao") for name in CASES)
MEASURED_CASES = {
    "nanochat": ("linear", "head"),
    "block": ("block",),
    "model": ("model",),
}

STAGES: dict[str, Callable[[str, Sizes], Iterator[Row]]] = {
    "selftest": selftest,
    "rates": rates,
    **{
        stage: partial(measured, names, False)
        for stage, names in MEASURED_CASES.items()
    },
    **{
        f"{stage} torchao": partial(measured, of, True)
        for stage, of in MEASURED_CASES.items()
    },
    "tests": tests,
    **{f: partial(forecast, f.split()[1], f.endswith(" torchao")) for f in FORECASTS},
}
"""Stage -> the function of the device and the sizes that gives its rows, in their order."""

MEASURED = {"fp8": "tensor", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}
"""Kind of matrix unit -> the recipe whose forward product measures it."""


def hardware_row(
    device: str,
    size: int,
    seconds: Callable[[Callable[[], object]], float] | None = None,
) -> Row:
    """The fields of a `fp8.lab.hardware.Hardware`: what products of ``size`` x ``size`` and
    copies reach, as peaks of which all is achieved."""
    seconds = seconds or partial(median_seconds, clock_of(device))
    torch.manual_seed(0)
    x = torch.randn(size, size, device=device, dtype=DTYPE)
    calls: dict[str, Callable[[], object]] = {"bf16": partial(torch.matmul, x, x.t())}
    for unit, name in MEASURED.items():
        recipe = fp8.RECIPES[name]
        if not why_not_here(recipe, x.device, DTYPE):
            a, b = (cast for cast in recipe.forward if cast is not None)
            kind, _ = kernel_of(a, b)
            calls[unit] = partial(multiply, kind, store(x, a), store(x, b), 1.0, DTYPE)
    peak = {unit: 2 * size**3 / seconds(call) for unit, call in calls.items()}
    moved = 2 * x.numel() * x.element_size()
    return {
        "name": "here",
        "device": torch.cuda.get_device_name(x.device) if x.is_cuda else device,
        "peak": peak,
        "bandwidth": moved / seconds(partial(torch.empty_like(x).copy_, x)),
        "source": f"benchmarks.gpu, torch {torch.__version__} ({date.today():%Y-%m})",
        "achieved": dict.fromkeys([*peak, "memory"], 1.0),
    }


def median_seconds(clock: Callable[[], float], function: Callable[[], object]) -> float:
    """The median time of a call, after three."""

    def timed() -> float:
        start = clock()
        function()
        return clock() - start

    for _ in range(3):
        timed()
    return median(timed() for _ in range(30))
