"""What unit scaling costs: forward and backward of each op against the torch op it replaces.

    python -m benchmarks.ops [--quick] [--no-compile] [--out benchmarks/results/ops.json]

Ratios are of medians, the two sides timed in turn within one run, with a bootstrap interval over
pairs. Restarts itself with a fixed allocator, because glibc's mmap threshold moves elementwise
timings by up to 2x.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
import unit_scaling.functional as U

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "1073741824", "MALLOC_TRIM_THRESHOLD_": "1073741824"}

Step = Callable[[], object]


class PlainLayer(nn.Module):
    """The layer `uu.TransformerLayer` is, in plain torch: pre-norm, gated MLP, no biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.mhsa_norm = nn.RMSNorm(width, eps=1e-5, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-5, elementwise_affine=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.gate = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.mhsa_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (t.transpose(-3, -2) for t in qkv.unbind(-3))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(attended.transpose(-3, -2).flatten(-2))
        y = self.mlp_norm(x)
        return x + self.down(self.up(y) * F.silu(self.gate(y)))


def step(fn: Callable[..., Tensor], *inputs: Tensor, params: tuple[Tensor, ...] = ()) -> Step:
    """Forward and backward of ``fn(*inputs)``; gradients are freed, not accumulated."""
    leaves = [*inputs, *params]
    grad = torch.randn_like(fn(*inputs))

    def run() -> None:
        fn(*inputs).backward(grad)
        for leaf in leaves:
            leaf.grad = None

    return run


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape).requires_grad_()


def linear_case(inner: int, compiled: Callable) -> tuple[Step, Step]:
    x, w = leaf(2048, inner), leaf(1024, inner)
    return step(compiled(F.linear), x, w), step(compiled(U.linear), x, w)


def gelu_case(compiled: Callable) -> tuple[Step, Step]:
    x = leaf(4096, 1024)
    return step(compiled(F.gelu), x), step(compiled(U.gelu), x)


def layer_norm_case(compiled: Callable) -> tuple[Step, Step]:
    x, w, b = leaf(4096, 1024), leaf(1024), leaf(1024)
    plain = compiled(lambda x, w, b: F.layer_norm(x, (1024,), w, b))
    return step(plain, x, w, b), step(
        compiled(lambda x, w, b: U.layer_norm(x, (1024,), w, b)), x, w, b
    )


def layer_case(width: int, compiled: Callable) -> tuple[Step, Step]:
    x = leaf(8, 128, width)
    heads = width // 64
    plain = PlainLayer(width, heads)
    scaled = uu.TransformerLayer(width, heads, 0.5, 0.5, is_causal=True)
    return tuple(  # type: ignore[return-value]
        step(compiled(m), x, params=tuple(m.parameters())) for m in (plain, scaled)
    )


#: Name -> (the two steps for a given torch.compile or identity, target eager, target compiled).
CASES: dict[str, tuple[Callable[[Callable], tuple[Step, Step]], float, float]] = {
    "linear, inner size 1024": (lambda c: linear_case(1024, c), 1.03, 1.03),
    "linear, inner size 128": (lambda c: linear_case(128, c), 1.2, 1.03),
    "gelu": (gelu_case, 1.3, 1.03),
    "layer_norm": (layer_norm_case, 1.05, 1.03),
    "TransformerLayer, 512 wide": (lambda c: layer_case(512, c), 1.05, 1.03),
    "TransformerLayer, 128 wide": (lambda c: layer_case(128, c), 1.1, 1.03),
}


def timed(run: Step) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def compare(plain: Step, scaled: Step, seconds: float) -> dict[str, float]:
    """Median times and their ratio, with a 95 % bootstrap interval over the pairs."""
    for _ in range(3):
        plain(), scaled()
    pairs: list[tuple[float, float]] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(pairs) < 10:
        first, second = timed(plain), timed(scaled)
        pairs.append((first, second))
        second, first = timed(scaled), timed(plain)  # the other order: neither side is always first
        pairs.append((first, second))
    draw = random.Random(0)
    ratios = sorted(
        statistics.median(b for _, b in sample) / statistics.median(a for a, _ in sample)
        for sample in (draw.choices(pairs, k=len(pairs)) for _ in range(500))
    )
    plain_ms, scaled_ms = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
    return {
        "plain_ms": plain_ms,
        "scaled_ms": scaled_ms,
        "ratio": scaled_ms / plain_ms,
        "low": ratios[12],
        "high": ratios[487],
        "pairs": len(pairs),
    }


def measure(seconds: float, modes: list[str]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    print(f"{'case':28} {'mode':9} {'plain ms':>9} {'ours ms':>9} {'ratio':>6} {'95 %':>15} target")
    for mode in modes:
        for name, (make, eager, compiled) in CASES.items():
            torch.manual_seed(0)
            torch.compiler.reset()
            plain, scaled = make(torch.compile if mode == "compiled" else lambda fn: fn)
            target = compiled if mode == "compiled" else eager
            row = compare(plain, scaled, seconds)
            rows.append({"case": name, "mode": mode, "target": target, **row})
            interval = f"{row['low']:.3f} to {row['high']:.3f}"
            print(
                f"{name:28} {mode:9} {row['plain_ms']:9.3f} {row['scaled_ms']:9.3f} "
                f"{row['ratio']:6.3f} {interval:>15} {target}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one second a case instead of five")
    parser.add_argument("--no-compile", action="store_true", help="eager only")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    if any(os.environ.get(k) != v for k, v in ALLOCATOR.items()):
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.ops", *sys.argv[1:]],
            os.environ | ALLOCATOR,
        )
    torch.set_num_threads(args.threads)
    rows = measure(
        1.0 if args.quick else 5.0, ["eager"] if args.no_compile else ["eager", "compiled"]
    )
    if args.out:
        machine = {
            "machine": platform.processor() or platform.machine(),
            "torch": torch.__version__,
        }
        header = {**machine, "threads": args.threads, "allocator": ALLOCATOR}
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({**header, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
