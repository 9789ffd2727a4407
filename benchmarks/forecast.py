"""What a training step takes on an H100, from the compiler's code: `fp8.forecast`.

``python -m benchmarks.forecast [block] [published]`` needs a CUDA build of torch, and no GPU.
block: a Llama block under every recipe with kernels and torchao's. published: steps whose times
were published, beside the forecast. Minutes for each variant, on one core.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8
from benchmarks.common import Row, report, show
from fp8.lab.forecast.card import why_not
from fp8.lab.hardware import BF16

WIDTH, INNER, HEADS, BATCH, LENGTH = 2048, 5632, 16, 2, 2048
HARDWARE = "h100"

OURS = ("unit", "static", "tensor", "row", "row_gw_hp", "delayed", "block")
TORCHAO = ("torchao tensorwise", "torchao rowwise", "torchao rowwise_with_gw_hp")

QUESTION = f"""\
forward and backward pass of a bf16 model on an {HARDWARE}, by the roofline of what torch.compile
generates for it; nothing was measured. block: a Llama block, width {WIDTH}, MLP {INNER},
{BATCH * LENGTH} tokens. published: the ratio of a recipe's time to bf16's that others have measured
beside the forecast"""


class Block(nn.Module):
    """A pre-norm block: attention with causal mask, and a SwiGLU."""

    def __init__(self, width: int = WIDTH, inner: int = INNER, heads: int = HEADS) -> None:
        super().__init__()
        self.heads = heads

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (linear(width, width) for _ in range(4))
        self.gate, self.up = linear(width, inner), linear(width, inner)
        self.down = linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        heads = (*x.shape[:2], self.heads, -1)
        q, k, v = (layer(y).view(heads).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.o(y.reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Published(NamedTuple):
    """A published time of a linear layer, relative to bf16's. needs_grad: whether the input's
    gradient is computed."""

    tokens: int
    inputs: int
    outputs: int
    needs_grad: bool
    recipe: str
    ratio: float


PUBLISHED: dict[str, Published] = {
    # nanochat, dev/LOG.md (2026-02-02): H100, compiled, forward and backward; 4.79 ms in bf16, 606
    # TFLOP/s of two products.
    "nanochat, MLP, torchao tensorwise": Published(
        65536, 1664, 6656, False, "torchao tensorwise", 4.06 / 4.79
    ),
    "nanochat, MLP, torchao rowwise": Published(
        65536, 1664, 6656, False, "torchao rowwise", 4.55 / 4.79
    ),
    # The same page (2026-01-13): the head of d12, 32768 words; 16.95 ms in bf16. Its number of
    # tokens is not published: with 65536 it is 584 TFLOP/s of three products.
    "nanochat, head, dynamic": Published(65536, 768, 32768, True, "tensor", 12.25 / 16.95),
    "nanochat, head, static": Published(65536, 768, 32768, True, "static", 10.31 / 16.95),
}


def block_rows() -> Iterator[Row]:
    with torch.device("meta"):
        model = Block().to(torch.bfloat16)
        x = torch.empty(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    recipes = (*OURS, *TORCHAO)
    result = fp8.forecast(model, x, recipes=recipes, hardware=HARDWARE, layers=False)
    for v in result.variants:
        yield {
            "case": "block",
            "recipe": v.recipe,
            "kernels": v.kernels,
            "fp8": v.fp8,
            "high": v.high,
            "MB_moved": round(v.moved / 1e6),
            "MB_saved": round(v.saved / 1e6),
            "us": round(1e6 * v.seconds),
            "ratio": round(result.ratio(v.recipe), 3),
            "ratio_at_peak": round(v.peak / result[BF16].peak, 3),
        }


def published_rows() -> Iterator[Row]:
    for name, case in PUBLISHED.items():
        with torch.device("meta"):
            model = nn.Linear(case.inputs, case.outputs, bias=False).to(torch.bfloat16)
            x = torch.empty(case.tokens, case.inputs, dtype=torch.bfloat16)
        x.requires_grad_(case.needs_grad)
        result = fp8.forecast(model, x, recipes=[case.recipe], hardware=HARDWARE, layers=False)
        ratio = result.ratio(case.recipe)
        yield {
            "case": name,
            "recipe": case.recipe,
            "bf16_ms": round(1e3 * result[BF16].seconds, 2),
            "ratio": round(ratio, 3),
            "published": round(case.ratio, 3),
            "off": round(abs(ratio / case.ratio - 1), 3),
        }


PARTS = {"block": block_rows, "published": published_rows}


def main(parts: list[str]) -> None:
    if reason := why_not():
        print(f"forecast: left out: {reason}")
        return
    rows = [row for part in parts for row in PARTS[part]()]
    known = [row["off"] for row in rows if "off" in row]
    if known:
        rows.append({"case": "median of published", "off": median(known)})
    write = report if parts == list(PARTS) else show
    write("forecast", QUESTION, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    main(parser.parse_args().parts or list(PARTS))
