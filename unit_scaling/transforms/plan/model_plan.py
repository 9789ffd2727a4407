"""The plan of a model as data: printed, saved and applied again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from torch import nn

from fp8.common.report import as_table

from ...parameter import Tags, has_parameter_data, remember_tags, tag, tags_of
from ..capture.forms import Form
from .actions import CallRow, Plan, Settled, Step, Tie

__all__ = ["ModelPlan", "check_fits", "pairs", "retag", "tags_in", "tupled"]

T = TypeVar("T")

VERSION = 3


@dataclass(frozen=True)
class ModelPlan:
    """The decisions of `unit_scale` for a model, as returned by `unit_scaling.plan`.

    Printing shows a table of the calls that have a factor. ``unit_scale(model, plan=...)`` applies
    the plan to another model of the same architecture without recording a first call, so that all
    processes use the same factors.

    Attributes:
        init: as in `unit_scale`.
        residual: as in `unit_scale`.
        context_length: as in `unit_scale`.
        tags: parameter name -> its tags.
        rows: the rows of the report for the weights.
        plans: call signature -> the steps of its calls.
        settled: what all call signatures share.
    """

    init: str
    residual: str
    context_length: int | None
    tags: dict[str, Tags]
    rows: tuple[CallRow, ...]
    plans: dict[Form, Plan]
    settled: Settled

    def to_dict(self) -> dict[str, Any]:
        """Returns the plan as lists, dicts, strings, numbers and None."""
        settled = {f.name: pairs(getattr(self.settled, f.name)) for f in fields(Settled)}
        return {
            "version": VERSION,
            "init": self.init,
            "residual": self.residual,
            "context_length": self.context_length,
            "tags": {name: list(tags) for name, tags in self.tags.items()},
            "rows": [_listed(dataclasses.astuple(row)) for row in self.rows],
            "plans": [_written(form, plan) for form, plan in self.plans.items()],
            "settled": settled,
        }

    def to_json(self) -> str:
        """Returns the plan as JSON. Numbers are exact."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelPlan:
        """Returns the plan that `to_dict` wrote.

        Raises:
            ValueError: a field is unknown or missing, or the version differs.
        """
        names = ["version", *(f.name for f in fields(cls))]
        given = _checked("a plan", data, names)
        version = given.pop("version")
        if version != VERSION:
            raise ValueError(f"a plan of version {VERSION} is needed, got version {version!r}")
        tables = given["settled"]
        if isinstance(tables, Mapping):
            tables = {"operands": [], "varying": [], **tables}  # which older plans lack
        settled = _checked("settled", tables, [f.name for f in fields(Settled)])
        return cls(
            init=given["init"],
            residual=given["residual"],
            context_length=given["context_length"],
            tags={name: Tags(*tags) for name, tags in given["tags"].items()},
            rows=tuple(CallRow(*row) for row in given["rows"]),
            plans=dict(_read(plan) for plan in given["plans"]),
            settled=Settled(**{name: dict(tupled(value)) for name, value in settled.items()}),
        )

    @classmethod
    def from_json(cls, text: str) -> ModelPlan:
        """Returns the plan that `to_json` wrote.

        Raises:
            ValueError: as `from_dict`, or ``text`` is not JSON.
        """
        return cls.from_dict(json.loads(text))

    def __str__(self) -> str:
        calls = {
            key: step
            for plan in self.plans.values()
            for key, step in plan.steps.items()
            if step is not None
        }
        lines = [("module", "call", "step")]
        for (path, kind, number), step in calls.items():
            lines.append((path or "(model)", f"{kind} {number}", _said(step)))
        forms = f"{len(self.plans)} form{'s' * (len(self.plans) != 1)} of call"
        head = f"plan of unit_scale(init={self.init!r}, residual={self.residual!r}), {forms}"
        return f"{head}\n{as_table(lines)}"


def _said(step: Step) -> str:
    """A step as text, without the fields that have default values."""
    default = Step()
    told = [step.op or "as it is"]
    for field in fields(Step):
        value = getattr(step, field.name)
        if field.name != "op" and value != getattr(default, field.name):
            told.append(f"{field.name}={value!r}")
    return ", ".join(told)


def _checked(what: str, data: Any, names: Iterable[str]) -> dict[str, Any]:
    """Returns the fields of a dict; raises ValueError unless they are exactly ``names``."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{what} is a dict of fields, got {type(data).__name__}")
    names = list(names)
    unknown, missing = sorted(set(data) - {*names}), sorted({*names} - set(data))
    if unknown or missing:
        raise ValueError(f"{what}: unknown fields {unknown}, missing fields {missing}")
    return dict(data)


def pairs(table: Mapping[Any, Any]) -> list[Any]:
    """A dict with any keys as a list of pairs, for JSON; ``dict(tupled(...))`` reads it."""
    return [[_listed(key), _listed(value)] for key, value in table.items()]


def _listed(value: Any) -> Any:
    """Converts tuples to lists for JSON, recursively."""
    return [_listed(item) for item in value] if isinstance(value, list | tuple) else value


def tupled(value: Any) -> Any:
    """Converts lists to tuples, recursively."""
    return tuple(map(tupled, value)) if isinstance(value, list | tuple) else value


def _named(value: Any) -> dict[str, Any]:
    return {f.name: _listed(getattr(value, f.name)) for f in fields(value)}


def _made(kind: type[T], data: Any) -> T:
    given = _checked(f"a {kind.__name__.lower()}", data, [f.name for f in fields(kind)])  # type: ignore[arg-type]
    return kind(**{name: tupled(value) for name, value in given.items()})


_MEASURED = (
    "name",
    "unseen",
    "idle",
    "kept",
    "ends",
    "outputs",
    "outside",
    "entry",
    "final",
    "looks",
    "corrections",
    "operands",
    "gauges",
    "parameters",
)
_PLAN = ("form", "steps", "rows", "inner", "depths", "ties", *_MEASURED)


def _written(form: Form, plan: Plan) -> dict[str, Any]:
    steps = [[*key, None if step is None else _named(step)] for key, step in plan.steps.items()]
    rows = [_listed(dataclasses.astuple(row)) for row in plan.rows]
    ties = [_named(tie) for tie in plan.ties]
    measured = (getattr(plan, name) for name in _MEASURED)
    values = (
        *(_listed(form), steps, rows, sorted(plan.inner), plan.depths, ties),
        *(pairs(value) if isinstance(value, dict) else _listed(value) for value in measured),
    )
    return dict(zip(_PLAN, values, strict=True))


def _read(data: Any) -> tuple[Form, Plan]:
    if isinstance(data, Mapping):
        # which older plans lack:
        data = {"operands": [], "kept": [], "ends": [], "entry": 0, **data}
    given = _checked("the plan of a form of call", data, _PLAN)
    plan = Plan(
        steps={
            (path, kind, number): None if step is None else _made(Step, {"starts": [], **step})
            for path, kind, number, step in given["steps"]
        },
        rows=[CallRow(*row) for row in given["rows"]],
        inner=frozenset(given["inner"]),
        depths=dict(given["depths"]),
        ties=tuple(_made(Tie, tie) for tie in given["ties"]),
    )
    for name in _MEASURED:
        value = given[name]
        table = isinstance(getattr(plan, name), dict)
        setattr(plan, name, dict(tupled(value)) if table else tupled(value))
    return Form(*tupled(given["form"])), plan


# A plan and a model


def tags_in(model: nn.Module) -> dict[str, Tags]:
    """Parameter name -> its tags."""
    return {n: tags_of(p) for n, p in model.named_parameters() if has_parameter_data(p)}


def check_fits(model: nn.Module, plan: ModelPlan) -> None:
    """Raises ValueError if parameters or modules exist in only one of the two."""
    names = {name for name, _ in model.named_parameters()}
    paths = {path for path, _ in model.named_modules()}
    used = {path.partition(" > ")[0] for p in plan.plans.values() for path, _, _ in p.steps}
    other = sorted(names ^ plan.tags.keys()) or sorted(used - paths)
    if other:
        more = ", ..." if len(other) > 3 else ""
        raise ValueError(
            f"the plan is of another model than this {type(model).__name__}: only one of them has "
            f"{', '.join(map(repr, other[:3]))}{more}"
        )


def retag(model: nn.Module, plan: ModelPlan, rescale: bool) -> None:
    """Sets the tags of the parameters to those of the plan.

    rescale: also rescale weights that were divided by their own RMS to the divisor of the plan.
    """
    for name, parameter in model.named_parameters():
        own, planned = tags_of(parameter), plan.tags[name]
        if rescale and own.mup_divisor and planned.mup_divisor:
            parameter.data.mul_(own.mup_divisor / planned.mup_divisor)
        tag(parameter, *planned)
    remember_tags(model)
