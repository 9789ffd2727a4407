"""Each cast of a layer that loses a tenth of its operand is named while a model trains, whoever set
the scale; healthy models are not."""

import itertools
import math
from functools import partial

import torch
from torch import nn

import fp8
import unit_scaling as uu
from benchmarks.problems import PROBLEMS, Problem, read, zoo
from fp8.lab.preflight.training import loss_of
from fp8.warnings import PitfallWarning
from tests.shared import normal, one_in, parametrize, said, sampled
from unit_scaling.transforms import unit_scale

OPERANDS = ("input", "weight", "grad")
LOSSES = {"zero": 2.0**-30, "saturated": 2.0**20, "nonfinite": math.inf}
"""What is lost -> the factor of the operand's first rows that loses it."""
ROWS = 24  # of 64
OFF = 50
"""Octaves by which a scale is off: more than e5m2 has."""
SETTERS = ("unit", "calibration", "first step")
CASES = tuple(itertools.product(SETTERS, LOSSES, OPERANDS))


class Net(nn.Module):
    """Returns a loss; a factor of each row of the operands of ``middle``, 1 at first."""

    def __init__(self, linear=nn.Linear):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (linear(64, 64) for _ in range(3))
        for name in OPERANDS:
            self.register_buffer(name, torch.ones(64, 1))

    def forward(self, x, target):
        y = self.middle(self.first(x) * self.input)
        return (self.last(y * self.grad) * target).sum()


def batch(seed=0):
    return normal(64, 64, seed=seed), normal(64, 64, seed=seed + 100)


def harm(model, operand, factor):
    """Multiplies the first rows of an operand."""
    where = model.middle.weight if operand == "weight" else getattr(model, operand)
    with torch.no_grad():
        where[:ROWS] *= factor


def converted(setter, loss):
    """A model, its scales set but those of the first step."""
    if setter == "unit":
        return fp8.convert(Net(uu.Linear), "unit")
    if setter == "first step" and loss != "zero":
        return fp8.convert(unit_scale(Net(), batch=batch()))
    model = fp8.convert(Net(), "static")
    if setter == "calibration":
        fp8.calibrate(model, batch())
    return model


def train(setter, loss, operand, around=lambda model: model):
    """8 steps of SGD. The operand is harmed before the first, or in the third if the first has set
    the scale to its RMS, which nothing saturates at; a calibrated scale is moved where nothing is
    finite or not."""
    model = converted(setter, loss)
    begins = 3 if (setter, loss) == ("first step", "saturated") else 1
    step = around(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-8)
    for number in range(1, 9):
        if number == begins and (setter, loss) == ("calibration", "nonfinite"):
            scales = fp8.calibration(model)
            scales[f"middle.{operand}"] += OFF
            fp8.calibrate(model, scales=scales)
        elif number == begins:
            harm(model, operand, LOSSES[loss])
        optimizer.zero_grad()
        step(*batch(number)).backward()
        optimizer.step()


WAYS = {
    "eager": lambda model: model,
    "compiled": partial(torch.compile, backend="aot_eager"),
}


@parametrize("way", ["eager", one_in(7, "compiled")])
@parametrize(("setter", "loss", "operand"), CASES)
def test_each_loss_is_named(setter, loss, operand, way):
    with said(PitfallWarning) as texts:
        train(setter, loss, operand, WAYS[way])
    assert any(f"{operand} of 'middle'" in text for text in texts), texts


MAMBA = Problem("Mamba", "decoder", "transformers", partial(zoo, "Mamba"), read)
HEALTHY = ("GPT-2", "Llama", "residual", "MLP", "DiT")


@sampled(5)
@parametrize("recipe", ["static", "tensor", "row", "block", "mxfp8", "delayed"])
@parametrize("name", [*HEALTHY, "Mamba"])
def test_healthy_models_are_silent(name, recipe):
    """Warnings are errors here."""
    setup = PROBLEMS.get(name, MAMBA)(0)
    model = fp8.convert(setup.model, recipe)
    for x in itertools.islice(setup.batches, 20):
        setup.optimizer.zero_grad()
        loss_of(model, x, setup.loss).backward()
        setup.optimizer.step()
