"""What the transforms cost: a training step of a compiled GPT, plain against transformed.

python -m benchmarks.transforms
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.common import compare, fix_allocator, report
from notebooks.nanogpt.model import GPT, GPTConfig
from unit_scaling.transforms import simulate_fp8, unit_scale

QUESTION = (
    "what does a nanoGPT training step cost, relative to torch.compile of the plain model? (time "
    "of the processor, one thread)"
)

VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "compiled unit_scale": unit_scale,
    "compiled simulate_fp8": simulate_fp8,
    "compiled simulate_fp8(unit_scale)": lambda gpt: simulate_fp8(unit_scale(gpt)),
}


def training_step(model: nn.Module, compiled: bool) -> Callable[[], object]:
    """Forward, backward and an AdamW step on one batch of 16 x 128 tokens."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 65, (16, 129), generator=generator)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-10)
    model(ids[:, :-1], ids[:, 1:])[1].backward()  # sets values, and static scales
    optimizer.zero_grad(set_to_none=True)
    run = torch.compile(model, fullgraph=True) if compiled else model

    def step() -> None:
        _, loss = run(ids[:, :-1], ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main() -> None:
    """Measure and write results/transforms.json."""
    fix_allocator("benchmarks.transforms")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gpt = GPT(GPTConfig(vocab=65, context=128, layers=4, heads=4, width=128))
    steps = {name: training_step(build(gpt), True) for name, build in VARIANTS.items()}
    eager = {f"eager {n.partition(' ')[2]}": b for n, b in VARIANTS.items()}
    steps |= {name: training_step(build(gpt), False) for name, build in eager.items()}
    steps["eager plain"] = training_step(GPT(gpt.config), False)
    baseline = training_step(gpt, True)
    rows = compare(baseline, steps, rounds=30, clock=time.process_time)
    report("transforms", QUESTION, rows)


if __name__ == "__main__":
    main()
