"""The update error against its definition in float64, and the ranges of operands."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import fp8
from fp8.lab.preflight.search import shares
from fp8.lab.preflight.training import Problem, Setup, Snapshot, train
from fp8.lab.preflight.update_error import EPSILON, Probe, check_reference
from fp8.lab.trace import trace

from .problems import Classifier, batches, setup


@pytest.fixture(scope="module")
def probe():
    problem = Problem(setup, 30, 2)
    _, (snapshot,) = train(problem, "x", snapshots=(20,))
    return Probe(snapshot), snapshot


def gradients(snapshot, recipe):
    model = Classifier()
    model.load_state_dict(snapshot.model.state_dict())
    if recipe:
        fp8.convert(model, recipe, backend="simulate")
    model(*snapshot.batch).backward()
    return {name: p.grad.double() for name, p in model.named_parameters()}


@pytest.mark.parametrize("recipe", ["tensor", "row", "mxfp4", "bf16"])
def test_it_is_its_definition(probe, recipe):
    measure, snapshot = probe
    exact, cast = gradients(snapshot, None), gradients(snapshot, recipe)
    noise = signal = 0.0
    for name, g in exact.items():
        v = snapshot.second_moments[name].double()
        root = (v + 0.001 * g.square()).sqrt() + EPSILON
        widest = (v + 0.001 * torch.maximum(g.abs(), cast[name].abs()).square()).sqrt() + EPSILON
        noise += float(((cast[name] - g) / widest).square().sum())
        signal += float((g / root).square().sum())
    assert measure(recipe) == pytest.approx(math.sqrt(noise / signal), rel=1e-4)


def test_it_is_zero_without_casts_and_the_model_is_as_before(probe):
    measure, _ = probe
    measure("mxfp4")
    assert measure(fp8.Policy(None)) == 0.0
    assert measure("row") == measure("row")


def test_a_loss_with_buffers_is_the_same_in_all_passes_and_not_changed():
    class Decaying(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, output):
            self.calls += 1
            return output / self.calls

    loss = Decaying()
    problem = Problem(Setup(Classifier(), batches(8), loss), 6, 2)
    check_reference(problem)
    _, (snapshot,) = train(problem, "x", snapshots=(4,))
    probe = Probe(snapshot)
    assert probe(fp8.Policy(None)) == 0.0
    assert loss.calls == 0


def test_squares_of_layers_add(probe):
    """To a factor of 2 on this model; a GPT's agree to 20 % (docs/preflight.md)."""
    measure, snapshot = probe
    layers = shares(trace(Classifier(), snapshot.batch))
    squares = [measure(fp8.Policy(None, rules=[(x, None, "mxfp4")])) ** 2 for x in layers]
    assert sum(squares) == pytest.approx(measure("mxfp4") ** 2, rel=0.5)


def test_an_optimizer_without_second_moments_gives_the_plain_relative_error():
    model = Classifier()
    problem = Problem(
        Setup(model, batches(8), None, torch.optim.SGD(model.parameters(), lr=0.1)), 6, 2
    )
    _, (snapshot,) = train(problem, "x", snapshots=(4,))
    assert snapshot.second_moments == {}
    exact, cast = gradients(snapshot, None), gradients(snapshot, "mxfp4")
    noise = sum(float((cast[n] - g).square().sum()) for n, g in exact.items())
    signal = sum(float(g.square().sum()) for g in exact.values())
    found = Probe(snapshot)("mxfp4")
    assert found == pytest.approx(math.sqrt(noise / signal), rel=1e-4)


def test_an_element_that_had_no_gradient_so_far_counts_as_one_step():
    """Its v is 0; Adam's step is at most 1 / sqrt(1 - beta2) = 31.6 of its learning rate."""
    model = nn.Sequential(nn.Linear(4, 2, bias=False))
    x = torch.ones(1, 4)
    moments = {"0.weight": torch.zeros(2, 4)}

    def loss(y):
        return y[0, 0]  # no gradient for the second row

    snapshot = Snapshot(1, model, loss, moments, (x,), frozenset(moments))
    snapshot.second_moments["0.weight"][0] = 1.0
    probe = Probe(snapshot)
    probe._gradients = lambda: [torch.tensor([[1.0] * 4, [1e-3] * 4])]  # a cast makes one
    expected = math.sqrt(4 * 1000 / (4 / 1.001))
    assert probe("tensor") == pytest.approx(expected, rel=1e-3)  # epsilon


def test_a_gradient_of_zero_or_nan_is_refused():
    problem = Problem(setup, 4, 2)
    _, (snapshot,) = train(problem, "x", snapshots=(2,))
    for factor, what in ((0.0, "zero"), (math.nan, "not finite")):
        with pytest.raises(ValueError, match=what):
            Probe(replace(snapshot, loss=lambda loss, factor=factor: loss * factor))


def test_a_gradient_that_overflows_is_an_infinite_error():
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)

        def forward(self, x):
            return self.layer(x).square().mean()

    model = Large()
    problem = Problem(Setup(model, [torch.full((2, 4), 1e4)] * 6), 4, 2)
    _, (snapshot,) = train(problem, "x", snapshots=(2,))
    cast = fp8.Cast(format="e5m2", scaling="unit", overflow="nonfinite")
    recipe = fp8.Recipe(name="overflows", input=None, weight=None, grad=cast)
    found = Probe(replace(snapshot, loss=lambda loss: loss * 1e4))(recipe)
    assert found == math.inf


def test_only_parameters_that_are_stepped_count():
    """As if the others required no gradient."""
    model = Classifier()

    def error(optimizer):
        problem = Problem(Setup(model, batches(8), None, optimizer), 6, 2)
        _, (snapshot,) = train(problem, "x", snapshots=(4,))
        return Probe(snapshot)("mxfp4")

    part = error(torch.optim.AdamW(model.blocks.parameters()))
    for layer in (model.first, model.head):
        layer.requires_grad_(False)
    assert part == error(torch.optim.AdamW(model.blocks.parameters()))


def test_parameters_without_a_moment_beside_others_are_measured_in_the_unit_of_a_step():
    """Their mean square takes its place: gradients of 1e-4 are not lost beside steps of 1."""
    problem = Problem(setup, 30, 2)
    _, (snapshot,) = train(problem, "x", snapshots=(20,))
    whole = Probe(snapshot)("mxfp4")
    for name in [name for name in snapshot.second_moments if name.endswith("weight")]:
        del snapshot.second_moments[name]
    assert Probe(snapshot)("mxfp4") == pytest.approx(whole, rel=0.5)
