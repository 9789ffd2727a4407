"""Small models in the ways that people write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            t.view(batch, length, self.heads, -1).transpose(1, 2)
            for t in self.qkv(x).split(width, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layer, x, use_reentrant=False)


class GPT(nn.Module):
    """Tied weights, learned positions, a loss inside, one-token logits without targets."""

    def __init__(
        self, vocab: int = 65, width: int = 32, heads: int = 2, layers: int = 2, context: int = 64
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        if targets is None:
            return self.head(x[:, [-1], :]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, ids: Tensor, count: int) -> Tensor:
        for _ in range(count):
            logits, _ = self(ids)
            ids = torch.cat([ids, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        return ids


class Net(nn.Module):
    """A module from a function of (self, x)."""

    def __init__(self, fn, **modules: nn.Module) -> None:
        super().__init__()
        self.fn = fn
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self, x)


def gpt(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT()


def tiny() -> GPT:
    """One block: compiling takes time in proportion."""
    torch.manual_seed(0)
    return GPT(width=16, layers=1)


def no_block() -> GPT:
    """An embedding, a norm, a product and the loss."""
    torch.manual_seed(0)
    return GPT(width=16, layers=0)


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 65, (2, 17), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def step(model: nn.Module) -> list[Tensor]:
    """The loss and every gradient of one step, as float64."""
    model.zero_grad()
    _, loss = model(*batch())
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads
    result = [t.detach().double().clone() for t in (loss, *grads)]
    model.zero_grad()
    return result


def same(ours: list[Tensor], theirs: list[Tensor], rtol: float = 0.0, atol: float = 0.0) -> None:
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
