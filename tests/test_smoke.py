"""One call of each public name of `fp8`, and of what users of `unit_scaling` meet first:
`pytest -m smoke`, under a minute."""

from __future__ import annotations

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


def loss(output: Any) -> Tensor:
    return output.square().mean()


def converted(recipe: str = "tensor") -> nn.Module:
    return fp8.convert(model(), recipe)


def calibrated() -> nn.Module:
    net = converted("static")
    fp8.calibrate(net, batch(), loss)
    return net


def autocast(folder: Path) -> bool:
    net, x = model(), batch()
    with fp8.autocast("tensor"):
        y = net(x)
    return not torch.equal(y, net(x)) and torch.equal(y, converted()(x))


def recomputed(folder: Path) -> bool:
    x = batch().requires_grad_()
    with fp8.autocast("tensor"):
        y = torch.utils.checkpoint.checkpoint(
            model(), x, use_reentrant=False, context_fn=fp8.checkpoint_contexts
        )
        loss(y).backward()
    return x.grad is not None


def cached(folder: Path) -> bool:
    try:
        net = fp8.convert(model(), "tensor", backend="native")
        want = net(batch())
    except RuntimeError as error:  # before torch 2.12, of a CPU
        return "has no FP8 product" in str(error)
    with fp8.cached_weights(net):
        return torch.equal(net(batch()), want)


def overridden(folder: Path) -> bool:
    net = converted()
    with fp8.override(net, ("0", None, None)):
        other = net(batch())
    return not torch.equal(net(batch()), other)


def stepped(folder: Path) -> bool:
    net = model()
    optimizer = fp8.optim.AdamW(net.parameters(), lr=1e-2, first_moment="e4m3")
    before = net[0].weight.clone()
    loss(net(batch())).backward()
    optimizer.step()
    return not torch.equal(before, net[0].weight)


def exported(folder: Path) -> bool:
    fp8.export(converted("row"), folder)
    return torch.equal(fp8.load(model(), folder)(batch()), fp8.load(model(), folder)(batch()))


def strict(folder: Path) -> bool:
    with fp8.strict(), pytest.raises(fp8.warnings.ConvertWarning):
        fp8.convert(nn.Sequential(nn.ReLU()))
    return True


def counted(folder: Path) -> bool:
    net = converted()
    with fp8.stats(net, every=1) as stats:
        loss(net(batch())).backward()
    return len(stats.rows()) > 0


LANGUAGE = nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16))
SWITCHED = fp8.Policy("row", switch=[(0.9, "bf16")])

CALLS: dict[str, Callable[[Path], Any]] = {
    "FORMATS": lambda _: fp8.FORMATS["e4m3"].max == 448,
    "LEVELS": lambda _: fp8.LEVELS["O2"].grad == "e4m3",
    "RECIPES": lambda _: fp8.RECIPES["unit"].grad,
    "Cast": lambda _: fp8.Cast(format="e4m3", scaling="tensor"),
    "Format": lambda _: isinstance(fp8.FORMATS["e5m2"], fp8.Format),
    "LayerNorm2d": lambda _: fp8.LayerNorm2d(4)(torch.randn(2, 4, 3, 3)).shape[1] == 4,
    "PitfallWarning": lambda _: issubclass(fp8.warnings.ScaleWarning, fp8.PitfallWarning),
    "Policy": lambda _: fp8.Policy.hidden("row").to_json(),
    "Recipe": lambda _: fp8.Recipe(name="mine", input=fp8.Cast(format="e4m3")),
    "Rule": lambda _: fp8.convert(model(), fp8.Policy("row", rules=(fp8.Rule("0"),))),
    "ScaledTensor": lambda _: isinstance(fp8.scaled(batch(), "e4m3"), fp8.ScaledTensor),
    "__version__": lambda _: fp8.__version__,
    "advance": lambda _: fp8.advance(fp8.convert(model(), SWITCHED), 0.95),
    "apply_low_precision_layernorm": lambda _: fp8.apply_low_precision_layernorm(model()),
    "autocast": autocast,
    "blame": lambda _: str(fp8.blame(converted(), batch(), loss=loss)),
    "cached_weights": cached,
    "calibrate": lambda _: calibrated(),
    "calibration": lambda _: fp8.calibration(calibrated()),
    "checkpoint_contexts": recomputed,
    "convert": lambda _: converted(),
    "eject": lambda folder: fp8.eject(converted(), folder / "ejected.py").read_text(),
    "export": exported,
    "forecast": lambda _: fp8.forecast(model(), batch(), recipes=("unit",), hardware=CARD),
    "initialize": lambda _: fp8.initialize(model(), None, "O1"),
    "load": exported,
    "optim": stepped,
    "override": overridden,
    "parity": lambda _: fp8.parity(LANGUAGE, [torch.arange(8)[None]], bound=1.0),
    "preflight": lambda _: callable(fp8.preflight),
    "quantize": lambda _: fp8.quantize(torch.tensor(1.3), "e4m3") == 1.25,
    "reduce_amax": lambda _: fp8.reduce_amax(converted("delayed")) is None,
    "report": lambda _: len(fp8.report(converted())),
    "revert": lambda _: type(fp8.revert(converted())[0]) is nn.Linear,
    "scaled": lambda _: fp8.scaled(batch(), "e4m3").nbytes < batch().nbytes,
    "stats": counted,
    "store_frozen": lambda _: fp8.store_frozen(model().requires_grad_(False)),
    "strict": strict,
    "warnings": lambda _: fp8.warnings.RecipeWarning,
    "weights": lambda _: fp8.weights(converted("row")),
}
"""Name of `fp8` -> a call that returns something true. A preflight trains: it has its own tests."""


@pytest.mark.filterwarnings("ignore::fp8.PitfallWarning")
@pytest.mark.parametrize("name", CALLS)
def test_each_name_works(name: str, tmp_path: Path):
    result = CALLS[name](tmp_path)
    assert result is not None
    assert result is not False


def test_every_name_is_called():
    assert CALLS.keys() == set(fp8.__all__)


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
