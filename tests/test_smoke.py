"""One call of each public name of `fp8`, by the example of its docstring or here, and of what users
of `unit_scaling` meet first: `pytest -m smoke`, under a minute."""

import doctest
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import fp8
import unit_scaling as uu
from fp8.lab.hardware import HARDWARE
from tests.shared import descend, seeded
from unit_scaling.transforms import simulate_fp8, unit_scale

pytestmark = pytest.mark.smoke

CARD = replace(HARDWARE["h100"], name="mine")  # not known to the compiler: estimated


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16)
    )


def batch():
    return torch.randn(8, 16, generator=seeded(1))


def converted(recipe="tensor"):
    return fp8.convert(model(), recipe)


def exported(folder):
    fp8.export(converted("row"), folder)
    return fp8.load(model(), folder)(batch())


LANGUAGE = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16))

#: What is no function. A preflight trains: it has its own tests.
VALUES = set(
    "FORMATS LEVELS RECIPES Format PitfallWarning ScaledTensor __version__".split()
)
VALUES |= {"preflight", "warnings"}

CALLS = {
    "Cast": lambda _: fp8.Cast(format="e4m3", scaling="tensor"),
    "Recipe": lambda _: fp8.Recipe(name="mine", input=fp8.Cast(format="e4m3")),
    "Rule": lambda _: fp8.Rule(name="mine", magnitude=lambda values, _: values.mean()),
    "calibration": lambda _: fp8.calibration(converted("static")),
    "checkpoint_contexts": lambda _: fp8.checkpoint_contexts(),
    "export": exported,
    "forecast": lambda _: fp8.forecast(
        model(), batch(), recipes=("unit",), hardware=CARD
    ),
    "optim": lambda _: fp8.optim.AdamW(model().parameters(), first_moment="e4m3"),
    "parity": lambda _: fp8.parity(LANGUAGE, [torch.arange(8)[None]], bound=1.0),
    "quantize": lambda _: fp8.quantize(torch.tensor(1.3), "e4m3") == 1.25,
    "record": lambda _: fp8.record(converted(), writer=print),
    "reduce_amax": lambda _: fp8.reduce_amax(converted("delayed")) is None,
    "report": lambda _: fp8.report(converted()),
    "revert": lambda _: type(fp8.revert(converted())[0]) is nn.Linear,
    "stats": lambda _: fp8.stats(converted(), every=1),
    "weights": lambda _: fp8.weights(converted("row")),
}
"""Name of `fp8` whose docstring has no example -> a call that returns something true."""


@pytest.mark.filterwarnings("ignore::fp8.PitfallWarning")
@pytest.mark.parametrize("name", fp8.__all__)
def test_each_name_works(name, tmp_path):
    value, output = getattr(fp8, name), []
    assert value is not None
    if name in CALLS:
        result = CALLS[name](tmp_path)
        assert result is not None
        assert result is not False
    if name in CALLS or name in VALUES:
        return
    globs = {**vars(sys.modules[value.__module__]), "torch": torch}
    (example,) = doctest.DocTestFinder(recurse=False).find(value, name, globs=globs)
    assert example.examples
    ran = doctest.DocTestRunner(verbose=False).run(example, out=output.append)
    assert ran.failed == 0, "".join(output)


def test_a_unit_scaled_model_trains():
    net = simulate_fp8(unit_scale(model()))
    optimizer = uu.optim.AdamW(net.parameters())
    x = batch()
    losses = descend(optimizer, ((net(x) - x).square().mean() for _ in range(8)))
    assert losses[-1] < losses[0]
    assert not uu.report(net).left_alone
