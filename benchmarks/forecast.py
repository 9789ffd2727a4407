"""What a training step takes on an H200, from the compiler's code: `fp8.forecast`.

``python -m benchmarks.forecast [cases] [model] [combined] [published]`` needs a CUDA build of
torch, and no GPU. cases: the layer, the head and the Llama block of `benchmarks.gpu` under every
recipe with kernels and torchao's, beside what was measured. model: the memory of its model.
combined: the block with torch.compile's option "combo_kernels". published: steps whose times were
published, on an H100. A row is printed when it is known: half a minute for each, on one core.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8
from benchmarks.common import RESULTS, Row, report, show
from fp8.common.step import Batch
from fp8.lab.forecast.card import why_not
from fp8.lab.hardware import BF16

WIDTH, INNER, HEADS, BATCH, LENGTH = 2048, 5632, 16, 2, 2048
HARDWARE, PUBLISHED_ON = "h200", "h100"

OURS = (
    "unit",
    "static",
    "tensor",
    "row",
    "tensor_gw_hp",
    "static_gw_hp",
    "row_gw_hp",
    "delayed",
    "block",
)
TORCHAO = ("torchao tensorwise", "torchao rowwise", "torchao rowwise_with_gw_hp")

QUESTION = f"""\
forward and backward pass of a bf16 model on an {HARDWARE}, from the code that torch.compile makes
for it; nothing was measured. linear, head: layers of nanochat. block: a Llama block, width {WIDTH},
MLP {INNER}, {BATCH * LENGTH} tokens. us: of the kernels; ratio: of the larger of us and host_us;
ratio_graphs: under CUDA graphs. measured: by benchmarks.gpu, of older code under torch 2.11.
published: on an {PUBLISHED_ON}, the ratio of a recipe's time to bf16's that others have measured
beside the forecast"""


class Block(nn.Module):
    """A pre-norm block: attention with causal mask, and a SwiGLU. shared: the number of query heads
    that share a key and a value."""

    def __init__(
        self,
        width: int = WIDTH,
        inner: int = INNER,
        heads: int = HEADS,
        shared: int = 1,
    ) -> None:
        super().__init__()
        self.head_width, self.shared = width // heads, shared

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = linear(width, width), linear(width, width)
        self.k, self.v = linear(width, width // shared), linear(width, width // shared)
        self.gate, self.up = linear(width, inner), linear(width, inner)
        self.down = linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        heads = (*x.shape[:2], -1, self.head_width)
        q, k, v = (
            layer(y).view(heads).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=self.shared > 1
        )
        x = x + self.o(y.transpose(1, 2).reshape(x.shape))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Readout(nn.Module):
    """Norm, head and loss."""

    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__()
        self.norm, self.head = (
            nn.RMSNorm(width),
            nn.Linear(width, vocabulary, bias=False),
        )

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        logits = self.head(self.norm(x))[:, :-1].float()
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Part(NamedTuple):
    """A part of a model. times: how often the model has it. cast: whether recipes apply to it."""

    model: nn.Module
    batch: Batch
    times: int = 1
    cast: bool = True


class Linear(NamedTuple):
    """A linear layer. needs_grad: whether the input's gradient is computed."""

    tokens: int
    inputs: int
    outputs: int
    needs_grad: bool

    def parts(self) -> list[Part]:
        layer = nn.Linear(self.inputs, self.outputs, bias=False, dtype=torch.bfloat16)
        x = torch.empty(self.tokens, self.inputs, dtype=torch.bfloat16)
        return [Part(layer, x.requires_grad_(self.needs_grad))]


class Decoder(NamedTuple):
    """Blocks, and a head in bf16, without rotary embeddings and biases. shared: as in `Block`."""

    layers: int
    width: int
    inner: int
    heads: int
    shared: int
    vocabulary: int

    def parts(self, batch: int, length: int) -> list[Part]:
        block = Block(self.width, self.inner, self.heads, self.shared).to(
            torch.bfloat16
        )
        readout = Readout(self.width, self.vocabulary).to(torch.bfloat16)
        x = torch.empty(
            batch, length, self.width, dtype=torch.bfloat16, requires_grad=True
        )
        ids = torch.empty(batch, length, dtype=torch.int64)
        return [Part(block, x, self.layers), Part(readout, (x, ids), cast=False)]


MLP, HEAD = Linear(65536, 1664, 6656, False), Linear(65536, 768, 32768, True)
LLAMA_8B = Decoder(32, 4096, 14336, 32, 4, 128256)
QWEN = {
    "0.5B": Decoder(24, 896, 4864, 14, 7, 151936),
    "1.5B": Decoder(28, 1536, 8960, 12, 6, 151936),
    "3B": Decoder(36, 2048, 11008, 16, 8, 151936),
}
"""Qwen2.5's configurations."""


class Published(NamedTuple):
    """Published times of a step, in milliseconds, in bf16 and under a recipe."""

    parts: Callable[[], list[Part]]
    recipe: str
    bf16: float
    low: float


PUBLISHED: dict[str, Published] = {
    # nanochat, dev/LOG.md (2026-02-02): H100, compiled, forward and backward; 606 TFLOP/s of two
    # products.
    "nanochat, MLP, torchao tensorwise": Published(
        MLP.parts, "torchao tensorwise", 4.79, 4.06
    ),
    "nanochat, MLP, torchao rowwise": Published(
        MLP.parts, "torchao rowwise", 4.79, 4.55
    ),
    # The same page (2026-01-13): the head of d12, 32768 words. Its number of tokens is not
    # published: with 65536 it is 584 TFLOP/s of three products in bf16.
    "nanochat, head, dynamic": Published(HEAD.parts, "tensor", 16.95, 12.25),
    "nanochat, head, static": Published(HEAD.parts, "static", 16.95, 10.31),
    # torchao, float8/README.md (torchao 0.10): torchtitan on 8 H100, medians of tokens per second
    # and GPU, with the optimizer, FSDP's communication (tensorwise: weights in FP8) and selective
    # checkpointing. torchtitan leaves the head in bf16.
    "torchtitan, Llama 3 8B, torchao tensorwise": Published(
        partial(LLAMA_8B.parts, 1, 8192),
        "torchao tensorwise",
        8192e3 / 6150,
        8192e3 / 7689.5,
    ),
    "torchtitan, Llama 3 8B, torchao rowwise": Published(
        partial(LLAMA_8B.parts, 1, 8192),
        "torchao rowwise",
        8192e3 / 6150,
        8192e3 / 6768,
    ),
    # torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: the same at a limit of 500 W and with
    # a memory of 2.4 TB/s.
    "torchtitan, Llama 3.1 8B, batch 2, torchao tensorwise": Published(
        partial(LLAMA_8B.parts, 2, 8192),
        "torchao tensorwise",
        16384e3 / 6667,
        16384e3 / 8532,
    ),
    # llmq, benchmarks/H100x1.md (2026-05): a step of 16 or 32 batches on one H100, its last logged,
    # with the optimizer; C++, dynamic scales for tensors, head in bf16.
    "llmq, Qwen2.5 0.5B": Published(
        partial(QWEN["0.5B"].parts, 32, 1024), "tensor", 3508 / 16, 3185 / 16
    ),
    "llmq, Qwen2.5 1.5B": Published(
        partial(QWEN["1.5B"].parts, 32, 1024), "tensor", 8930 / 16, 7204 / 16
    ),
    "llmq, Qwen2.5 3B": Published(
        partial(QWEN["3B"].parts, 16, 1024), "tensor", 16935 / 32, 12954 / 32
    ),
}


CASES: dict[str, Callable[[], Part]] = {
    "linear": lambda: MLP.parts()[0],
    "head": lambda: HEAD.parts()[0],
    "block": lambda: Part(
        Block().to(torch.bfloat16),
        torch.empty(BATCH, LENGTH, WIDTH, dtype=torch.bfloat16, requires_grad=True),
    ),
}
"""The cases of `benchmarks.gpu`, by its names."""


def measured(field: str) -> dict[tuple[str, str], float]:
    """(case, recipe) -> "ratio", to bf16's time, or "peak_GB" in the last results of
    `benchmarks.gpu`."""
    rows = json.loads((RESULTS / "gpu.json").read_text())["rows"]
    timed = (row for row in rows if "rounds" in row and field in row)
    return {(row["case"], row["recipe"]): row[field] for row in timed}


def case_rows(
    theirs: bool,
    cases: Sequence[str] = tuple(CASES),
    options: Mapping[str, bool] | None = None,
) -> Iterator[Row]:
    known, peaks, name = measured("ratio"), measured("peak_GB"), "{}"
    if options:
        known, peaks, name = {}, {}, "{}, " + ", ".join(options)
    for case in cases:
        with torch.device("meta"):
            part = CASES[case]()
        recipes = TORCHAO if theirs else OURS
        result = fp8.forecast(
            part.model,
            part.batch,
            recipes=recipes,
            hardware=HARDWARE,
            options=options,
            progress=lambda v: print(v.recipe, f"{v.seconds:.3g} s", flush=True),
        )
        high = result.variants[0]
        for v in result.variants[theirs:]:
            row = {
                "case": name.format(case),
                "recipe": v.recipe,
                "kernels": v.kernels,
                "fp8": v.fp8,
                "high": v.high,
                "MB_moved": round(v.moved / 1e6),
                "MB_saved": round(v.saved / 1e6),
                "peak_GB": round(v.compiled / 1e9, 2),
                "us": round(1e6 * v.card),
                "host_us": round(1e6 * v.host),
                "ratio": round(result.ratio(v.recipe), 3),
                "ratio_graphs": round(v.card / high.card, 3),
                "ratio_at_peak": round(v.peak / high.peak, 3),
            }
            if (case, v.recipe) in known:
                row["measured"] = known[case, v.recipe]
                row["measured_GB"] = peaks[case, v.recipe]
            yield row


def model_rows(theirs: bool) -> Iterator[Row]:
    """The peaks of `benchmarks.gpu`'s model: where the backward pass begins, every block keeps what
    it saves, and its input. The embedding is as large as the readout."""
    from benchmarks.gpu_cases import MODELS, Sizes  # which imports this module

    sizes, peaks, parts = Sizes(), measured("peak_GB"), []
    ours = [x for case, x in peaks if case == "model" and (x in TORCHAO) == theirs]
    recipes = [name for name in ours if name != BF16]
    for name in ("block", "readout"):
        with torch.device("meta"):
            model, batch = MODELS[name](sizes)
        parts.append(
            fp8.forecast(model, batch, recipes=recipes, hardware=HARDWARE).variants
        )
    for block, readout in list(zip(*parts, strict=True))[theirs:]:
        assert block.memory is not None
        assert readout.memory is not None
        kept = block.memory.weights + block.saved + block.memory.batch
        beside = readout.memory.weights - readout.memory.batch
        yield {
            "case": "model",
            "recipe": block.recipe,
            "peak_GB": round(
                (sizes.layers * kept + beside + readout.compiled) / 1e9, 2
            ),
            "measured_GB": peaks["model", block.recipe],
        }


def published_rows(theirs: bool) -> Iterator[Row]:
    for name, case in PUBLISHED.items():
        if (case.recipe in TORCHAO) != theirs:
            continue
        with torch.device("meta"):
            parts = case.parts()
        high, low = seconds(parts, case.recipe)
        ratio, published = low / high, case.low / case.bf16
        yield {
            "case": name,
            "recipe": case.recipe,
            "published_bf16_ms": round(case.bf16, 2),
            "bf16_ms": round(1e3 * high, 2),
            "published": round(published, 3),
            "ratio": round(ratio, 3),
            "off": round(abs(ratio / published - 1), 3),
        }


def seconds(parts: list[Part], recipe: str) -> tuple[float, float]:
    """The time of a model in bf16 and under a recipe: the sum of its parts."""
    high = low = 0.0
    for model, batch, times, cast in parts:
        recipes = [recipe] if cast else []
        result = fp8.forecast(model, batch, recipes=recipes, hardware=PUBLISHED_ON)
        high += times * result.variants[0].seconds
        low += times * result.variants[-1].seconds
    return high, low


PARTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    "cases": case_rows,
    "model": model_rows,
    "combined": partial(case_rows, cases=["block"], options={"combo_kernels": True}),
    "published": published_rows,
}


def main(parts: list[str]) -> None:
    if reason := why_not():
        print(f"forecast: left out: {reason}")
        return
    rows: list[Row] = []
    # Ours first: torchao's conversion changes inductor for the whole process.
    for theirs in (False, True):
        for part in parts:
            for row in PARTS[part](theirs):
                print(json.dumps(row), flush=True)
                rows.append(row)
    order = list(dict.fromkeys(row["case"] for row in rows))
    rows.sort(key=lambda row: order.index(row["case"]))
    known = [row["off"] for row in rows if "off" in row]
    if known:
        rows.append({"case": "median of published", "off": median(known)})
    write = report if parts == list(PARTS) else show
    write("forecast", QUESTION, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    main(parser.parse_args().parts or list(PARTS))
