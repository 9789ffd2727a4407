"""What u-muP's learning rates cost: an optimizer step over 200 parameters, against torch's own.

python -m benchmarks.optim
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import unit_scaling as uu
from benchmarks.common import Row, compare, fix_allocator, report

QUESTION = (
    "what does a step of unit_scaling.optim cost over the 202 parameters of a transformer of 40 "
    "layers, relative to torch's own with the same implementation?"
)

#: Optimizer -> its arguments besides the implementation.
OPTIMIZERS: dict[str, dict[str, Any]] = {"AdamW": {}, "SGD": {"momentum": 0.9}}
IMPLEMENTATIONS = ("fused", "foreach")
WIDTHS = (32, 128)


def step(module: Any, name: str, width: int, **settings: Any) -> Callable[[], object]:
    """A step of an optimizer of `module` on a model of its own, with fixed gradients."""
    torch.manual_seed(0)
    model = uu.TransformerDecoder(width, 64, layers=40, heads=1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return getattr(module, name)(model.parameters(), 1e-3, **settings).step


def rows(name: str, implementation: str, width: int) -> list[Row]:
    """One comparison: torch's optimizer, and ours in groups by learning rate."""
    settings = {implementation: True, **OPTIMIZERS[name]}
    candidates = {
        f"{name} {implementation} width {width}": step(
            uu.optim, name, width, **settings
        )
    }
    return compare(
        step(torch.optim, name, width, **settings), candidates, rounds=60, seconds=0.02
    )


def main() -> None:
    """Measure and write results/optim.json."""
    fix_allocator("benchmarks.optim")
    cases = [(n, i, w) for w in WIDTHS for n in OPTIMIZERS for i in IMPLEMENTATIONS]
    report("optim", QUESTION, [row for case in cases for row in rows(*case)])


if __name__ == "__main__":
    main()
