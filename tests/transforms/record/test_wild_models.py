"""Models as people write them, Hugging Face's apart: converted, checked, copied, trained."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from einops import rearrange, repeat
from einops.layers.torch import Rearrange, Reduce
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from unit_scaling.transforms import simulate_fp8, unit_scale

WIDTH = 32
Batch = tuple[Tensor, ...]


class GAN(nn.Module):
    """DCGAN: transposed convolutions, batch norm, in-place calls, `nn.BCELoss` of a sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.make = nn.Sequential(
            nn.ConvTranspose2d(16, 32, 4, 1, 0, bias=False),
            nn.BatchNorm2d(32),
            nn.ReLU(True),
            nn.ConvTranspose2d(32, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )
        self.judge = nn.Sequential(
            nn.Conv2d(3, 16, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(16, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, noise: Tensor, real: Tensor) -> Tensor:
        fake, ones = self.make(noise), torch.ones(len(noise))
        real_loss = nn.BCELoss()(self.judge(real).view(-1), ones)
        fake_loss = nn.BCELoss()(self.judge(fake.detach()).view(-1), torch.zeros(len(noise)))
        return real_loss + fake_loss + nn.BCELoss()(self.judge(fake).view(-1), ones)


class VAE(nn.Module):
    """Reparametrised; the reconstruction is compared with the input, as a probability."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mean, self.log_var = (
            nn.Linear(64, WIDTH),
            nn.Linear(WIDTH, 8),
            nn.Linear(WIDTH, 8),
        )
        self.back, self.down = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.up(x.view(-1, 64)))
        mean, log_var = self.mean(h), self.log_var(h)
        z = mean + torch.randn_like(mean) * torch.exp(0.5 * log_var)
        y = torch.sigmoid(self.down(F.relu(self.back(z))))
        divergence = -0.5 * torch.mean(1 + log_var - mean.pow(2) - log_var.exp())
        return F.binary_cross_entropy(y, x.view(-1, 64)) + divergence


class Attention(nn.Module):
    """As in vit-pytorch."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm, self.attend = heads, nn.LayerNorm(width), nn.Softmax(dim=-1)
        self.to_qkv, self.to_out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        split = self.to_qkv(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in split)
        dots = torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        return self.to_out(rearrange(torch.matmul(self.attend(dots), v), "b h n d -> b n (h d)"))


class ViT(nn.Module):
    """einops' layers and functions, a class token, a learned position."""

    def __init__(self) -> None:
        super().__init__()
        patches = Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=4, q=4)
        self.embed = nn.Sequential(patches, nn.Linear(48, WIDTH))
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 17, WIDTH))
        self.attention, self.norm = Attention(WIDTH), nn.LayerNorm(WIDTH)
        self.head = nn.Sequential(Reduce("b n c -> b c", "mean"), nn.Linear(WIDTH, 8))

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images)
        x = torch.cat((repeat(self.token, "1 1 d -> b 1 d", b=len(x)), x), dim=1)
        x += self.positions[:, : x.shape[1]]
        logits = self.head(self.norm(self.attention(x) + x))
        return F.cross_entropy(logits, torch.arange(len(x)))


class Llama(nn.Module):
    """Attention of Meta's Llama: rotary positions as complex numbers, repeated keys and values."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.heads = nn.Embedding(40, WIDTH), heads
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH // 2)
        self.output = nn.Linear(WIDTH, 40, bias=False)
        angles = torch.outer(torch.arange(16), 1e4 ** -(torch.arange(0, 8, 2) / 8))
        self.freqs = torch.polar(torch.ones_like(angles), angles)

    def rotate(self, x: Tensor) -> Tensor:
        z = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        return torch.view_as_real(z * self.freqs[: x.shape[1], None]).flatten(3).type_as(x)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        batch, length = ids.shape
        mask = torch.triu(torch.full((length, length), float("-inf")), diagonal=1)
        q, k, v = (w(h).view(batch, length, -1, 8) for w in (self.wq, self.wk, self.wv))
        q, k = self.rotate(q), self.rotate(k)
        k, v = (t[:, :, :, None].expand(-1, -1, -1, 2, -1).flatten(2, 3) for t in (k, v))
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(8) + mask
        y = torch.matmul(F.softmax(scores.float(), dim=-1).type_as(q), v)
        h = h + self.wo(y.transpose(1, 2).contiguous().view(batch, length, -1))
        logits = self.output(F.rms_norm(h, (WIDTH,)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class MoE(nn.Module):
    """Top-k routing in a loop that writes into zeros; the input is also the target."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.SiLU(), nn.Linear(64, WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x).view(-1, WIDTH)
        weights, chosen = torch.topk(self.gate(h), 2)
        weights = F.softmax(weights, dim=1, dtype=torch.float).type_as(h)
        mixed = torch.zeros_like(h)
        for number, expert in enumerate(self.experts):
            row, nth = torch.where(chosen == number)
            mixed[row] += weights[row, nth, None] * expert(h[row])
        return F.mse_loss(self.head(h + mixed).view_as(x), x)


class SimCLR(nn.Module):
    """The contrastive loss of normalised projections."""

    def __init__(self) -> None:
        super().__init__()
        conv = nn.Conv2d(3, 16, 3, 2, 1)
        self.body = nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.project = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 8))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        z = F.normalize(self.project(self.body(torch.cat([a, b]))), dim=-1)
        own = torch.eye(len(z), dtype=torch.bool)
        logits = (torch.matmul(z, z.T) / 0.5).masked_fill(own, -9e15)
        return F.cross_entropy(logits, torch.arange(len(z)).roll(len(a)))


class DQN(nn.Module):
    """A duelling network of images in bytes, as numbers from 0 to 255."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(4, 16, 4, 2), nn.ReLU(), nn.Flatten())
        self.advantage, self.value = nn.Linear(16 * 81, 6), nn.Linear(16 * 81, 1)

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        h = self.conv((images - 127.5) / 127.5)
        advantage = self.advantage(h)
        quality = self.value(h) + advantage - advantage.mean(1, keepdim=True)
        return F.smooth_l1_loss(quality, target)


class Traced(nn.Module):
    """A part that `torch.fx` has traced."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(16, WIDTH), nn.GELU()))
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)), torch.arange(len(x)) % 8)


WILD: dict[type[nn.Module], Callable[[], Batch]] = {
    GAN: lambda: (torch.randn(8, 16, 1, 1), torch.rand(8, 3, 8, 8) * 2 - 1),
    VAE: lambda: (torch.rand(16, 1, 8, 8),),
    ViT: lambda: (torch.randn(8, 3, 16, 16),),
    Llama: lambda: (torch.randint(40, (4, 16)),),
    MoE: lambda: (torch.randn(4, 10, 8),),
    SimCLR: lambda: (torch.randn(8, 3, 8, 8), torch.randn(8, 3, 8, 8)),
    DQN: lambda: (torch.rand(4, 4, 20, 20) * 255, torch.randn(4, 6)),
    Traced: lambda: (torch.randn(32, 16),),
}


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    torch.manual_seed(1)
    return model(*batch)


@pytest.mark.parametrize("kind", WILD, ids=lambda kind: kind.__name__)
def test_wild_models(kind: type[nn.Module]) -> None:
    """Converted whole, at unit scale, the same as a copy and unpickled, with FP8, and it learns."""
    torch.manual_seed(0)
    batch = WILD[kind]()
    model = unit_scale(kind())
    loss = loss_of(model, batch)
    assert not uu.report(model).left_alone
    checked = uu.verify(model, batch)
    assert checked.share("weight") == 1
    assert not [row for row in checked.outside if row.kind == "activation"]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert loss_of(twin, batch) == loss
    assert loss_of(simulate_fp8(model), batch).isfinite()
    optimizer = uu.optim.AdamW(model.parameters(), lr=2**-5)
    for _ in range(10):
        optimizer.zero_grad()
        last = loss_of(model, batch)
        last.backward()
        optimizer.step()
    assert kind is GAN or last < 0.97 * loss  # a game has no loss to go down
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
