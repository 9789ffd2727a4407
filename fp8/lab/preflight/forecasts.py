"""The step of a preflight's finalists on each accelerator, by the code that the compiler makes."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
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

# The part of the budget for the compiler.
FORECAST_PART = 1 / 5

Question = tuple[Hardware, list[Policy]]


def compile_steps(
    problem: Problem, hardware: Sequence[Hardware], findings: Findings, budget: Budget
) -> None:
    """Adds to `Findings.forecasts` what the compiler's code tells of bf16, of recipe "tensor" and
    of the finalist, or writes why not."""
    known = [(row, _policies(row, findings)) for row in hardware if row.name in CARDS]
    questions = [(row, policies) for row, policies in known if policies]
    if questions:
        findings.not_forecast = why_not()
    if findings.not_forecast or not questions:
        return
    answers = _answers(problem, questions, budget.part(FORECAST_PART))
    made = [Forecast.from_dict(a) for a in answers if isinstance(a, dict)]
    findings.forecasts += made
    if len(made) < len(questions):
        late = f"compiling took longer than {FORECAST_PART:.0%} of the budget"
        failed = next((a for a in answers if isinstance(a, str)), late)
        count = f"{len(made)} of {len(questions)} accelerators"
        findings.not_forecast = f"{count}: {failed}"


def _policies(hardware: Hardware, findings: Findings) -> list[Policy]:
    """Returns the policies to forecast: those that the units of the accelerator can run."""
    names = {PLAIN.name}
    if best := finalists(findings).get(hardware.name):
        names.add(best.name)
    names &= runs_on(findings, hardware.name)
    asked = (c for c in findings.candidates if c.name in names)
    return [replace(Policy.from_dict(c.policy), name=c.name) for c in asked]


def _answers(
    problem: Problem, questions: Sequence[Question], budget: Budget
) -> list[dict[str, Any] | str]:
    """The figures of a `Forecast` for each accelerator, or the error as text, within the budget."""
    # A process of its own, as a thread that compiles cannot be ended when the time is up. Forked,
    # as a model need not be picklable; torch has no compiler for GPUs where there is no fork.
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


def _answer(
    sender: Connection, problem: Problem, questions: Sequence[Question]
) -> None:
    torch.set_num_threads(1)  # the threads of a process do not survive a fork
    model = problem.setup.model
    batch = problem.batch
    loss = problem.setup.loss
    for hardware, policies in questions:
        try:
            result = forecast(model, batch, loss, recipes=policies, hardware=hardware)
            sender.send(asdict(result))
        except Exception as error:  # of the code of the model, or of the compiler
            sender.send(described(error))
