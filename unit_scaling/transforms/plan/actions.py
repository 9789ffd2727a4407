"""The data types of a plan: steps, report rows, settings."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from fp8.common.report import LEFT_ALONE

from ...rules.table import Constraint
from ..capture.record import CallNode, Key, Place, Slot

MEASURED = "measured"
"""The report's word for a call without a rule whose factor was measured."""

Scaling = tuple[Slot, float, float]
"""(slot, forward factor, backward factor) of an argument."""


@dataclass(frozen=True)
class Step:
    """What to do at one call. Plain data: it is pickled with the model and read by the compiler.

    op: the row of OPS that computes it, "replace" or "times" (see `run.replay`); None runs the call
    itself. constraint: as in OPS; for a product, its scales, which include the ratios of gauges
    (`measure.gauge`). factor: the argument of the special steps. slots: factors of arguments.
    output: the factor of the result. writes: whether the call writes its result into its first
    argument. end: for a result that only the model returns, the gauge of its gradient and log2 of
    the RMS it was measured with; also for one that is kept (see `measure.look`) and read. starts:
    arguments that are kept, and the gauge of each. settings: further arguments of the row. static:
    arguments cast at a static scale, and its exponent; see `fp8.casts.operands`.
    """

    op: str | None = None
    constraint: Constraint = "to_output_scale"
    factor: float = 1.0
    slots: tuple[Scaling, ...] = ()
    output: float = 1.0
    writes: bool = False
    end: tuple[int, float] | None = None
    starts: tuple[tuple[Slot, int], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    static: tuple[tuple[Slot, int], ...] = ()


Decision = tuple[Step | None, str, str]
"""(step, what the report says was done or "" for no row, why)."""


@dataclass(frozen=True)
class CallRow:
    """A row of the report. number: how many calls of the same kind precede it in the module."""

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
    """A linear equation for log2 of the factors of the plain model's parameters.

    The sum of coefficient * unknown over ``terms``, plus ``constant``, is 0. terms: (name of a
    parameter or buffer, coefficient). path, call, why: its origin. soft: "" for an equation that
    must hold; "norm" for one best near 0, where eps has the same effect; "input" if the sum is the
    log2 ratio of a product's input.
    """

    terms: tuple[tuple[str, float], ...]
    constant: float
    path: str
    call: str
    why: str
    soft: str = ""


@dataclass(frozen=True)
class Placed:
    """A call of a plan in the flow of gradients.

    step: without its `Step.end`. gauge: of the result; None if it has no gradient. sources: the
    gauge of each argument that has one. written: the arguments that the result is written into.
    kept: for a result that is kept, log2 of the RMS in `Step.end`.
    """

    key: Key
    step: Step | None
    gauge: int | None
    sources: tuple[tuple[Slot, int], ...]
    written: tuple[Slot, ...]
    kept: float | None = None


class Norm(NamedTuple):
    """The square of the norm of a gradient, its number of elements, and the square of the norm of
    their rounding errors."""

    square: float
    numel: int
    rounding: float


@dataclass
class Arriving:
    """The exponent of gradients that arrive at the output, None until known: see `run.border`."""

    exponent: int | None = None


@dataclass
class Plan:
    """The steps of every known call (None: unchanged) and their report.

    inner: readout weights that are not last: their output feeds products or residual connections.
    depths: parameter of a residual branch -> layers of its stack. outputs: tensor of the model's
    result that other calls read too -> as `Step.end`. arriving: shared by plans that may run in one
    step, whose gradients need one exponent. entry: the gauge of the arguments. final:
    whether the gauges were measured with the model's own loss. looks: the number of steps watched
    for zero gradients. corrections, operands, gauges, parameters: measurements, as in `Settled`.
    unseen: products with gauges whose gradient was zero. idle: parameters whose gradient was zero.
    name: the same in all processes that run the model. ties: the equations for `folding.ratios`.
    kept: attributes of modules that hold tensors with gradients after a run, as the begin of a
    `Slot` with `HELD`. ends: all results, as in `outputs`. true: whether all gradients must be
    those of the function, as one has been differentiated. calls, places: every call and the first
    one at each place of the code, for runs whose gauges are tracked (`run.varying`). watched:
    gradients of products in the latest step of the model. in_pairs: as in `capture.record.Calls`.
    """

    steps: dict[Key, Step | None] = field(default_factory=dict)
    rows: list[CallRow] = field(default_factory=list)
    inner: frozenset[str] = frozenset()
    depths: dict[str, int] = field(default_factory=dict)
    ties: tuple[Tie, ...] = ()
    ends: dict[Slot, tuple[int, float]] = field(default_factory=dict)
    outputs: dict[Slot, tuple[int, float]] = field(default_factory=dict)
    arriving: Arriving = field(default_factory=Arriving)
    entry: int = 0
    final: bool = False
    looks: int = 0
    corrections: dict[Place, int] = field(default_factory=dict)
    operands: dict[tuple[Key, Slot], int] = field(default_factory=dict)
    gauges: dict[Key, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    unseen: tuple[Key, ...] = ()
    idle: tuple[str, ...] = ()
    name: str = field(default="", compare=False)
    kept: tuple[Slot, ...] = ()
    true: bool = False
    in_pairs: bool = False
    calls: dict[Key, Placed] = field(default_factory=dict, compare=False)
    places: dict[Place, Placed] = field(default_factory=dict, compare=False)
    watched: dict[Key, Norm] = field(default_factory=dict, compare=False)

    @cached_property
    def counts(self) -> dict[str, Counter[str]]:
        """Module path -> the number of its calls of each kind."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for path, kind, _ in self.steps:
            found[path][kind] += 1
        return found

    @property
    def measured(self) -> dict[str, int]:
        """`parameters` without those ``idle``."""
        return {name: c for name, c in self.parameters.items() if name not in self.idle}

    @property
    def outside(self) -> int | None:
        """The exponent of gradients that arrive at the output; None until known."""
        return self.arriving.exponent

    def step_of(self, call: CallNode) -> Step | None:
        """The step of a recorded call; None for a call without one."""
        return None if call.key is None else self.steps.get(call.key)

    def covers(self, path: str) -> bool:
        """Whether it has steps of the module at ``path``."""
        return any(f"{other}.".startswith(f"{path}.") for other, _, _ in self.steps)

    def in_its_gauge(self, places: dict[Place, Placed]) -> dict[Place, Placed]:
        """The calls of an earlier plan in the gauge of this one, if all of its calls have one.
        Arguments are expected in one as much larger, so that the factors of the steps stay."""
        gauges = {call.gauge for call in self.calls.values()} - {None}
        gauge, found = gauges.pop() if len(gauges) == 1 else None, dict(places)
        for at, call in places.items():
            if gauge is not None and call.gauge is not None:
                sources = tuple((slot, c + gauge - call.gauge) for slot, c in call.sources)
                found[at] = replace(call, gauge=gauge, sources=sources)
        return found

    def other_paths(self, made: Mapping[tuple[str, str], int]) -> set[str]:
        """The modules that have made another number of calls of a kind with steps than planned.
        made: (module path, kind) -> number of calls in a run, in which some modules may not run."""
        ran = {path for path, _ in made}
        return {
            path
            for (path, kind, _), step in self.steps.items()
            if step is not None
            and path in ran
            and made.get((path, kind), 0) != self.counts[path][kind]
        }


@dataclass
class Settled:
    """What the first call signature fixes for all others, so that they compute the same.

    keys: attention call -> (the number of keys to scale for, whether it is causal). factors: of the
    results of products, by call and op. units: last call of a formula -> the factor of its output.
    weights: the factors of arguments that are computed from parameters. shares: call that joins
    values and parameters -> the factors of its terms. loops: as ``known`` in `Regions.loops`.
    corrections, operands, gauges, parameters: exponents of the factors of results and of arguments
    of products, and of the gauges of calls and parameters (`measure.gauge`). varying: the paths of
    modules whose number of calls depends on values, True for each (`run.varying`). twice: whether
    gradients of the model are differentiated, and so have no gauges.
    """

    keys: dict[Key, tuple[int, bool]] = field(default_factory=dict)
    factors: dict[tuple[Key, str], float] = field(default_factory=dict)
    units: dict[Key, float] = field(default_factory=dict)
    weights: dict[tuple[Key, Slot], float] = field(default_factory=dict)
    shares: dict[Key, tuple[Scaling, ...]] = field(default_factory=dict)
    loops: dict[Place, str] = field(default_factory=dict)
    corrections: dict[Place, int] = field(default_factory=dict)
    operands: dict[tuple[Key, Slot], int] = field(default_factory=dict)
    gauges: dict[Key, int] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    varying: dict[str, bool] = field(default_factory=dict)
    twice: bool = False

    def fixed(self) -> dict[tuple[str, Any], Any]:
        """What depends on the first batch alone, by (field, key)."""
        fields = ("keys", "factors", "units", "weights", "shares", "loops")
        return {(name, k): v for name in fields for k, v in getattr(self, name).items()}

    def fix(self, values: Mapping[tuple[str, Any], Any]) -> bool:
        """Sets entries, as JSON holds them, and returns whether any has changed."""
        before = self.fixed()
        for (name, key), value in values.items():
            getattr(self, name)[key] = tupled(value)
        return self.fixed() != before

    def differentiate(self) -> None:
        """Takes all gauges back, as gradients of the model are differentiated."""
        self.twice, self.gauges, self.parameters = True, {}, {}

    def moved(self, paths: Mapping[str, str]) -> Settled:
        """The same for modules at other ``paths``, without modules that are not among them. Gauges
        are measured again, but those of parameters, which the state of an optimizer is in."""

        def moved(key: Any) -> Any:
            """The key of a call or a place, or of an argument of one: (key, slot)."""
            first = moved(key[0]) if isinstance(key[0], tuple) else paths.get(key[0])
            return None if first is None else (first, *key[1:])

        names = "keys factors units weights shares loops corrections operands".split()
        found: dict[str, Any] = {
            name: {moved(key): v for key, v in getattr(self, name).items() if moved(key)}
            for name in names
        }
        split = [(*name.rpartition(".")[::2], c) for name, c in self.parameters.items()]
        found["parameters"] = {
            f"{paths[path]}.{leaf}".removeprefix("."): c for path, leaf, c in split if path in paths
        }
        found["varying"] = {paths[path]: True for path in self.varying if path in paths}
        return Settled(**found, twice=self.twice)

    def settle(self, plan: Plan) -> None:
        """Adopts the measurements of a plan that are not fixed yet."""
        self.corrections = {**plan.corrections, **self.corrections}
        self.operands = {**plan.operands, **self.operands}
        if plan.final:
            gauges = {k: c for k, c in plan.gauges.items() if k not in plan.unseen}
            self.gauges = {**gauges, **self.gauges}
        if plan.outside is not None:
            own = {name: c + plan.outside for name, c in plan.measured.items()}
            self.parameters = {**own, **self.parameters}


@dataclass(frozen=True)
class Weights:
    """The tags of parameters, by name.

    factors: the divisor of the values. exponents: of the static scale, where it is not 1. readouts:
    the readout weights. split: parametrization lists of weights that were divided before they were
    parametrized. unseen: those of which a call that no replay sees computes a weight, and therefore
    all calls that do, by RMS 1.
    """

    factors: dict[str, float]
    exponents: dict[str, int]
    readouts: frozenset[str]
    split: frozenset[str]
    unseen: frozenset[str] = frozenset()

    @property
    def restored(self) -> dict[str, float]:
        """The factors that a call that computes a weight multiplies parameters by."""
        return {name: f for name, f in self.factors.items() if name not in self.unseen}


@dataclass(frozen=True)
class Settings:
    """The model's weights and the caller's options, as input of the planner.

    weights: from the tags of the parameters. preserve: keep the function that the model computes.
    residual: "fixed" or "umup". context: the number of keys of attention; None for that of the
    first call. settled: fixed by earlier plans; this one adds to it. whole: whether the whole model
    runs, not a submodule.
    """

    weights: Weights
    replaced: frozenset[str]
    preserve: bool = False
    residual: str = "fixed"
    context: int | None = None
    settled: Settled = field(default_factory=Settled)
    whole: bool = True


def tupled(value: Any) -> Any:
    """Converts lists to tuples, recursively."""
    return tuple(map(tupled, value)) if isinstance(value, list | tuple) else value


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
