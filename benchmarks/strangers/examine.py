"""Everything that is measured of one stranger, phase by phase."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import fp8
import unit_scaling as uu
from benchmarks.casts import Casts
from benchmarks.common import Row
from fp8.common.step import described
from fp8.layers.select import candidates
from unit_scaling.parameter import tags_of
from unit_scaling.transforms import simulate_fp8, unit_scale

from .case import Case, Stranger

__all__ = ["KINDS", "SHARE", "STEPS", "examine", "is_inside"]

SHARE = 0.97
"""A model is inside where so many of its casts are."""

KINDS = ("activation", "weight", "gradient", "query-key gradient")
"""The kinds of `uu.verify` that are cast."""

STEPS = 20


def examine(stranger: Stranger, send: Callable[[Row], None]) -> None:
    """Measures a stranger; sends its row after every phase, each time with more of it."""
    row = stranger.row()
    case = _built(stranger)
    _step(case, case.model)
    row["parameters"] = sum(p.numel() for p in case.model.parameters())
    row["result"] = "not finished"
    row["details"] = {}
    send(row)
    for phase in (_unit, _static, _plain_training):
        try:
            phase(stranger, row)
        except Exception as error:
            row[phase.__name__.removeprefix("_")] = f"failed: {described(error)}"
            if phase is _unit:
                row["result"] = f"failed: {described(error)}"
        send(row)


def _built(stranger: Stranger) -> Case:
    _seed(0)
    case = stranger.build()
    case.model.train()
    return case


def _seed(number: int) -> None:
    """Seeds all generators: some models begin with Python's random numbers."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(number)


def _step(case: Case, model: nn.Module) -> tuple[Any, Tensor]:
    """A forward and backward pass: the output, and the loss."""
    model.zero_grad()
    _seed(1)
    output, loss = case.run(model)
    loss.backward()
    return output, loss


def _cast_step(case: Case, model: nn.Module, row: Row, key: str) -> Casts:
    """A step, and its share of casts inside in the row."""
    casts = Casts(model)
    with casts.sampled:
        _step(case, model)
    row[key] = _rounded(casts.share)
    row["details"][key] = casts.outside()[:8]
    return casts


def _train(case: Case, model: nn.Module, optimizer: Optimizer) -> float:
    """The last loss of some steps over the first."""
    losses = []
    for _ in range(STEPS):
        losses.append(float(_step(case, model)[1].detach()))
        optimizer.step()
    return round(losses[-1] / losses[0], 4)


def _unit(stranger: Stranger, row: Row) -> None:
    """Unit-scaled in FP8: the second step, `uu.verify`, and a step after training."""
    case = _built(stranger)
    model = simulate_fp8(unit_scale(case.model))
    _, loss = _step(case, model)
    if not loss.isfinite():
        raise ValueError(f"the loss is {float(loss)}")
    sizes = [math.log2(tags_of(p).mup_scale) for p in model.parameters()] or [0.0]
    row["numbers"] = [round(min(sizes), 1), round(max(sizes), 1)]
    casts = _cast_step(case, model, row, "unit")
    row["casts"], row["inside"] = len(casts.seen), is_inside(casts.share)
    row["result"] = "runs"
    try:
        torch.manual_seed(1)
        found = uu.verify(model, case.batch, loss=case.loss_of)
        shares = [None if math.isnan(s := found.share(kind)) else s for kind in KINDS]
        row["verify"] = [_rounded(share) for share in shares]
        row["agrees"] = all(map(is_inside, shares)) == row["inside"]
        rows = [
            f"{r.tensor} of {r.path} ({r.call}): {r.rms:.2g}" for r in found.outside
        ]
        row["details"]["verify"] = rows[:8]
    except Exception as error:
        row["verify"] = f"failed: {described(error)}"
    optimizer = uu.optim.AdamW(model.parameters(), lr=0.25)
    row["fp8_fall"] = _train(case, model, optimizer)
    _cast_step(case, model, row, "trained")


def is_inside(share: float | str | None) -> bool:
    """Whether `SHARE` of the casts are, if there are any. The text of a failure is not."""
    return share is None or (not isinstance(share, str) and share >= SHARE)


def _static(stranger: Stranger, row: Row) -> None:
    """The share of the plain model under recipe "static"; None without layers."""
    case = _built(stranger)
    if not candidates(case.model):
        row["static"] = None
        return
    model = fp8.convert(case.model, "static")
    torch.manual_seed(1)
    fp8.calibrate(model, case.batch, case.loss_of)
    _cast_step(case, model, row, "static")


def _plain_training(stranger: Stranger, row: Row) -> None:
    case = _built(stranger)
    optimizer = torch.optim.AdamW(case.model.parameters(), lr=2e-3)
    row["fp32_fall"] = _train(case, case.model, optimizer)


def _rounded(share: float | None) -> float | None:
    return None if share is None else round(share, 3)
