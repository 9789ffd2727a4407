"""Small problems for tests of studies."""

import torch
from torch import nn

from fp8.lab.preflight.training import Setup
from tests.shared import seeded


class Classifier(nn.Module):
    """An MLP with blocks that returns its cross entropy."""

    def __init__(self, width=32, blocks=2):
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 16)

    def forward(self, x, y):
        x = self.first(x)
        for block in self.blocks:
            x = x + nn.functional.gelu(block(x))
        return nn.functional.cross_entropy(self.head(x), y)


def batches(count, seed=0):
    """Points around 16 centres, and the index of the centre."""
    generator = seeded(seed)
    centres = torch.randn(16, 16, generator=seeded(99))
    found = []
    for _ in range(count):
        y = torch.randint(16, (32,), generator=generator)
        noise = torch.randn(32, 16, generator=generator)
        found.append((centres[y] + 0.5 * noise, y))
    return found


def setup(seed=0):
    """A classifier with its own weights and data for each seed."""
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return Setup(model, batches(64, seed), optimizer=optimizer)
