"""The compiler's forecasts of a preflight; estimates where torch cannot compile for a GPU."""

import json
import os
import re
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

import fp8
from fp8.lab.forecast.estimate import estimate
from fp8.lab.forecast.result import Forecast
from fp8.lab.hardware import HARDWARE
from fp8.lab.preflight import forecasts
from fp8.lab.preflight.findings import Candidate, Findings
from fp8.lab.preflight.forecasts import compile_steps
from fp8.lab.preflight.page import page
from fp8.lab.preflight.paired_runs import Budget
from fp8.lab.preflight.training import Problem, Setup
from fp8.lab.trace import trace

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked")
DEVICES = [HARDWARE["h100"], HARDWARE["b200"], replace(HARDWARE["h100"], name="mine")]


class Slow(nn.Linear):
    """Takes longer than the budgets of the tests."""

    def forward(self, x):
        time.sleep(60)
        return super().forward(x)


def findings(*names):
    """Of candidates with estimates."""
    rows = [
        Candidate(n, n, fp8.Policy(n).to_dict(), bits=8.0 + i, errors={1: 0.1})
        for i, n in enumerate(names)
    ]
    made = Findings(
        candidates=rows, products=trace(nn.Linear(64, 64), torch.ones(32, 64))
    )
    for device in DEVICES:
        casts = {
            "bf16": {},
            **{n: {p.layer: fp8.RECIPES[n] for p in made.products} for n in names},
        }
        variants = (
            estimate(made.products, cast, device, name) for name, cast in casts.items()
        )
        made.forecasts.append(Forecast(device.name, "estimate", tuple(variants)))
    return made


def compiled(made):
    return made.forecasts[len(DEVICES) :]


def problem(kind=nn.Linear, inputs=64):
    batches = [torch.ones(32, inputs)] * 3
    return Problem(Setup(kind(64, 64), batches, lambda y: y.sum()), 2, 1)


@forks
def test_finalists_are_forecast_on_each_accelerator_that_the_compiler_knows(
    monkeypatch,
):
    monkeypatch.setattr(forecasts, "why_not", lambda: "")
    found = findings("mxfp8", "row", "tensor", "block")
    compile_steps(problem(), DEVICES, found, Budget(1e5))
    assert found.not_forecast == ""
    names = {row.hardware: [v.recipe for v in row.variants] for row in compiled(found)}
    assert names == {
        "h100": ["bf16", "row", "tensor"],
        "b200": ["bf16", "mxfp8", "tensor"],
    }
    again = Findings.from_dict(json.loads(json.dumps(found.to_dict())))
    assert again.forecasts == found.forecasts


@pytest.mark.parametrize(
    ("devices", "reason"),
    [(DEVICES, "torch is a build without CUDA"), (DEVICES[2:], "")],
)
def test_without_a_compiler_for_gpus_the_page_says_so(devices, reason, monkeypatch):
    """And nothing of accelerators that it does not know."""
    monkeypatch.setattr(forecasts, "why_not", lambda: "torch is a build without CUDA")
    found = findings("tensor")
    compile_steps(problem(), devices, found, Budget(1e5))
    assert (compiled(found), found.not_forecast) == ([], reason)
    assert (f"code: {reason}." in page(found)) == bool(reason)


@forks
def test_a_process_that_does_not_end_in_time_is_ended(monkeypatch):
    monkeypatch.setattr(forecasts, "why_not", lambda: "")
    found = findings("tensor")
    begun = time.monotonic()
    compile_steps(problem(Slow), DEVICES, found, Budget(5.0))
    assert time.monotonic() - begun < 50
    assert found.not_forecast.startswith("0 of 2 accelerators: compiling took longer")
    # An error of the model.
    compile_steps(problem(inputs=3), DEVICES, found, Budget(1e5))
    assert re.match("0 of 2 accelerators: .*RuntimeError", found.not_forecast)
