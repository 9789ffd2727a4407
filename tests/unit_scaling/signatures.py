"""The public names of a version of `unit_scaling`, as plain data.

``python -m tests.unit_scaling.signatures > tests/unit_scaling/signatures_0.3.5.json``, with
unit-scaling 0.3.5 and what it needs on the path in place of this project, wrote the table that
`test_signatures` compares with.
"""

from __future__ import annotations

import importlib
import inspect
import json
import types
from typing import Any

MODULES = (
    "unit_scaling",
    "unit_scaling.analysis",
    "unit_scaling.constraints",
    "unit_scaling.core",
    "unit_scaling.core.functional",
    "unit_scaling.formats",
    "unit_scaling.functional",
    "unit_scaling.optim",
    "unit_scaling.parameter",
    "unit_scaling.scale",
    "unit_scaling.transforms",
    "unit_scaling.transforms.utils",
    "unit_scaling.utils",
)

_PLAIN = (int, float, str, bool, type(None))


def describe(name: str) -> dict[str, Any]:
    """The public names of a module: those it exports or, without a list, those it defines."""
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None)
    if names is None:
        defined = [n for n, v in vars(module).items() if getattr(v, "__module__", None) == name]
        names = [n for n in defined if not n.startswith("_")]
    return {n: _value(getattr(module, n)) for n in sorted(names)}


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, types.ModuleType):
        return {"kind": "module"}
    if inspect.isclass(value):
        functions = (types.FunctionType, staticmethod, classmethod, property)
        own = {n for n, v in vars(value).items() if isinstance(v, functions)}
        members = {n: _value(getattr(value, n)) for n in sorted(own) if not n.startswith("_")}
        return {"kind": "class", "parameters": parameters(value), "members": members}
    if inspect.isroutine(value):
        return {"kind": "function", "parameters": parameters(value)}
    return {"kind": "value"}


def parameters(function: Any) -> list[list[Any]]:
    """[name, kind] of each parameter, or [name, kind, default]: one that is not plain data is
    given by its type."""
    return [
        [p.name, p.kind.name, *([] if p.default is p.empty else [_plain(p.default)])]
        for p in inspect.signature(function).parameters.values()
    ]


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if isinstance(value, _PLAIN) else f"<{type(value).__name__}>"


def main() -> None:
    """Prints the table, a name a line."""
    modules = []
    for module in MODULES:
        rows = [f"  {json.dumps(n)}: {json.dumps(v)}" for n, v in describe(module).items()]
        modules.append(f" {json.dumps(module)}: {{\n" + ",\n".join(rows) + "\n }")
    print("{\n" + ",\n".join(modules) + "\n}")


if __name__ == "__main__":
    main()
