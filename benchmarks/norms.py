"""What does a layer norm over channels cost, against copying its bytes?

python -m benchmarks.norms [small]
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import Row, compare, fix_allocator, report, write
from fp8.formats.format import dtype_name
from fp8.training.layer_norm2d import layer_norm2d

QUESTION = (
    "LayerNorm2d at ConvNeXt's shapes, relative to its floor: a copy of the input (read x, write y)"
    " forward; x + dy written to dx backward, once each; all of it out of the cache, as between the"
    " layers of a network"
)

TARGET = 1.5
"""Copies that the compiled forward pass may take."""

EPS = 1e-6

STAGES = ((96, 56, 56), (192, 28, 28), (384, 14, 14), (768, 7, 7))
"""Of ConvNeXt-T and -S, at 224 pixels."""

SHAPES = (*((64, *stage) for stage in STAGES), *((128, *stage) for stage in STAGES[2:]))
"""ConvNeXt's authors train with 128 images on a device, the larger models with 64. Of the last two
stages both: at 64 the call of compiled code is a good part of a copy."""

OUT_OF_CACHE = 1 << 27
"""Bytes of the inputs in turn, and as much of the outputs kept: several times the cache."""

SMALL = ((2, 16, 8, 8),)

SECONDS = 0.03
"""Calls in a row to be timed at once, for about as long: each has another input, out of the cache,
but not the code of its call, which a model's compiled graph has once for all its layers."""

NOTES = {
    "contiguous": "torch's compiler for CPUs goes over all images for the statistics and again to"
    " normalize them: a read, then a copy, with no arithmetic, is the least that this takes; by"
    " hand, an image at a time in the L2 cache, 1.5 to 1.8 copies (bfloat16 1.7) on one thread",
    "channels_last": "calling compiled code, as the compiled copy shows; per pixel sums across a"
    " vector, a root and a division wait for each other; bfloat16 is read and widened twice, and"
    " rounding to it takes about as long as the copy; by hand 1.0 to 1.2 copies (bfloat16 2.2) on"
    " one thread",
}
"""Where the time goes, where the target is missed. By hand: in AVX-512 intrinsics, at batch 64."""

LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
DTYPES = (torch.float32, torch.bfloat16)

Function = Callable[[Tensor, Tensor, Tensor], Tensor]


def permuted(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """timm's: the result is channels-last, whatever x was."""
    y = F.layer_norm(x.permute(0, 2, 3, 1), weight.shape, weight, bias, EPS)
    return y.permute(0, 3, 1, 2)


def group_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Another norm, over pixels too, in one kernel of torch."""
    return F.group_norm(x, 1, weight, bias, EPS)


FUNCTIONS: dict[str, Function] = {
    "ours": lambda x, weight, bias: layer_norm2d(x, weight, bias, EPS),
    "permute-norm-permute": permuted,
    "GroupNorm(1)": group_norm,
}


def compiled(functions: Mapping[str, Function]) -> dict[str, Function]:
    return {
        f"{name}, compiled": torch.compile(f, fullgraph=True, dynamic=False)
        for name, f in functions.items()
    }


def modes() -> dict[str, Function]:
    """The functions in eager mode, and but for GroupNorm compiled."""
    eager = {f"{name}, eager": f for name, f in FUNCTIONS.items()}
    return eager | compiled({n: f for n, f in FUNCTIONS.items() if n != "GroupNorm(1)"})


def floors() -> dict[str, Function]:
    """What bounds compiled code: a copy shows what calling it costs, whatever it does; a read of
    all images, then a copy of them, is the least that two loops over them take."""
    read_first = {"a read, then a copy": lambda x, *_: (x.sum(), x.clone())[1]}
    return read_first | compiled({"a copy": lambda x, *_: x.clone()})


def in_turn(x: Tensor) -> list[Tensor]:
    """As many tensors like ``x``, 2 to 16, as no cache holds at once."""
    count = OUT_OF_CACHE // (x.numel() * x.element_size())
    return [x.clone() for _ in range(min(16, max(2, count)))]


def keeping(
    calls: Sequence[Callable[[], object]], kept: deque[object]
) -> Callable[[], object]:
    """The calls in turn, each once; results stay in ``kept``, so that the next is in other memory,
    which the process has had before: no page is new."""
    turn = itertools.cycle(calls)
    return lambda: kept.append(next(turn)())


def forward(x: Tensor, weight: Tensor, bias: Tensor, rounds: int) -> list[Row]:
    inputs = in_turn(x)
    kept: deque[object] = deque(maxlen=len(inputs))

    def bound(function: Function) -> Callable[[], object]:
        def call(x: Tensor) -> object:
            with torch.no_grad():
                return function(x, weight, bias)

        return keeping([functools.partial(call, x) for x in inputs], kept)

    functions = modes() | floors()
    candidates = {name: bound(f) for name, f in functions.items()}
    copies = keeping([x.clone for x in inputs], kept)
    return compare(copies, candidates, rounds=rounds, seconds=SECONDS)


def backward(x: Tensor, weight: Tensor, bias: Tensor, rounds: int) -> list[Row]:
    pairs = list(zip(in_turn(x), in_turn(torch.randn_like(x)), strict=True))
    parameters = tuple(t.detach().clone().requires_grad_() for t in (weight, bias))
    kept: deque[object] = deque(maxlen=len(pairs))

    def bound(function: Function) -> Callable[[], object]:
        def call(x: Tensor, grad: Tensor) -> Callable[[], object]:
            leaves = (x.detach().requires_grad_(), *parameters)
            y = function(*leaves)
            return lambda: torch.autograd.grad(y, leaves, grad, retain_graph=True)

        return keeping([call(x, grad) for x, grad in pairs], kept)

    candidates = {name: bound(f) for name, f in modes().items()}
    sums = [functools.partial(torch.add, x, grad) for x, grad in pairs]
    return compare(keeping(sums, kept), candidates, rounds=rounds, seconds=SECONDS)


def measure(shapes: tuple[tuple[int, ...], ...], rounds: int) -> Iterator[Row]:
    """One row for each shape, layout, dtype, direction and function: bfloat16 for the first shape
    alone."""
    cases = [(shape, dtype) for shape in shapes for dtype in DTYPES]
    for shape, dtype in [
        case for case in cases if case[0] == shapes[0] or case[1] == DTYPES[0]
    ]:
        for layout, memory_format in LAYOUTS.items():
            torch.manual_seed(0)
            x = torch.randn(shape).to(dtype).contiguous(memory_format=memory_format)
            weight, bias = (torch.randn(shape[1]).to(dtype) for _ in range(2))
            for direction, run in (("forward", forward), ("backward", backward)):
                torch.compiler.reset()
                size, kind = "x".join(map(str, shape)), dtype_name(dtype)
                for row in run(x, weight, bias, rounds):
                    ours = (direction, row["name"]) == ("forward", "ours, compiled")
                    row["name"] += f", {direction}, {size} {kind} {layout}"
                    yield {**row, **(_verdict(row, layout) if ours else {})}


def _verdict(row: Row, layout: str) -> Row:
    met = row["ratio"] <= TARGET
    note = {} if met else {"where the time goes": NOTES[layout]}
    return {"target": TARGET, "met": met, **note}


if __name__ == "__main__":
    fix_allocator("benchmarks.norms")
    small = sys.argv[1:] == ["small"]
    rows: list[Row] = []
    for row in measure(SMALL, rounds=2) if small else measure(SHAPES, rounds=15):
        print(row, flush=True)
        rows.append(row)
        if not small:
            write("norms", QUESTION, rows)
    if not small:
        report("norms", QUESTION, rows)
