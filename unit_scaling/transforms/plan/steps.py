"""The words of a plan: what to do at a call, what the report says of it, what was asked for."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from fp8.common.report import LEFT_ALONE

from ...rules.table import Constraint
from ..capture.record import Key, Place, Slot

__all__ = [
    "MEASURED",
    "Decision",
    "Plan",
    "Row",
    "Scaling",
    "Settings",
    "Settled",
    "Step",
    "Tie",
    "Weights",
    "with_slots",
]

MEASURED = "measured"
"""What the report says of a call that has no rule, and a factor that was measured."""

Scaling = tuple[Slot, float, float]
"""(slot, forward factor, backward factor) of an argument."""


@dataclass(frozen=True)
class Step:
    """What to do at one call. Plain data: it is pickled with the model and read by the compiler.

    op: the row of OPS that computes it, "replace" or "times" (see `run.replay`), or None for the
    call as it is. constraint: as in OPS; in a product, its scales, which hold the ratios of gauges
    (`measure.gauge`). factor: what the special steps are called with. slots: for arguments.
    output: the factor of the result. writes: whether the call writes it into its first argument.
    end: of a call whose result is one of the model and of no other call, the gauge of its gradient
    and the binary logarithm of the RMS that it was measured with. settings: further arguments of
    the row.
    static: arguments that are cast at a static scale, with its exponent; see `fp8.casts.operands`.
    """

    op: str | None = None
    constraint: Constraint = "to_output_scale"
    factor: float = 1.0
    slots: tuple[Scaling, ...] = ()
    output: float = 1.0
    writes: bool = False
    end: tuple[int, float] | None = None
    settings: tuple[tuple[str, Any], ...] = ()
    static: tuple[tuple[Slot, int], ...] = ()


Decision = tuple[Step | None, str, str]
"""(step, what the report says was done or "" for no line, why)."""


@dataclass(frozen=True)
class Row:
    """A line of the report. number: how many calls of the kind came before in the module."""

    path: str
    call: str
    done: str
    why: str = ""
    number: int = 0

    @property
    def left_alone(self) -> bool:
        return self.done == LEFT_ALONE


@dataclass(frozen=True)
class Tie:
    """An equation for the binary logarithms of the factors that the plain model's parameters have:
    the sum of coefficient * unknown over ``terms``, and ``constant``, is 0.

    terms: (name of a parameter or buffer, coefficient). path, call, why: where it is from.
    soft: "" for one that has to hold. "norm": best near 0, as an eps then counts for the same.
    "input": the sum is the logarithm of the ratio of a product's input.
    """

    terms: tuple[tuple[str, float], ...]
    constant: float
    path: str
    call: str
    why: str
    soft: str = ""


@dataclass
class Plan:
    """The steps of every known call, None for those that stay as they are, and their report.

    inner: readout weights that turn out not to be the last: their output goes on into products or
    residual connections. depths: parameters of residual branches -> layers of their stack.
    outputs: tensor of the result that calls of the model read too -> as `Step.end`. outside: the
    exponent of what arrives from outside, None until it is known:
    see `run.border`. final: whether the gauges are those of the model's own loss. looks: how
    many steps were watched for gradients that were zero. corrections, gauges, parameters: what was
    measured, as in `Settled`. unseen: the products among gauges whose gradient was zero.
    idle: the parameters whose gradient was.
    name: the same in all processes that run the model.
    ties: what the plain model with the same function needs: see `folding.ratios`.
    """

    steps: dict[Key, Step | None] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    inner: frozenset[str] = frozenset()
    depths: dict[str, int] = field(default_factory=dict)
    ties: tuple[Tie, ...] = ()
    outputs: dict[Slot, tuple[int, float]] = field(default_factory=dict)
    outside: int | None = None
    final: bool = False
    looks: int = 0
    corrections: dict[Place, int] = field(default_factory=dict)
    gauges: dict[Key, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    unseen: tuple[Key, ...] = ()
    idle: tuple[str, ...] = ()
    name: str = ""


@dataclass
class Settled:
    """What the first form of call settles for all others, so that they compute the same.

    keys: attention call -> (the number of keys it is scaled for, whether each query sees only the
    keys before it). units: last call of a unit -> the factor of its output.
    carried: as in `plan.carried`. corrections, gauges, parameters: exponents of factors of
    results, and of the gauges of calls and of parameters, as in `measure.gauge`.
    """

    keys: dict[Key, tuple[int, bool]] = field(default_factory=dict)
    units: dict[Key, float] = field(default_factory=dict)
    carried: dict[Place, int] = field(default_factory=dict)
    corrections: dict[Place, int] = field(default_factory=dict)
    gauges: dict[Key, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)

    def settle(self, plan: Plan) -> None:
        """Takes over what was measured for a plan, where it is not settled yet."""
        self.corrections = {**plan.corrections, **self.corrections}
        if plan.final:
            gauges = {k: c for k, c in plan.gauges.items() if k not in plan.unseen}
            self.gauges = {**gauges, **self.gauges}
        if plan.final or plan.outside is not None:
            seen = {name: c for name, c in plan.parameters.items() if name not in plan.idle}
            own = {name: c + (plan.outside or 0) for name, c in seen.items()}
            self.parameters = {**own, **self.parameters}


@dataclass(frozen=True)
class Weights:
    """What the tags of parameters say, by name.

    factors: what the values were divided by. exponents: of the static scale, where it is not 1.
    readouts: the readout weights. split: the lists of parametrizations of weights that were divided
    before they had those.
    """

    factors: dict[str, float]
    exponents: dict[str, int]
    readouts: frozenset[str]
    split: frozenset[str]


@dataclass(frozen=True)
class Settings:
    """What the planner needs to know about the model's weights and the caller's wishes.

    weights: what the tags of the parameters say. preserve: keep the function that the model
    computes. residual: "fixed" or "umup". context: the number of keys of attention, None for that
    of the first call. settled: by the plans that were made before; this one adds to it. whole:
    whether what runs is the model and not a part of it.
    """

    weights: Weights
    replaced: frozenset[str]
    preserve: bool = False
    residual: str = "fixed"
    context: int | None = None
    settled: Settled = field(default_factory=Settled)
    whole: bool = True


def with_slots(step: Step | None, more: list[Scaling]) -> Step | None:
    """The step with further factors for arguments; None if there is nothing to do."""
    if not more:
        return step
    step = step or Step()
    factors = {slot: (fwd, bwd) for slot, fwd, bwd in step.slots}
    for slot, fwd, bwd in more:
        f, b = factors.get(slot, (1.0, 1.0))
        factors[slot] = (f * fwd, b * bwd)
    return replace(step, slots=tuple((slot, fwd, bwd) for slot, (fwd, bwd) in factors.items()))
