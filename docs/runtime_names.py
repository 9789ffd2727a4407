"""griffe extension: adds public names that static analysis does not find.

Most elementwise ops of `unit_scaling.functional` are made by a call (``relu = unary(...)``), so
that only the imported module has their signatures and docstrings. Docstrings are converted to
Markdown.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

from docs.markdown import as_markdown
from docs.reference import MODULES, public_names

_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: griffe.ParameterKind.positional_only,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.VAR_POSITIONAL: griffe.ParameterKind.var_positional,
    inspect.Parameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
    inspect.Parameter.VAR_KEYWORD: griffe.ParameterKind.var_keyword,
}

_NAMES = re.compile(r"(?<=^    )\w+(?:, \w+)+(?=: )", re.MULTILINE)
"""Several attributes that one line of a section describes."""


def text(value: Any) -> str | None:
    """Returns the source text of an annotation or default, None if there is none."""
    if value is inspect.Parameter.empty:
        return None
    if inspect.isfunction(value) or inspect.isclass(value) or inspect.isbuiltin(value):
        return str(value.__name__)
    value = getattr(value, "__forward_arg__", value)  # of the fields of a NamedTuple
    return value if isinstance(value, str) else repr(value)


def parameter(one: inspect.Parameter) -> griffe.Parameter:
    """Returns a parameter for griffe."""
    default = (
        None
        if one.default is one.empty
        else re.sub(r" at 0x\w+", "", repr(one.default))
    )
    return griffe.Parameter(
        one.name,
        annotation=text(one.annotation),
        kind=_KINDS[one.kind],
        default=default,
    )


def function(
    name: str, value: Any, parent: griffe.Module | griffe.Class
) -> griffe.Function:
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
        made.docstring = griffe.Docstring(as_markdown(documented), parent=made)
    return made


def add_constructor(documented: griffe.Class, value: type) -> None:
    """Adds the arguments of a class that inherits or generates its constructor, and a docstring
    that it generates."""
    if documented.docstring is None and value.__doc__:
        documented.docstring = griffe.Docstring(
            as_markdown(value.__doc__), parent=documented
        )
    if "__init__" in documented.all_members and "__signature__" not in vars(value):
        return
    try:
        made = function("__init__", value, documented)
    except (TypeError, ValueError):  # exceptions, for example, have no signature
        return
    made.parameters = griffe.Parameters(griffe.Parameter("self"), *made.parameters)
    made.docstring = made.returns = None
    variadic = (griffe.ParameterKind.var_positional, griffe.ParameterKind.var_keyword)
    if any(one.kind not in variadic for one in list(made.parameters)[1:]):
        documented.set_member("__init__", made)


def static_kind(module: griffe.Module, name: str) -> griffe.Kind | None:
    """Returns the kind that static analysis found for a member, None if it found none."""
    try:
        member = module.members[name]
        return (
            member.final_target.kind
            if isinstance(member, griffe.Alias)
            else member.kind
        )
    except (KeyError, griffe.AliasResolutionError):
        return None


def complete(module: griffe.Module, name: str, value: Any) -> None:
    """Adds to a module what static analysis has not found of one public name."""
    kind = static_kind(module, name)
    if inspect.isfunction(value) and kind is not griffe.Kind.FUNCTION:
        module.set_member(name, function(name, value, module))
    elif inspect.isclass(value) and kind is griffe.Kind.CLASS:
        member = module.members[name]
        target = member.final_target if isinstance(member, griffe.Alias) else member
        add_constructor(target, value)
    elif kind is None and not inspect.isclass(value):
        module.set_member(name, griffe.Attribute(name, parent=module))


def joined(names: re.Match[str], owner: griffe.Class) -> str:
    """Several attributes that share a line, with their types: griffe ends a name at a space."""
    known = [owner.members.get(name) for name in names[0].split(", ")]
    types = {
        str(one.annotation): None for one in known if isinstance(one, griffe.Attribute)
    }
    text = names[0].replace(", ", ",\N{NO-BREAK SPACE}")
    return f"{text} ({' | '.join(types)})" if types else text


def convert_docstrings(documented: griffe.Module | griffe.Class) -> None:
    """Converts the docstrings of a module or class, and of all in it, to Markdown."""
    if documented.docstring:
        text = as_markdown(documented.docstring.value)
        if isinstance(documented, griffe.Class):
            text = _NAMES.sub(lambda names: joined(names, documented), text)
        documented.docstring.value = text
    for one in documented.members.values():
        if isinstance(one, griffe.Module | griffe.Class):
            convert_docstrings(one)
        elif not isinstance(one, griffe.Alias) and one.docstring:
            one.docstring.value = as_markdown(one.docstring.value)


class RuntimeNames(griffe.Extension):
    """Completes the public modules of a package after griffe has read its source."""

    def on_package(self, *, pkg: griffe.Module, **kwargs: Any) -> None:
        """Completes each public module of the package."""
        # First: a function may take the place of a module of its name.
        convert_docstrings(pkg)
        for path in MODULES:
            package, _, inner = path.partition(".")
            if package == pkg.name:
                for name, value in public_names(path).items():
                    complete(pkg[inner] if inner else pkg, name, value)
