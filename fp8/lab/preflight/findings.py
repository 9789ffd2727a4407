"""The findings of `fp8.preflight`: plain data, for JSON, for tables and for the page."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from ..forecast.result import Forecast
from ..trace import Product

__all__ = ["Candidate", "Findings", "Run", "Verdict"]


@dataclass
class Run:
    """A training run. name: the candidate's, or "reference". losses: one per step. held_out: the
    mean loss on the held-out batches at the end. seconds: its duration. data: a checksum of its
    first weights and its batches, which runs that are compared share; 0: not known."""

    name: str
    seed: int
    losses: list[float]
    held_out: float
    seconds: float = 0.0
    data: int = 0


@dataclass
class Candidate:
    """A policy, what its casts do to gradients, and how it trains.

    Attributes:
        name: "mxfp8", or "mxfp8 except lm_head".
        recipe: the recipe's name.
        policy: `fp8.Policy.to_dict`.
        kept: the names of the layers it leaves in high precision.
        share: the share of the FLOPs of all products that it casts.
        bits: per operand, averaged over the FLOPs of all products; high precision counts as 16.
        errors: snapshot step -> update error.
        gap, low, high: the training loss of the last steps minus the reference's: mean over pairs
            of runs, and the interval of the sequential test at its last look; None if not trained.
        seeds: the number of pairs of runs at that look; before the first look, of all.
        outcome: "as the reference", "better", "within chance", "worse", "diverges", "not decided",
            "not trained".
    """

    name: str
    recipe: str
    policy: dict[str, Any] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    share: float = 1.0
    bits: float = 16.0
    errors: dict[int, float] = field(default_factory=dict)
    gap: float | None = None
    low: float | None = None
    high: float | None = None
    seeds: int = 0
    outcome: str = "not trained"


@dataclass
class Verdict:
    """The answer of the measurements, in words, and the policy that follows from them.

    Attributes:
        answer: begins with "Yes", "No" or "Not decided".
        savings: the saving of the policy, for each accelerator.
        reasons: why.
        policy: the recommended policy, `fp8.Policy.to_dict`; if none is, the first to try; {} if
            there is none.
        recommended: whether the policy is recommended.
        code: library -> lines to copy that apply the policy.
    """

    answer: str = ""
    savings: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    policy: dict[str, Any] = field(default_factory=dict)
    recommended: bool = False
    code: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return "\n".join(filter(None, [self.answer, *self.savings, *self.reasons]))


@dataclass
class Findings:
    """All that a preflight measured.

    Attributes:
        model: name, parameters, dtype, device.
        settings: steps, held_out, target, budget, recipes, threads; and chance, the
            standard deviation of the reference's loss over seeds, 0 before there are three.
        versions: fp8, torch, python, platform, date.
        seconds: stage -> seconds.
        verdict: the decision.
        products: the trace.
        runs: training runs, the reference's among them.
        candidates: the candidates in order of their update error.
        forecasts: the forecasts of all candidates on each accelerator, by the sizes of products;
            then of the finalists, by the compiler's code.
        not_forecast: why the latter are missing; "" if none is, and where the compiler does not
            know the accelerators.
        notes: measurements that were left out, with the reasons.
    """

    model: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    verdict: Verdict = field(default_factory=Verdict)
    products: list[Product] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    candidates: list[Candidate] = field(default_factory=list)
    forecasts: list[Forecast] = field(default_factory=list)
    not_forecast: str = ""
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Returns the findings as plain values, for ``json.dumps``."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Findings:
        """The findings that `to_dict` wrote, also after JSON."""
        found = Findings(**values)
        found.verdict = Verdict(**values["verdict"])
        found.products = [Product(**row) for row in values["products"]]
        found.runs = [Run(**row) for row in values["runs"]]
        found.candidates = [Candidate(**row) for row in values["candidates"]]
        found.forecasts = list(map(Forecast.from_dict, values["forecasts"]))
        # In JSON keys are strings, and null stands for a number that is not finite.
        for row in found.candidates:
            errors = row.errors.items()
            row.errors = {int(step): _number(e, math.inf) for step, e in errors}
        for run in found.runs:
            run.losses = list(map(_number, run.losses))
            run.held_out = _number(run.held_out)
        return found


def _number(value: float | None, otherwise: float = math.nan) -> float:
    if value is None:
        return otherwise
    return value
