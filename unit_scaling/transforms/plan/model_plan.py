"""The plan of a model as data: printed, saved and applied again."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin, get_type_hints

from torch import nn

from fp8.common.report import as_table

from ...parameter import Tags, has_parameter_data, remember_tags, tag, tags_of
from ..capture.forms import Form
from .actions import CallRow, Plan, Settled, Step, tupled

VERSION = 8


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
        return {"version": VERSION, **written(self)}

    def to_json(self) -> str:
        """Returns the plan as JSON. Numbers are exact."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelPlan:
        """Returns the plan that `to_dict` wrote.

        Raises:
            ValueError: a field is unknown or missing, or the version differs.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"a plan is a dict of fields, got {type(data).__name__}")
        version = data.get("version")
        if version != VERSION:
            raise ValueError(f"a plan of version {VERSION} is needed, got version {version!r}")
        result: ModelPlan = read(cls, {n: value for n, value in data.items() if n != "version"})
        return result

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
    for field in dataclasses.fields(Step):
        value = getattr(step, field.name)
        if field.name != "op" and value != getattr(default, field.name):
            told.append(f"{field.name}={value!r}")
    return ", ".join(told)


def written(value: Any) -> Any:
    """``value`` for JSON: dataclasses as dicts of their fields, dicts with any keys as lists of
    pairs, tuples and sets as lists. `read` restores it."""
    if dataclasses.is_dataclass(value):
        return {name: written(getattr(value, name)) for name in _saved(value)}
    if isinstance(value, Mapping):
        return [[written(key), written(item)] for key, item in value.items()]
    if isinstance(value, frozenset):
        return sorted(map(written, value))
    return [written(item) for item in value] if isinstance(value, list | tuple) else value


def read(kind: Any, data: Any) -> Any:
    """Returns the value of a type, as in an annotation, that `written` wrote. Raises ValueError
    unless the fields of a dataclass are exactly its own."""
    if dataclasses.is_dataclass(kind):
        hints, fields = _hints(kind), _saved(kind)
        unknown, missing = sorted({*data} - {*fields}), sorted({*fields} - {*data})
        if unknown or missing:
            names = {"ModelPlan": "a plan", "Plan": "the plan of a form of call"}
            what = names.get(kind.__name__, f"a {kind.__name__.lower()}")  # type: ignore[union-attr]
            raise ValueError(f"{what}: unknown fields {unknown}, missing fields {missing}")
        return kind(**{name: read(hints[name], data[name]) for name in fields})  # type: ignore[operator]
    given = get_args(kind)
    if isinstance(data, Mapping):  # of a dataclass or None
        return read(given[0], data)
    if get_origin(kind) is dict:
        return {read(given[0], key): read(given[1], item) for key, item in data}
    if get_origin(kind) in (list, frozenset) or given[1:] == (...,):
        return get_origin(kind)(read(given[0], item) for item in data)
    if hasattr(kind, "_make"):
        return kind._make(map(tupled, data))
    return tupled(data)


_hints: Any = functools.cache(get_type_hints)


def _saved(kind: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(kind) if field.init]


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
    """Sets the tags of the parameters to those of the plan. rescale: also rescale weights that were
    divided by their own RMS to the divisor of the plan."""
    for name, parameter in model.named_parameters():
        own, planned = tags_of(parameter), plan.tags[name]
        if rescale and own.mup_divisor and planned.mup_divisor:
            parameter.data.mul_(own.mup_divisor / planned.mup_divisor)
        tag(parameter, *planned)
    remember_tags(model)
