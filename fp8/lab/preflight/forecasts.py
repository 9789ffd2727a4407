"""The step of a preflight's finalists on each accelerator, by the code that the compiler makes."""

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
from ..forecast.forecast import forecast
from ..forecast.result import Forecast
from ..hardware import Hardware
from .findings import Findings
from .paired_runs import Budget
from .search import finalists, runs_on
from .training import Problem

FORECAST_PART = 1 / 5
"""The part of the budget for the compiler."""


def compile_steps(
    problem: Problem, hardware: Sequence[Hardware], findings: Findings, budget: Budget
) -> None:
    """Adds to `Findings.forecasts` what the compiler's code tells of bf16, of recipe "tensor" and
    of the finalist, or writes why not. It runs in a process of its own, which is ended when the
    time is up."""
    known = (row for row in hardware if row.name in CARDS)
    questions = [(row, asked) for row in known if (asked := _policies(row, findings))]
    reason = why_not() if questions else ""
    if questions and not reason:
        answers = _answers(problem, questions, budget.part(FORECAST_PART))
        made = [Forecast.from_dict(a) for a in answers if isinstance(a, dict)]
        findings.forecasts += made
        if len(made) < len(questions):
            late = f"compiling took longer than {FORECAST_PART:.0%} of the budget"
            failed = next(
                (answer for answer in answers if isinstance(answer, str)), late
            )
            reason = f"{len(made)} of {len(questions)} accelerators: {failed}"
    findings.not_forecast = reason


def _policies(hardware: Hardware, findings: Findings) -> list[Policy]:
    """Returns the policies to forecast: those that the units of the accelerator can run."""
    best = finalists(findings).get(hardware.name)
    names = {PLAIN.name, best.name if best else ""} & runs_on(findings, hardware.name)
    asked = (c for c in findings.candidates if c.name in names)
    return [replace(Policy.from_dict(c.policy), name=c.name) for c in asked]


def _answers(problem: Problem, questions: Sequence[Any], budget: Budget) -> list[Any]:
    """For each accelerator the figures of a `Forecast`, or the error as text, in time."""
    # Torch has no compiler for GPUs without it.
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(
        target=_answer, args=(sender, problem, questions), daemon=True
    )
    answers = []
    with warnings.catch_warnings():
        # Python 3.12 warns of every fork.
        warnings.simplefilter("ignore", DeprecationWarning)
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


def _answer(sender: Any, problem: Problem, questions: Sequence[Any]) -> None:
    torch.set_num_threads(1)  # the threads of a process do not survive a fork
    model, batch, loss = problem.setup.model, problem.batch, problem.setup.loss
    for hardware, policies in questions:
        try:
            result = forecast(model, batch, loss, recipes=policies, hardware=hardware)
            sender.send(asdict(result))
        except Exception as error:  # of the code of the model, or of the compiler
            sender.send(described(error))
