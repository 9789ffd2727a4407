"""A unit-scaled model on FP8 products and its optimizer, for the tests of checkpoints."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fp8
import unit_scaling as uu
from fp8.distributed.fsdp import portable_state_dict
from unit_scaling import functional as U
from unit_scaling.transforms import unit_scale

VOCAB, WIDTH = 12, 8


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    layers = [nn.Embedding(VOCAB, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()]
    model = unit_scale(nn.Sequential(*layers, nn.Linear(WIDTH, VOCAB)))
    model = fp8.convert(model, "unit")
    model(torch.zeros(2, 2, dtype=torch.int64))  # is recorded before anything shards it
    return model, uu.optim.AdamW(model.parameters(), 0.1)


def make_fp8(seed: int) -> nn.Module:
    """Large enough for scales by block; 130 rows, which two processes share evenly."""
    torch.manual_seed(seed)
    return fp8.convert(nn.Sequential(nn.Linear(20, 130), nn.GELU(), nn.Linear(130, 4)), "unit")


def optimizer(model: nn.Module) -> fp8.optim.AdamW:
    return fp8.optim.AdamW(model.parameters(), 1e-2, min_size=0)


def step_fp8(model: nn.Module, opt: torch.optim.Optimizer) -> float:
    x = torch.randn(16, 20, generator=torch.Generator().manual_seed(6))
    loss = (model(x) - x[:, :4]).square().mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


def numbers(opt: torch.optim.Optimizer) -> list[Tensor]:
    """The moments, whole, in the order of the parameters."""
    state = portable_state_dict(opt)["state"]
    moments = [own[name] for _, own in sorted(state.items()) for name in ("exp_avg", "exp_avg_sq")]
    return [m.full_tensor() if isinstance(m, DTensor) else m for m in moments]


def step(model: nn.Module, opt: torch.optim.Optimizer) -> float:
    """One on a fixed batch, the same for every process; the loss before it."""
    tokens = torch.randint(VOCAB, (4, 9), generator=torch.Generator().manual_seed(5))
    loss = U.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()
