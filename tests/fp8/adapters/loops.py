"""A small model and its batches, and the loops of Accelerate and of torch that train it."""

import contextlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.shared import Net, seeded, tied


def logits(m, tokens):
    x = m.embed(tokens)
    return m.head(m.norm(x + m.down(F.gelu(m.up(x)))))


def small(width=32):
    """A tied embedding and head around two layers and a norm."""
    return tied(
        Net(
            logits,
            embed=nn.Embedding(32, width),
            up=nn.Linear(width, 2 * width),
            down=nn.Linear(2 * width, width),
            norm=nn.LayerNorm(width),
            head=nn.Linear(width, 32, bias=False),
        )
    )


def batches(steps=4, start=0):
    every = torch.randint(32, (start + steps, 8, 17), generator=seeded(2))
    return list(every[start:])


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def accelerated(accelerator, model, optimizer, data, loss_of=loss_of, clip=1.0):
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
    model, optimizer, data, loss_of=loss_of, *, clip=1.0, every=1, dtype=None
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
