"""Models of many levels, each a call more around what computes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from unit_scaling.transforms import simulate_fp8, unit_scale


class Wrapper(nn.Module):
    """As DDP and trainers have them: one more call around each."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Tensor) -> Tensor:
        return self.module(*args)


def test_a_model_of_many_levels_compiles() -> None:
    """A compiler follows each call by dozens of its own, torch 2.12's by more than the others, and
    Python allows 1000."""
    torch.manual_seed(0)
    model: nn.Module = nn.Linear(4, 4)
    for _ in range(2 if (2, 12) <= torch.__version__ < (2, 13) else 4):
        model = Wrapper(model)
    ours, x = simulate_fp8(unit_scale(model)), torch.randn(2, 4)
    expected = ours(x)
    torch.compiler.reset()
    assert torch.equal(torch.compile(ours, backend="eager", fullgraph=True)(x), expected)
