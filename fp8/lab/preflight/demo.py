"""The problem of ``fp8 preflight --demo``: a small GPT on text that every Python installation
has."""

from __future__ import annotations

import inspect
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .training import Setup

# Modules of the standard library whose source is the text.
SOURCES = "argparse ast collections datetime functools inspect typing".split()

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 64, 4, 2, 64, 16


class _Block(nn.Module):
    """Causal self-attention and an MLP, each after a LayerNorm and added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder of bytes that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(CONTEXT, WIDTH))
        self.blocks = nn.ModuleList(_Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)  # GPT-2's

    def forward(self, ids: Tensor) -> Tensor:
        """The mean cross entropy of each token after the first. ids: (batch, length + 1), int64."""
        inputs = ids[:, :-1]
        targets = ids[:, 1:]
        x = self.tokens(inputs) + self.positions[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text_batches(
    text: bytes, batch: int, context: int, count: int, seed: int
) -> list[Tensor]:
    """Random windows of a text: ``count`` tensors of shape (batch, context + 1), int64."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(data) - context, (count, batch, 1), generator=generator)
    return list(data[starts + torch.arange(context + 1)])


def setup(seed: int, count: int = 1024) -> Setup:
    """A GPT of two layers, 64 wide, on the source of Python's standard library."""
    text = "".join(inspect.getsource(import_module(name)) for name in SOURCES).encode()
    model = GPT()
    return Setup(
        model,
        text_batches(text, BATCH, CONTEXT, count, seed),
        optimizer=torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98)),
    )
