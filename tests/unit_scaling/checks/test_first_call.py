"""Weights that were overwritten, and a loss that averages, say so at the first call of a model."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fp8
import unit_scaling as uu
import unit_scaling.functional as U
from fp8.warnings import ScaleWarning
from tests.shared import in_one_graph, parametrize, pickled, refuses, said, warns
from unit_scaling.transforms import simulate_fp8, track_scales


def model_of(overwritten=False):
    """A model of uu modules. overwritten: whether it has an init of its own, as nanoGPT's."""
    body = uu.Linear(32, 64), uu.GELU(), uu.Linear(64, 32)
    model = nn.Sequential(uu.Embedding(64, 32), *body, uu.LinearReadout(32, 64))
    for parameter in model.parameters() if overwritten else ():
        nn.init.normal_(parameter, std=0.02)
    return model


@pytest.fixture
def tokens():
    return torch.randint(64, (4, 8))


# Weights


@parametrize("transform", [lambda m: m, simulate_fp8, copy.deepcopy, track_scales])
def test_weights_that_were_overwritten_warn_once(transform, tokens):
    model = transform(model_of(overwritten=True))
    message = r"0 \(Embedding\) is 0.0[12]\d* instead of 1"
    with warns(message, ScaleWarning) as caught:
        model(tokens)
    assert len(caught) == 1
    assert "of 3 more layers not 1" in str(caught[0].message)
    assert "reset_parameters" in str(caught[0].message)
    model(tokens)  # no second one: warnings are errors here
    with fp8.strict(), refuses("instead of 1", ScaleWarning):
        model_of(overwritten=True)(tokens)


def test_weights_that_were_drawn_trained_or_loaded_do_not(tokens):
    model = model_of()
    model(tokens)
    assert not any(part._forward_pre_hooks for part in model.modules())
    again = model_of(overwritten=True)
    for part in again:
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    again(tokens)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(100)
    model(tokens)
    pickled(model)(tokens)
    with torch.device("meta"):
        empty = model_of()
    for fresh in (model_of(), empty):
        fresh.load_state_dict(model.state_dict(), assign=fresh is empty)
        fresh(tokens)


@parametrize("size, value", [(8, 0.0), (2, 0.01)])
def test_those_of_zeros_and_of_few_numbers_may_have_any_rms(size, value):
    layer = uu.Linear(size, size)
    nn.init.constant_(layer.weight, value)
    layer(torch.randn(2, size))


def test_compiled_and_mapped_calls_are_not_checked(tokens):
    in_one_graph(model_of(overwritten=True), "eager")(tokens)
    torch.func.vmap(uu.Linear(8, 8))(torch.randn(3, 8))
    mapped, stacked = uu.Linear(8, 8), {"weight": torch.randn(3, 8, 8)}
    call = torch.func.functional_call
    torch.func.vmap(lambda p, x: call(mapped, p, (x,)))(stacked, torch.randn(3, 8))


# The first gradient

AGAIN = "the first gradient at the output of a unit-scaled model has RMS"


def gradient_warnings(model, tokens, loss):
    """Those of two steps."""
    with said(ScaleWarning) as messages:
        for _ in range(2):
            loss(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    return messages


def test_a_loss_outside_of_the_model_warns_once(tokens):
    model = model_of()
    (0.0 * model(tokens)).sum().backward()  # zeros say nothing: it is still to be seen
    (message,) = gradient_warnings(model, tokens, F.cross_entropy)
    assert message.startswith(AGAIN)
    assert "U.cross_entropy" in message
    assert "'tensor'" in message
    assert gradient_warnings(model, tokens, F.cross_entropy) == []


@parametrize(
    "loss",
    [
        U.cross_entropy,
        lambda x, y: 2.0**16 * F.cross_entropy(x, y),  # as GradScaler
        lambda x, y: U.cross_entropy(x, y) / 8,  # of accumulated batches
    ],
)
def test_a_loss_of_ours_a_scaled_or_a_summed_one_does_not(loss, tokens):
    assert gradient_warnings(model_of(), tokens, loss) == []
