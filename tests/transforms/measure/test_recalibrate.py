"""`recalibrate`: the gauges of a model whose weights have changed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import unit_scaling as uu
from tests.transforms.models import GPT
from unit_scaling.transforms import unit_scale

VOCAB, CONTEXT = 24, 16


def gpt() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """A model that has run once, and its batch."""
    torch.manual_seed(0)
    model = unit_scale(GPT(vocab=VOCAB, context=CONTEXT))
    ids = torch.randint(VOCAB, (8, CONTEXT + 1))
    batch = ids[:, :-1], ids[:, 1:]
    model(*batch)[1].backward()
    return model, batch


def test_attention_is_measured_as_it_is_after_training():
    """At first its output counts as one of RMS 1, as for its settled length; weights that have
    grown make it larger, and the gradient that the products before it see with it."""
    model, batch = gpt()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "qkv" in name:
                weight *= 8
    model.zero_grad()
    model(*batch)[1].backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters()}
    uu.recalibrate(model, batch)
    result = uu.verify(model, batch)
    assert result.share("gradient") == 1, result
    model.zero_grad()
    model(*batch)[1].backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, before[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [1, 512])
def test_the_report_says_what_brings_the_arriving_gradient_to_rms_1(count: int):
    torch.manual_seed(0)
    model = unit_scale(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)))
    output = model(torch.randn(64, 16))
    assert not any("arrives" in note for note in uu.report(model).notes)
    torch.manual_seed(1)
    output.backward(torch.randn(64, 4) / count)
    notes = [note for note in uu.report(model).notes if "arrives" in note]
    assert len(notes) == (count > 1)
    assert all(f"multiplied by {count}," in note for note in notes)
