"""A unit-scaled model on FP8 products and its optimizer, for the tests of checkpoints."""

import torch
from torch import nn

import fp8
import unit_scaling as uu
from unit_scaling import functional as U
from unit_scaling.transforms import unit_scale

VOCAB, WIDTH = 12, 8


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = [nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()]
    model = unit_scale(nn.Sequential(*layers, nn.Linear(WIDTH, VOCAB)))
    model = fp8.convert(model, "unit")
    model(torch.zeros(2, 2, dtype=torch.int64))  # is recorded before anything shards it
    return model, uu.optim.AdamW(model.parameters(), 0.01)


def step(model: nn.Module, opt: torch.optim.Optimizer) -> float:
    """One on a fixed batch, the same for every process; the loss before it."""
    tokens = torch.randint(VOCAB, (4, 9), generator=torch.Generator().manual_seed(5))
    loss = U.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()
