"""A small model and its batches, and the loops of Accelerate and of torch that train it."""

import contextlib

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Model(nn.Module):
    """A tied embedding and head around two layers and a norm."""

    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(32, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        """Logits."""
        x = self.embed(tokens)
        return self.head(self.norm(x + self.down(nn.functional.gelu(self.up(x)))))


def batches(steps=4, start=0):
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randint(32, (8, 17), generator=generator) for _ in range(start + steps)
    ][start:]


def loss_of(model, tokens):
    return nn.functional.cross_entropy(
        model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    )


def accelerated(
    accelerator,
    model,
    optimizer,
    data,
    loss_of=loss_of,
    clip=1.0,
):
    """The losses of a loop as Accelerate has it, over one epoch."""
    losses = []
    for tokens in data:
        with accelerator.accumulate(model):
            loss = loss_of(model, tokens)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain_loop(
    model,
    optimizer,
    data,
    loss_of=loss_of,
    *,
    clip=1.0,
    every=1,
    dtype=None,
):
    """The losses of what a trainer does, spelled out: torch.autocast to ``dtype``, scaled losses in
    float16, a step for ``every`` batches, which DDP does not synchronize before, and clipping."""
    scaler, losses = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16), []
    for i, batch in enumerate(data, 1):
        apart = i % every and isinstance(model, DistributedDataParallel)
        with model.no_sync() if apart else contextlib.nullcontext():
            with torch.autocast("cpu", dtype, dtype is not None, cache_enabled=False):
                loss = loss_of(model, batch)
            scaler.scale(loss / every).backward()
        losses.append(loss.item())
        if i % every == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return losses


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)
