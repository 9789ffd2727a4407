"""The forecast of a preflight: the steps of the finalists, by the code that the compiler makes."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from ...common.step import described
from ...recipes.policy import Policy
from ...recipes.recipe import PLAIN
from ..forecast.card import CARDS, why_not
from ..forecast.forecast import Forecast, forecast
from ..hardware import Hardware
from .budget import Budget
from .choices import finalists
from .findings import Findings
from .training import Problem

FORECAST_PART = 1 / 5
"""The part of the budget for the forecast."""


def forecast_steps(
    problem: Problem, hardware: Sequence[Hardware], findings: Findings, budget: Budget
) -> None:
    """Writes `Findings.forecasts`: of bf16, of recipe "tensor" and of the finalist. They are
    compiled in a process of its own, which is ended when the time is up."""
    policies = ((row, _policies(row, findings)) for row in hardware if row.name in CARDS)
    questions = [(row, asked) for row, asked in policies if asked]
    if not questions:
        return
    reason = why_not()
    answers = [] if reason else _answers(problem, questions, budget.part(FORECAST_PART))
    findings.forecasts = [Forecast.from_dict(a) for a in answers if isinstance(a, dict)]
    missing = len(questions) - len(findings.forecasts)
    if missing and not reason:
        late = f"compiling took longer than {FORECAST_PART:.0%} of the budget"
        failed = next((answer for answer in answers if isinstance(answer, str)), late)
        reason = f"{len(findings.forecasts)} of {len(questions)} accelerators: {failed}"
    findings.not_forecast = reason


def _policies(hardware: Hardware, findings: Findings) -> list[Policy]:
    """Those to forecast, of which the accelerator has units."""
    estimates = (row for row in findings.estimates if row.hardware == hardware.name)
    runs = {row.candidate for row in estimates if not row.why_not}
    best = finalists(findings).get(hardware.name)
    names = runs & {PLAIN.name, best.name if best else ""}
    asked = (c for c in findings.candidates if c.name in names)
    return [replace(Policy.from_dict(c.policy), name=c.name) for c in asked]


_Questions = Sequence[tuple[Hardware, list[Policy]]]


def _answers(problem: Problem, questions: _Questions, budget: Budget) -> list[Any]:
    """For each accelerator the figures of a `Forecast`, or the error as text, until the time is
    up."""
    context = multiprocessing.get_context("fork")  # torch has no compiler for GPUs without it
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender, problem, questions), daemon=True)
    answers = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, for all forks
        process.start()
    sender.close()
    try:
        while receiver.poll(max(budget.left, 0)):
            answers.append(receiver.recv())
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()
        receiver.close()
    return answers


def _answer(sender: Any, problem: Problem, questions: _Questions) -> None:
    torch.set_num_threads(1)  # the threads of a process do not survive a fork
    setup = problem.setup
    model, batch = setup.full_size or (setup.model, problem.batch)
    loss = None if setup.full_size else setup.loss
    for hardware, policies in questions:
        try:
            result = forecast(
                model, batch, loss=loss, recipes=policies, hardware=hardware, layers=False
            )
            sender.send(asdict(result))
        except Exception as error:  # of the code of the model, or of the compiler
            sender.send(described(error))


def step_in_words(findings: Findings, hardware: str, candidate: str) -> str:
    """What a forecast says of a step under a candidate; "" without one."""
    for row in findings.forecasts:
        if row.hardware == hardware and candidate in {v.recipe for v in row.variants}:
            by = f"forecast from the {row.source}'s code"
            share = f"{row.ratio(candidate):.2f} of bf16's time"
            return f" A step, forward and backward, takes {share} ({by})."
    return ""
