"""griffe extension: adds public names that static analysis does not find.

Most elementwise ops of `unit_scaling.functional` are made by a call (``relu = unary(...)``), so
that only the imported module has their signatures and docstrings.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import griffe

from docs.reference import MODULES, public_names

_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: griffe.ParameterKind.positional_only,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.VAR_POSITIONAL: griffe.ParameterKind.var_positional,
    inspect.Parameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
    inspect.Parameter.VAR_KEYWORD: griffe.ParameterKind.var_keyword,
}


def text(value: Any) -> str | None:
    """Returns the source text of an annotation or default, None if there is none."""
    if value is inspect.Parameter.empty:
        return None
    if inspect.isfunction(value) or inspect.isclass(value) or inspect.isbuiltin(value):
        return str(value.__name__)
    return value if isinstance(value, str) else repr(value)


def parameter(one: inspect.Parameter) -> griffe.Parameter:
    """Returns a parameter for griffe."""
    default = None if one.default is one.empty else re.sub(r" at 0x\w+", "", repr(one.default))
    return griffe.Parameter(
        one.name, annotation=text(one.annotation), kind=_KINDS[one.kind], default=default
    )


def function(name: str, value: Any, parent: griffe.Module) -> griffe.Function:
    """Returns a function for griffe from an imported one."""
    signature = inspect.signature(value)
    made = griffe.Function(
        name,
        parameters=griffe.Parameters(*map(parameter, signature.parameters.values())),
        returns=text(signature.return_annotation),
        parent=parent,
        runtime=True,
    )
    if documented := inspect.getdoc(value):
        made.docstring = griffe.Docstring(documented, parent=made)
    return made


def static_kind(module: griffe.Module, name: str) -> griffe.Kind | None:
    """Returns the kind that static analysis found for a member, None if it found none."""
    try:
        member = module.members[name]
        return member.final_target.kind if isinstance(member, griffe.Alias) else member.kind
    except (KeyError, griffe.AliasResolutionError):
        return None


class RuntimeNames(griffe.Extension):
    """Completes the public modules of a package after griffe has read its source."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Adds the missing functions and constants of each public module of a package."""
        for path in MODULES:
            if path.partition(".")[0] != pkg.name:
                continue
            importlib.import_module(path)
            module = pkg[path.partition(".")[2]] if "." in path else pkg
            for name, value in public_names(path).items():
                kind = static_kind(module, name)
                if inspect.isfunction(value) and kind is not griffe.Kind.FUNCTION:
                    module.set_member(name, function(name, value, module))
                elif kind is None and not inspect.isclass(value):
                    module.set_member(name, griffe.Attribute(name, parent=module))
