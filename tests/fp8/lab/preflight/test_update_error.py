"""The update error against its definition in float64, and the ranges of operands."""

import math
from dataclasses import replace

import pytest
import torch

import fp8
from fp8.lab.preflight.search import shares
from fp8.lab.preflight.training import Problem, train
from fp8.lab.preflight.update_error import EPSILON, Probe
from fp8.lab.trace import trace
from tests.shared import parametrize, refuses

from .problems import Classifier, setup


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


@parametrize("recipe", "tensor row mxfp4 bf16".split())
def test_it_is_its_definition(probe, recipe):
    measure, snapshot = probe
    exact, cast = gradients(snapshot, None), gradients(snapshot, recipe)
    noise = signal = 0.0
    for name, g in exact.items():
        v = snapshot.second_moments[name].double()
        root = (v + 0.001 * g.square()).sqrt() + EPSILON
        widest = (
            v + 0.001 * torch.maximum(g.abs(), cast[name].abs()).square()
        ).sqrt() + EPSILON
        noise += float(((cast[name] - g) / widest).square().sum())
        signal += float((g / root).square().sum())
    assert measure(recipe) == pytest.approx(math.sqrt(noise / signal), rel=1e-4)


def test_it_is_zero_without_casts_and_the_model_is_as_before(probe):
    measure, _ = probe
    measure("mxfp4")
    assert measure(fp8.Policy(None)) == 0.0
    assert measure("row") == measure("row")


def test_squares_of_layers_add(probe):
    """To a factor of 2 on this model; a GPT's agree to 20 % (docs/preflight.md)."""
    measure, snapshot = probe
    layers = shares(trace(Classifier(), snapshot.batch))
    squares = [
        measure(fp8.Policy(None, rules=[(x, None, "mxfp4")])) ** 2 for x in layers
    ]
    assert sum(squares) == pytest.approx(measure("mxfp4") ** 2, rel=0.5)


def test_a_gradient_of_zero_or_nan_is_refused():
    problem = Problem(setup, 4, 2)
    _, (snapshot,) = train(problem, "x", snapshots=(2,))
    for factor, what in ((0.0, "zero"), (math.nan, "not finite")):
        with refuses(what):
            Probe(replace(snapshot, loss=lambda loss, factor=factor: loss * factor))
