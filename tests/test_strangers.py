"""The benchmark of models of other libraries: what it says of casts whose values are known, and the
form of its rows. The libraries themselves are not needed."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.strangers import reduced
from benchmarks.strangers.__main__ import COMPILED, measured, summary
from benchmarks.strangers.case import Case, Stranger, loss_inside
from benchmarks.strangers.casts import SQNR, Casts, CastSeen
from benchmarks.strangers.examine import Options, examine
from unit_scaling.transforms import simulate_fp8


def _seen(scale: float) -> list[CastSeen]:
    """The casts of a layer in FP8 without scales: weights of 1, inputs and gradients of a scale."""
    torch.manual_seed(0)
    model = nn.Linear(256, 64, bias=False)
    nn.init.normal_(model.weight)
    model = simulate_fp8(model)
    casts = Casts(model)
    with casts.sampled:
        (model(scale * torch.randn(64, 256)) * torch.randn(64, 64)).sum().backward()
    return casts.seen


@pytest.mark.parametrize("scale", [1.0, 2.0**-12, 2.0**12])
def test_the_share_of_casts_is_that_of_operands_in_range(scale: float) -> None:
    """The input needs no gradient: two operands forward, the gradient backward."""
    seen = _seen(scale)
    names = [f"{operand} of (model)" for operand in ("input", "weight", "grad again")]
    assert [cast.name for cast in seen] == names
    assert [cast.inside for cast in seen] == [scale == 1, True, True]
    for cast in seen:  # of 2**12 values, each with an error of its own
        assert cast.own == pytest.approx(SQNR[cast.format], abs=0.5)
    assert seen[0].rms == pytest.approx(scale, rel=0.05)


# Rows


def _network() -> Case:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 4))
    return loss_inside(model, F.cross_entropy, torch.randint(4, (32,)), torch.randn(32, 16))


def _broken() -> Case:
    raise RuntimeError("of its own\nand more")


def test_the_row_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda m, **_: compile(m, backend="aot_eager"))
    rows: list[dict[str, Any]] = []
    examine(Stranger("net", "none", _network), Options(train=True, compiled=True), rows.append)
    row = rows[-1]
    assert row["result"] == "runs"
    assert row["inside"]
    assert row["agrees"]
    assert row["casts"] == 3 * 2 + 3  # operands forward, gradients backward
    for key in ("unit", "trained", "static"):
        assert row[key] == 1, row["details"][key]
    assert row["fp32_fall"] < 1
    assert row["fp8_fall"] < 1
    assert float(row["compiled"]) <= COMPILED
    assert json.loads(json.dumps(row)) == row
    assert "1 models: 1 runs; unit inside 1 of 1" in summary([row])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of Python 3.12, with threads
def test_a_model_that_cannot_be_built_is_a_row() -> None:
    row = measured(Stranger("broken", "none", _broken), Options(), 60)
    assert row["result"] == "not built: RuntimeError: of its own and more"
    assert row["name"] == "broken"


def test_an_architecture_is_reduced_built_and_run() -> None:
    pytest.importorskip("transformers")
    (llama,) = (stranger for stranger in reduced.strangers() if stranger.name == "llama")
    case = llama.build()
    assert sum(p.numel() for p in case.model.parameters()) < 200_000
    assert reduced._smaller("layer_types", ["full"] * 3 + ["sliding"]) == ["full", "sliding"]
    assert reduced._smaller("rope_theta", 1e6) == 1e6
    _, loss = case.run(case.model)
    assert loss is not None
