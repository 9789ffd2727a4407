"""What `unit_scale` decided for a model, as data: the state_dict holds it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

from torch import nn

from fp8.common.report import LEFT_ALONE
from fp8.common.validation import check_keys

from ...parameter import Tags
from ..record.calls import Slot
from ..record.place import Place

T = TypeVar("T")

VERSION = 12


@dataclass(frozen=True)
class Step:
    """What is done at one call. Plain data: it is pickled with the model and read by the compiler.

    op: the row of OPS that computes a product, with ``factor``; "replace" for a function that
    the caller replaces; None runs the call itself. factor: of the result of a product, and of
    the gradients of its arguments, which have these ``names`` in the op. terms: the weights of
    the two terms of a residual add. writes: whether the call writes its result into its first
    argument. static: the exponents of the powers of two that arguments are divided by before a
    cast and multiplied by after it; see `fp8.casts.operands`.
    """

    op: str | None = None
    factor: float = 1.0
    names: tuple[str, ...] = ()
    terms: tuple[float, ...] = ()
    writes: bool = False
    static: tuple[tuple[Slot, int], ...] = ()


Steps = tuple[Step | None, ...]
"""The steps of the calls at one place, in the order of the calls; the last one holds for all later
calls."""


@dataclass(frozen=True)
class CallRow:
    """A row of the report."""

    path: str
    call: str
    done: str
    why: str = ""

    @property
    def left_alone(self) -> bool:
        return self.done == LEFT_ALONE


@dataclass
class ModelPlan:
    """The decisions of `unit_scale` for a model.

    Attributes:
        tags: parameter name -> its tags.
        rows: the rows of the report.
        entries: the paths of the modules whose calls from outside are known, "" for the model.
        steps: place -> the steps of its calls.
        gradients: place of a product -> the exponent of the power of two that its gradient is
            divided by before a cast.
    """

    tags: dict[str, Tags] = field(default_factory=dict)
    rows: list[CallRow] = field(default_factory=list)
    entries: list[str] = field(default_factory=list)
    steps: dict[Place, Steps] = field(default_factory=dict)
    gradients: dict[Place, int | tuple[int, ...]] = field(default_factory=dict)

    def covers(self, path: str) -> bool:
        """Whether the calls of the module at ``path`` are known."""
        return any(not e or f"{path}.".startswith(f"{e}.") for e in self.entries)

    def to_json(self) -> str:
        """Returns the plan as JSON. Numbers are exact."""
        data = asdict(self)
        pairs = {name: list(data[name].items()) for name in ("steps", "gradients")}
        return json.dumps({"version": VERSION, **data, **pairs})

    @classmethod
    def from_json(cls, text: str) -> ModelPlan:
        """Returns the plan that `to_json` wrote.

        Raises:
            ValueError: no JSON of a dict, another version, or an unknown or missing field.
        """
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError(f"a plan is a dict of fields, got {type(data).__name__}")
        version = data.get("version")
        if version != VERSION:
            raise ValueError(f"a plan of version {VERSION} is needed, got version {version!r}")
        names = [f.name for f in fields(cls)]
        check_keys("plan", data, ["version", *names], names)
        return cls(
            tags={name: Tags(*tags) for name, tags in data["tags"].items()},
            rows=[CallRow(**row) for row in data["rows"]],
            entries=data["entries"],
            steps={
                _tupled(p): tuple(s and _read(Step, s) for s in own) for p, own in data["steps"]
            },
            gradients={_tupled(place): _tupled(e) for place, e in data["gradients"]},
        )


def _read(cls: type[T], data: Mapping[str, Any]) -> T:
    return cls(**{name: _tupled(value) for name, value in data.items()})


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list | tuple) else value


# A plan and a model


def fits(model: nn.Module, plan: ModelPlan) -> bool:
    """Whether the parameters and modules of a plan are those of a model."""
    names = {name for name, _ in model.named_parameters()}
    paths = {path for path, _ in model.named_modules()}
    used = {path.partition(" > ")[0] for path, _, _ in plan.steps}
    return names == plan.tags.keys() and used <= paths
