"""Cosines keep their values: margins and temperatures are of the cosine, not of what is scaled."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import unit_scaling as uu
from tests.transforms.models import Net
from unit_scaling.transforms import unit_scale

WIDTH = 64
LABELS = torch.arange(16) % 8


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=False)


def arcface(m: Net, x: Tensor) -> Tensor:
    """Of InsightFace's kind: the margin needs the sine, which no cosine above 1 has."""
    cosine = F.linear(F.normalize(m.a(x)), F.normalize(m.b.weight[:8]))
    margin = cosine * math.cos(0.5) - torch.sqrt(1.0 - cosine**2) * math.sin(0.5)
    chosen = F.one_hot(LABELS, 8).float()
    return F.cross_entropy(30.0 * (chosen * margin + (1.0 - chosen) * cosine), LABELS)


def angles(m: Net, x: Tensor) -> Tensor:
    y = m.a(x)
    y = y / y.norm(dim=1, keepdim=True)
    w = m.b.weight / m.b.weight.norm(dim=0, keepdim=True)
    return F.cross_entropy((y @ w).clamp(-1 + 1e-6, 1 - 1e-6).acos().cos() * 16, LABELS)


def contrast(m: Net, x: Tensor) -> Tensor:
    """SimCLR's loss: a temperature makes logits of the cosines of a batch with itself."""
    z = F.normalize(m.b(F.relu(m.a(x))), dim=1)
    mask = torch.eye(16, dtype=torch.bool)
    return F.cross_entropy((z @ z.T / 0.5).masked_fill(mask, -1e9), torch.arange(16).roll(8))


def scaled_direction(m: Net, x: Tensor) -> Tensor:
    """CLIP's, as it was published: the learned scale comes before the product."""
    a, b = m.a(x), m.b(x)
    a, b = a / a.norm(dim=1, keepdim=True), b / b.norm(dim=1, keepdim=True)
    return F.cross_entropy(torch.tensor(2.0).exp() * a @ b.t(), torch.arange(16))


def bank(m: Net, x: Tensor) -> Tensor:
    """MoCo's: a constant beside what is computed."""
    q, k = F.normalize(m.a(x), dim=1), F.normalize(m.b(x), dim=1).detach()
    others = F.normalize(torch.ones(WIDTH, 8).tril(), dim=0)
    logits = torch.cat([torch.einsum("nc,nc->n", q, k)[:, None], q @ others], 1)
    return F.cross_entropy(logits / 0.07, torch.zeros(16, dtype=torch.long))


@pytest.mark.parametrize("loss", [arcface, angles, contrast, scaled_direction, bank])
def test_a_loss_of_cosines_keeps_its_value(loss: Callable[[Net, Tensor], Tensor]) -> None:
    """The plain model of the same weights computes it: directions do not depend on their scale."""
    torch.manual_seed(0)
    plain = Net(loss, a=linear(), b=linear())
    ours, x = unit_scale(plain), torch.randn(16, WIDTH)
    value = ours(x)
    torch.testing.assert_close(value, plain(x), rtol=1e-4, atol=1e-4)
    value.backward()
    grads = [p.grad.square().mean().sqrt() for p in ours.parameters() if p.grad is not None]
    assert grads
    assert all(2**-8 < rms < 4 for rms in grads)


def test_a_loss_of_cosines_that_is_written_out_keeps_its_gradient() -> None:
    """Of 32 logits a softmax leaves about 1/sqrt(32); what multiplies that, as a temperature does,
    is part of the loss. With the temperature taken out it would be a tenth.
    """

    def loss(m: Net, x: Tensor) -> Tensor:
        a, b = F.normalize(m.a(x), dim=1), F.normalize(m.b(x), dim=1)
        logits = a @ b.T / 0.1
        return (logits.logsumexp(1) - logits.diagonal()).mean()

    torch.manual_seed(0)
    ours = unit_scale(Net(loss, a=linear(), b=linear()))
    rows = uu.verify(ours, torch.randn(32, WIDTH)).rows
    grads = [r.rms for r in rows if r.path and r.tensor == "gradient of output"]
    assert len(grads) == 2
    assert all(1 / 8 < rms < 4 for rms in grads), grads


def test_the_gradient_of_a_cosine_is_parallel_to_that_of_torch() -> None:
    torch.manual_seed(0)
    plain = Net(contrast, a=linear(), b=linear())
    ours, x = unit_scale(plain), torch.randn(16, WIDTH)
    for model in (plain, ours):
        model(x).backward()
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert F.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0) > 0.9999


def test_in_attention_a_cosine_is_a_logit() -> None:
    """It goes on into a product: its scale is 1, as that of any other."""

    def attend(m: Net, x: Tensor) -> Tensor:
        q, k = F.normalize(m.a(x), dim=-1), F.normalize(m.b(x), dim=-1)
        return m.c(F.softmax(q @ k.transpose(-1, -2) * 10, dim=-1) @ x)

    torch.manual_seed(0)
    ours = unit_scale(Net(attend, a=linear(), b=linear(), c=linear()))
    found = uu.verify(ours, torch.randn(2, 16, WIDTH, requires_grad=True))
    scales = [row.rms for row in found if row.tensor in ("query", "key", "logits")]
    assert len(scales) == 3
    assert min(scales) > 0.5
    assert "cosine" not in str(uu.report(ours))
