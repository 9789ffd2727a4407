"""What each row of OPS costs: forward and backward against the torch op that it stands for.

python -m benchmarks.rows [eager|compiled|small] [NAME ...]
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.common import Row, compare, fix_allocator, write
from benchmarks.ops import COMPILERS, leaf, step
from unit_scaling.rules.table import OPS, Op

QUESTION = (
    "What does a forward and backward pass of each op cost, relative to plain torch?"
)

#: Modules of rows that are products: their target in eager mode is 1.2, of all others 2.
PRODUCTS = ("products", "convolution", "attention")
COMPILED_TARGET = 1.03

WIDTH = 1024


#: torch compiles its own in bfloat16 alone.
NOT_COMPILED = {"grouped_mm"}


class Sizes(NamedTuple):
    """How many rows a matrix has, and how many images there are."""

    rows: int = 2048
    images: int = 8

    def times(self, n: int) -> Sizes:
        return Sizes(n * self.rows, n * self.images)


#: Name on the command line -> (mode, how many times the rows and images of what is no product).
#: "compiled" is of the size of a training batch; "small" shows what each call costs, whatever its
#: size, and what is in the caches.
MODES = {"eager": ("eager", 1), "compiled": ("compiled", 4), "small": ("compiled", 1)}

#: Rows that torch has no function for -> the plain formula.
PLAIN: dict[str, Callable[..., Tensor]] = {
    "silu_glu": lambda x, gate: x * F.silu(gate),
    "geglu": lambda x, gate: x * F.gelu(gate),
    "relu_squared": lambda x: F.relu(x).square(),
    "logsigmoid": F.logsigmoid,
    "linear_readout": F.linear,
}


def image(s: Sizes, *size: int) -> Tensor:
    return leaf(s.images, 64, *size)


def classes(s: Sizes) -> Tensor:
    return torch.randint(WIDTH, (s.rows,))


def kernel(dims: int) -> Tensor:
    return leaf(64, 64, *[3] * dims)


SIZES = {1: (4096,), 2: (64, 64), 3: (16, 16, 16)}

#: Row -> the arguments of the torch function; others take one matrix.
ARGUMENTS: dict[str, Callable[[Sizes], tuple[Any, ...]]] = {
    **dict.fromkeys(
        ["add", "sub", "mul", "div", "silu_glu", "geglu"],
        lambda s: (leaf(s.rows, WIDTH), leaf(s.rows, WIDTH)),
    ),
    **dict.fromkeys(
        ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"],
        lambda s: (leaf(s.rows, WIDTH), torch.randn(s.rows, WIDTH)),
    ),
    "softmax": lambda s: (leaf(s.rows, WIDTH), -1),
    "layer_norm": lambda s: (leaf(s.rows, WIDTH), (WIDTH,), leaf(WIDTH), leaf(WIDTH)),
    "rms_norm": lambda s: (leaf(s.rows, WIDTH), (WIDTH,), leaf(WIDTH), 1e-5),
    "group_norm": lambda s: (image(s, 64, 64), 8, leaf(64), leaf(64)),
    "batch_norm": lambda s: (image(s, 64, 64), None, None, leaf(64), leaf(64), True),
    "instance_norm": lambda s: (image(s, 64, 64), None, None, leaf(64), leaf(64)),
    "linear": lambda s: (leaf(s.rows, WIDTH), leaf(WIDTH, WIDTH)),
    "linear_readout": lambda s: (leaf(s.rows, WIDTH), leaf(WIDTH, WIDTH)),
    "matmul": lambda s: (leaf(8, 256, 256), leaf(8, 256, 256)),
    "addmm": lambda s: (leaf(WIDTH), leaf(s.rows, WIDTH), leaf(WIDTH, WIDTH)),
    "grouped_mm": lambda s: (leaf(8, 256, 256), leaf(8, 256, 256)),
    "einsum": lambda s: ("bij,bjk->bik", leaf(8, 256, 256), leaf(8, 256, 256)),
    **{f"conv{d}d": lambda s, d=d: (image(s, *SIZES[d]), kernel(d)) for d in SIZES},
    **{
        f"conv_transpose{d}d": lambda s, d=d: (image(s, *SIZES[d]), kernel(d))
        for d in SIZES
    },
    **{
        f"{how}_pool{d}d": lambda s, d=d: (image(s, *SIZES[d]), 2)
        for how in ("avg", "max")
        for d in SIZES
    },
    **{
        f"adaptive_{how}_pool{d}d": lambda s, d=d: (image(s, *SIZES[d]), 4)
        for how in ("avg", "max")
        for d in SIZES
    },
    **{f"dropout{d}d": lambda s, d=d: (image(s, *SIZES[d]), 0.5) for d in SIZES},
    "embedding": lambda s: (classes(s), leaf(WIDTH, WIDTH)),
    "scaled_dot_product_attention": lambda s: tuple(
        leaf(4, 8, 256, 64) for _ in range(3)
    ),
    "cross_entropy": lambda s: (leaf(s.rows, WIDTH), classes(s)),
    "nll_loss": lambda s: (leaf(s.rows, WIDTH), classes(s)),
    "binary_cross_entropy_with_logits": lambda s: (
        leaf(s.rows, WIDTH),
        torch.rand(s.rows, WIDTH),
    ),
    "binary_cross_entropy": lambda s: (
        torch.rand(s.rows, WIDTH).clamp(0.01, 0.99).requires_grad_(),
        torch.rand(s.rows, WIDTH),
    ),
    "kl_div": lambda s: (leaf(s.rows, WIDTH), torch.rand(s.rows, WIDTH)),
}

#: Compiled rows -> where the time goes, if it is more than the target.
NOTES = dict.fromkeys(
    ["matmul", "einsum"],
    "the factor is a pass over the output, and one over its gradient, where the op is alone; it "
    "fuses with what is around it",
)

CHECKS = (
    "whatever a compiled function has read is checked at each of its calls: alone, an op of a "
    "millisecond pays 0.01 to 0.02 ms for it, most of which the ops of a model share"
)

#: A difference of more milliseconds than this is not due to CHECKS.
MOST_FOR_CHECKS = 0.05

#: The column of compiled rows that tells what any factor costs, whoever multiplies by it.
HALVED = "torch's op times 0.5"

FACTOR = "the factor: torch's own op costs this, or nearly, when its output is halved"

PASSES = (
    "memory: eager, the factors of output and gradient are a pass each beside torch's kernels, "
    "which are one pass too; compiled they are in them"
)

#: Rows that are not timed -> why.
LEFT_OUT = {
    **dict.fromkeys(["cat", "stack"], "torch's own function, of a list"),
    "rotary": "torch has no such function; it has no factor either",
    **dict.fromkeys(
        [op.name for op in OPS.values() if op.fn.__module__.endswith("recurrent")],
        "a loop over the steps against one kernel: another question",
    ),
}


def functions(
    op: Op, args: tuple[Any, ...]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The torch function and the unit-scaled one, of the tensors among ``args`` alone.

    The arguments of the unit-scaled one are bound here: a compiled function checks at every call
    whatever it has read, and binding reads the tables of the op.
    """
    tensors = [i for i, value in enumerate(args) if isinstance(value, Tensor)]
    plain = PLAIN.get(op.name) or op.replaces[0]
    names = inspect.signature(op.fn).parameters
    bound = (
        dict(zip(names, args, strict=False)) if op.name in PLAIN else op.bind(args, {})
    )
    places = {id(args[i]): place for place, i in enumerate(tensors)}
    named = {
        name: places[id(value)] for name, value in bound.items() if id(value) in places
    }
    settings = {name: value for name, value in bound.items() if name not in named}

    def torch_op(*given: Tensor) -> Any:
        values = list(args)
        for i, tensor in zip(tensors, given, strict=True):
            values[i] = tensor
        return plain(*values)

    def scaled(*given: Tensor) -> Any:
        return op.fn(
            **settings, **{name: given[place] for name, place in named.items()}
        )

    return torch_op, scaled


def halved(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def times_half(*given: Tensor) -> Tensor:
        return fn(*given) * 0.5

    return times_half


def reason(mode: str, product: bool, row: Row) -> str:
    """Where the time of a row goes that misses its target, as far as it is known."""
    if mode != "compiled":
        return "" if product else PASSES
    if row["name"] in NOTES:
        return NOTES[row["name"]]
    if row["ratio"] <= COMPILED_TARGET * row[HALVED]:
        return FACTOR
    return CHECKS if row["ms"] - row["baseline_ms"] <= MOST_FOR_CHECKS else ""


def measure(mode: str, times: int, names: list[str]) -> Iterator[Row]:
    """The rows of these names, or all, in one mode of COMPILERS; those that are no products are
    ``times`` as large."""
    left_out = {*LEFT_OUT, *(NOT_COMPILED if mode == "compiled" else ())}
    for op in OPS.values():
        if op.name in left_out or (names and op.name not in names):
            continue
        torch.manual_seed(0)
        product = op.fn.__module__.rpartition(".")[2] in PRODUCTS
        sizes = Sizes() if product else Sizes().times(times)
        args = ARGUMENTS.get(op.name, lambda s: (leaf(s.rows, WIDTH),))(sizes)
        leaves = [value for value in args if isinstance(value, Tensor)]
        torch.compiler.reset()
        torch_op, scaled_op = functions(op, args)
        grad = torch.randn_like(torch_op(*leaves))
        fns = {"": torch_op, op.name: scaled_op}
        if mode == "compiled":
            fns[HALVED] = halved(torch_op)
        steps = {
            name: step(COMPILERS[mode](fn), *leaves, grad=grad)
            for name, fn in fns.items()
        }
        row, *others = compare(steps.pop(""), steps, rounds=30, seconds=0.01)
        row |= {other["name"]: other["ratio"] for other in others}
        target = COMPILED_TARGET if mode == "compiled" else 1.2 if product else 2.0
        row = {**row, "target": target, "met": row["ratio"] <= target}
        if not row["met"]:
            row["where the time goes"] = reason(mode, product, row)
        yield row


def main(names: list[str]) -> None:
    """Measures and writes results/rows_eager.json and the like, or the one named."""
    if unknown := set(names) - {*OPS, *MODES}:
        raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; {__doc__}")
    for name in [name for name in names if name in MODES] or MODES:
        mode, times = MODES[name]
        rows, images = Sizes().times(times)
        sizes = f"matrices of {rows} x {WIDTH}, {images} images"
        products = f" (products: {Sizes().rows}, {Sizes().images})" if times > 1 else ""
        question = f"{QUESTION} {mode.capitalize()}, {sizes}{products}."
        measured: list[Row] = []
        for row in measure(mode, times, [name for name in names if name not in MODES]):
            print(row, flush=True)
            write(f"rows_{name}", question, [*measured, row])
            measured.append(row)


if __name__ == "__main__":
    fix_allocator("benchmarks.rows")
    main(sys.argv[1:])
