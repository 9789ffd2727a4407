"""One call of each public name of `fp8`, by the example of its docstring or here, and of what users
of `unit_scaling` meet first: `pytest -m smoke`, under a minute."""

from __future__ import annotations

import doctest
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8
import unit_scaling as uu
from fp8.lab.hardware import HARDWARE
from unit_scaling.transforms import simulate_fp8, unit_scale

pytestmark = pytest.mark.smoke

CARD = replace(HARDWARE["h100"], name="mine")  # not known to the compiler: estimated


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 16))


def batch() -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def converted(recipe: str = "tensor") -> nn.Module:
    return fp8.convert(model(), recipe)


def recomputed(folder: Path) -> bool:
    x = batch().requires_grad_()
    with fp8.autocast("tensor"):
        y = torch.utils.checkpoint.checkpoint(
            model(), x, use_reentrant=False, context_fn=fp8.checkpoint_contexts
        )
        y.square().mean().backward()
    return x.grad is not None


def stepped(folder: Path) -> bool:
    net = model()
    optimizer = fp8.optim.AdamW(net.parameters(), lr=1e-2, first_moment="e4m3")
    before = net[0].weight.clone()
    net(batch()).square().mean().backward()
    optimizer.step()
    return not torch.equal(before, net[0].weight)


def exported(folder: Path) -> bool:
    fp8.export(converted("row"), folder)
    return torch.equal(fp8.load(model(), folder)(batch()), fp8.load(model(), folder)(batch()))


def counted(folder: Path) -> bool:
    net = converted()
    with fp8.stats(net, every=1) as stats:
        net(batch()).square().mean().backward()
    return len(stats.rows()) > 0


LANGUAGE = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16))

CALLS: dict[str, Callable[[Path], Any]] = {
    "FORMATS": lambda _: fp8.FORMATS["e4m3"].max == 448,
    "LEVELS": lambda _: fp8.LEVELS["O2"].grad == "e4m3",
    "RECIPES": lambda _: fp8.RECIPES["unit"].grad,
    "Cast": lambda _: fp8.Cast(format="e4m3", scaling="tensor"),
    "Format": lambda _: isinstance(fp8.FORMATS["e5m2"], fp8.Format),
    "PitfallWarning": lambda _: issubclass(fp8.warnings.ScaleWarning, fp8.PitfallWarning),
    "Recipe": lambda _: fp8.Recipe(name="mine", input=fp8.Cast(format="e4m3")),
    "Rule": lambda _: fp8.Rule(name="mine", magnitude=lambda values, _: values.mean()),
    "ScaledTensor": lambda _: isinstance(fp8.scaled(batch(), "e4m3"), fp8.ScaledTensor),
    "__version__": lambda _: fp8.__version__,
    "calibration": lambda _: fp8.calibration(converted("static")),
    "checkpoint_contexts": recomputed,
    "export": exported,
    "forecast": lambda _: fp8.forecast(model(), batch(), recipes=("unit",), hardware=CARD),
    "optim": stepped,
    "parity": lambda _: fp8.parity(LANGUAGE, [torch.arange(8)[None]], bound=1.0),
    "preflight": lambda _: callable(fp8.preflight),  # trains: it has its own tests
    "quantize": lambda _: fp8.quantize(torch.tensor(1.3), "e4m3") == 1.25,
    "reduce_amax": lambda _: fp8.reduce_amax(converted("delayed")) is None,
    "report": lambda _: len(fp8.report(converted())),
    "revert": lambda _: type(fp8.revert(converted())[0]) is nn.Linear,
    "stats": counted,
    "warnings": lambda _: fp8.warnings.RecipeWarning,
    "weights": lambda _: fp8.weights(converted("row")),
}
"""Name of `fp8` whose docstring has no example -> a call that returns something true."""


@pytest.mark.filterwarnings("ignore::fp8.PitfallWarning")
@pytest.mark.parametrize("name", fp8.__all__)
def test_each_name_works(name: str, tmp_path: Path):
    if name in CALLS:
        result = CALLS[name](tmp_path)
        assert result is not None
        assert result is not False
        return
    value, output = getattr(fp8, name), list[str]()
    globs = {**vars(sys.modules[value.__module__]), "torch": torch}
    (example,) = doctest.DocTestFinder(recurse=False).find(value, name, globs=globs)
    assert example.examples
    ran = doctest.DocTestRunner(verbose=False).run(example, out=output.append)
    assert ran.failed == 0, "".join(output)


def test_a_unit_scaled_model_trains():
    net = simulate_fp8(unit_scale(model()))
    optimizer = uu.optim.AdamW(net.parameters())
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        value = (net(batch()) - batch()).square().mean()
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    assert losses[-1] < losses[0]
    assert not uu.report(net).left_alone
