"""What `unit_scale` gives beside the other features, where a plan meets what it has not seen."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fp8
from tests.transforms.models import Net
from unit_scaling.transforms import track_scales, unit_scale


def residual(m: Net, x: Tensor) -> Tensor:
    """A branch that a norm is the first call of."""
    x = m.up(x)
    return x + m.down(m.norm(x))


NORMS = [nn.RMSNorm(4), fp8.LayerNorm2d(8)]
EVERY = {"where": lambda name, norm: True}
each_norm = pytest.mark.parametrize("norm", NORMS, ids=lambda norm: type(norm).__name__)


def scaled_and_input(norm: nn.Module) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = {"norm": copy.deepcopy(norm), "up": nn.Conv2d(8, 8, 1), "down": nn.Conv2d(8, 8, 1)}
    return unit_scale(Net(residual, **layers)), torch.randn(2, 8, 4, 4)


def gradients(model: nn.Module, x: Tensor, call=None) -> list[Tensor]:
    model.zero_grad()
    y = (model if call is None else call)(x)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return [p.grad for p in model.parameters()]


@each_norm
@pytest.mark.parametrize("after", ["double", "revert"])
def test_a_plan_does_not_depend_on_the_precision_of_norms(norm, after):
    """In low precision a norm casts its input, which is no call of the plan's."""
    model, x = scaled_and_input(norm)
    low = fp8.apply_low_precision_layernorm(copy.deepcopy(model), "amp_bf16", **EVERY)
    low(x)
    if after == "double":
        model, low, x = model.double(), low.double(), x.double()
    else:
        fp8.revert(low)
    for found, expected in zip(gradients(low, x), gradients(model, x), strict=True):
        torch.testing.assert_close(found, expected)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # torch's own
@each_norm
@pytest.mark.parametrize("compiled", [False, True])
def test_norms_that_follow_autocast_under_a_plan(norm, compiled):
    """Planned outside of autocast, run inside and outside again, within the rounding of bf16."""
    model, x = scaled_and_input(norm)
    low = fp8.apply_low_precision_layernorm(copy.deepcopy(model), **EVERY)
    wanted = gradients(model, x)
    torch.testing.assert_close(gradients(low, x), wanted, rtol=0, atol=0)
    torch.compiler.reset()
    call = torch.compile(low, backend="aot_eager", fullgraph=True) if compiled else low
    with torch.autocast("cpu", torch.bfloat16):
        rounded = gradients(low, x, call)
    got, expected = (torch.cat([g.flatten() for g in grads]) for grads in (rounded, wanted))
    assert 0 < (got - expected).norm() < 0.05 * expected.norm()
    torch.testing.assert_close(gradients(low, x, call), wanted, rtol=1e-5, atol=1e-5)


def experts(m: Net, ids: Tensor) -> Tensor:
    x = m.tokens(ids)
    rows = torch.arange(1, 3, dtype=torch.int32) * (len(ids) // 2)
    x = F.grouped_mm(x.bfloat16(), m.experts.bfloat16(), offs=rows).to(x.dtype)
    return F.cross_entropy(m.head(x), ids)


@pytest.mark.parametrize("transform", [unit_scale, lambda m: fp8.convert(unit_scale(m), "unit")])
def test_compiled_experts_have_their_plan_and_recipe(transform):
    """torch does not list grouped_mm as overridable: compiled, it would lose both."""
    torch.compiler.reset()
    torch.manual_seed(0)
    plain = Net(experts, tokens=nn.Embedding(16, 16), head=nn.Linear(16, 16))
    plain.experts = nn.Parameter(0.1 * torch.randn(2, 16, 16))
    model, ids = transform(plain), torch.arange(16).repeat_interleave(4)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    wanted, got = gradients(model, ids), gradients(model, ids, call)
    torch.testing.assert_close(got, wanted, rtol=0, atol=0)


def masked(m: Net, x: Tensor) -> Tensor:
    """As the library transformers, it spells its mask otherwise where it is traced."""
    q, k, v = m.qkv(x).chunk(3, -1)
    rows = torch.arange(x.shape[1])
    if torch.compiler.is_exporting():
        mask = torch.arange(x.shape[1])[:, None].expand(-1, x.shape[1]) >= rows[None] + 0
    else:
        mask = rows[:, None] >= rows
    return F.scaled_dot_product_attention(q, k, v, mask)


@pytest.mark.parametrize("tracked", [False, True])
def test_exported_with_a_mask_that_is_made_otherwise(tracked):
    torch.manual_seed(0)
    model, x = unit_scale(Net(masked, qkv=nn.Linear(8, 24))), torch.randn(2, 4, 8)
    expected = model(x)
    model = track_scales(model) if tracked else model  # which does not measure what is exported
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), expected)
