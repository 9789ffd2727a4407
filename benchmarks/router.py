"""What does a router in low precision change? The reason why `fp8.Policy(keep=("router",))` exists.

``python -m benchmarks.router`` trains a Qwen3-MoE (two layers, 8 experts, 2 for each token) on text
in float32. On held-out text it then compares three models with the trained weights: uncast, cast
but for the routers, and cast with the routers.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import fp8
from benchmarks.common import Row, report
from benchmarks.problems import read

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "output_router_logits": True,
}
STEPS, HELD_OUT, SEEDS = 300, 8, (0, 1, 2)
RECIPES = ("tensor", "mxfp8", "nvfp4")


def trained(seed: int) -> nn.Module:
    """A model trained in float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
    torch.manual_seed(seed)
    model: nn.Module = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(STEPS):
        model(**read(1000 * seed + step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


@contextmanager
def routers_in_high_precision(model: nn.Module) -> Iterator[None]:
    """Runs each router in a disabled block."""
    routers = [
        router for name, router in model.named_modules() if name.endswith("mlp.gate")
    ]
    for router in routers:
        router.forward = fp8.autocast(enabled=False)(router.forward)
    try:
        yield
    finally:
        for router in routers:
            del router.forward


class Observed:
    """The routed experts, the loss and the gradients of a model on held-out text under a recipe."""

    def __init__(self, model: Any, recipe: str | None) -> None:
        self.experts: list[Tensor] = []
        self.loss = 0.0
        for number in range(HELD_OUT):
            with fp8.autocast(fp8.Policy(recipe)):
                output = model(**read(10_000 + number))
            output.loss.backward()
            self.loss += output.loss.item() / HELD_OUT
            self.experts += [
                logits.topk(2).indices.sort().values for logits in output.router_logits
            ]
        self.grad = torch.cat([p.grad.flatten() for p in model.parameters()])
        model.zero_grad()

    def moved(self, other: Observed) -> float:
        """The share of tokens and layers that are routed to other experts."""
        pairs = zip(self.experts, other.experts, strict=True)
        return float(torch.cat([(a != b).any(-1).float() for a, b in pairs]).mean())

    def error(self, other: Observed) -> float:
        """The relative error of the gradient."""
        return float((self.grad - other.grad).norm() / other.grad.norm())


def rows() -> list[Row]:
    """One row for each recipe and routers kept or cast: means over seeds."""
    found: dict[tuple[str, bool], list[tuple[float, float, float]]] = {}
    for seed in SEEDS:
        model = trained(seed)
        exact = Observed(model, None)
        for recipe, kept in itertools.product(RECIPES, (True, False)):
            with routers_in_high_precision(model) if kept else nullcontext():
                seen = Observed(model, recipe)
            numbers = (seen.moved(exact), seen.error(exact), seen.loss - exact.loss)
            found.setdefault((recipe, kept), []).append(numbers)
    table = []
    for (recipe, kept), numbers in found.items():
        moved, error, loss = (
            sum(each) / len(SEEDS) for each in zip(*numbers, strict=True)
        )
        routers = "high precision" if kept else "cast"
        row = {"name": recipe, "routers": routers, "rerouted": round(moved, 4)}
        table.append(
            row | {"gradient_error": round(error, 4), "loss_gap": round(loss, 5)}
        )
    return table


def main() -> int:
    """Run the benchmark."""
    report("router", "What does a router in low precision change?", rows())
    return 0


if __name__ == "__main__":
    sys.exit(main())
