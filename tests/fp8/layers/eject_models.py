"""The model of test_eject.py, and its step: imported in a process without this package."""

import torch
from torch import nn

WIDTH, HIDDEN, TOKENS = 48, 64, 32


class Casting(nn.Linear):
    """As the layers of nanochat and modded-nanogpt."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


class Model(nn.Module):
    """Blocks with and without biases, a frozen layer, an embedding that is the head's weight, a
    layer whose input is in another dtype than its weight."""

    def __init__(self):
        super().__init__()
        self.first = Casting(16, WIDTH)
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        blocks = [
            nn.Sequential(
                nn.Linear(WIDTH, HIDDEN),
                nn.ReLU(),
                nn.Linear(HIDDEN, WIDTH, bias=False),
            )
            for _ in range(3)
        ]
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.tokens.weight
        self.blocks[1][0].weight.requires_grad_(False)

    def forward(self, x, ids):
        h = self.first(x.bfloat16()).to(x.dtype) + self.tokens(ids)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h)


def batch(dtype):
    """Rows of 2 x 3 x 5; some rows of x are zero, others large and small."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 3, 5, 16, generator=generator)
    x[0] *= torch.tensor([0.0, 1e-30, 1e-3, 1.0, 1e4])[:, None]
    return x.to(dtype).requires_grad_(), torch.randint(
        TOKENS, (2, 3, 5), generator=generator
    )


def step(model, dtype, autocast=False):
    """The output, and the gradients of the input and of all parameters that have one."""
    x, ids = batch(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(x, ids)
    y.float().square().mean().backward()
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    return [y.detach(), x.grad, *gradients]
