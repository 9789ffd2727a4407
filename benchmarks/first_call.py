"""What the first call of a unit-scaled model costs.

python -m benchmarks.first_call

Llama-like models of width 64 and 6 to 48 layers, from the library transformers. The ratio is that
of the first call to a forward pass of the plain model, in time of the processor, one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.common import Row, report
from unit_scaling.transforms import unit_scale

LAYERS = (6, 12, 24, 48)
ROUNDS = 5
QUESTION = (
    "what does the first call of a unit-scaled Llama (width 64, batch 4 x 64) cost? (time of the "
    "processor, one thread; passes: forward passes in it)"
)


def llama(layers: int) -> nn.Module:
    """A causal language model with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def seconds(call: Callable[[], Any]) -> float:
    """What one call takes."""
    start = time.process_time()
    call()
    return time.process_time() - start


def row(layers: int) -> Row:
    """The medians of some rounds: of the plain forward pass, and of first calls."""
    model, ids = llama(layers), torch.randint(256, (4, 64))
    batch = {"input_ids": ids, "labels": ids}
    with torch.no_grad():
        plain = statistics.median(
            seconds(lambda: model(**batch)) for _ in range(4 * ROUNDS)
        )
    first = []
    for _ in range(ROUNDS):
        scaled = unit_scale(model)
        first.append(seconds(lambda m=scaled: m(**batch)))  # type: ignore[misc]
    taken, passes = statistics.median(first), list[Any]()
    scaled = unit_scale(model)
    scaled.register_forward_pre_hook(lambda *given: passes.append(given))
    scaled(**batch)
    return {
        "name": f"{layers} layers",
        "forward_ms": round(1e3 * plain, 1),
        "first_call_ms": round(1e3 * taken),
        "ratio": round(taken / plain, 1),
        "passes": len(passes),
    }


def main() -> None:
    """Measures and writes results/first_call.json."""
    torch.set_num_threads(1)
    row(LAYERS[0])  # imports, and what torch does once
    report("first_call", QUESTION, [row(layers) for layers in LAYERS])


if __name__ == "__main__":
    main()
