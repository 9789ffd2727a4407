"""Makes the pages of the API reference while mkdocs builds the site (`hooks` in mkdocs.yml).

A page for each public module, an entry for each name in its ``__all__``, from the docstrings.
"""

from __future__ import annotations

import dataclasses
import html
import importlib
import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from unit_scaling.rules.table import OPS

#: The public modules. A name of several of them is documented in the first.
MODULES = (
    "fp8",
    "fp8.optim",
    "fp8.norms.norm",
    "fp8.recipes.scaling",
    "fp8.surgery.where",
    "fp8.distributed.gradient_hook",
    "fp8.distributed.fsdp",
    "fp8.checkpoints.files",
    "fp8.common.libraries",
    "fp8.adapters.accelerate",
    "fp8.adapters.bitsandbytes",
    "fp8.adapters.composer",
    "fp8.adapters.lightning",
    "fp8.adapters.msamp",
    "fp8.adapters.torchao",
    "fp8.adapters.transformer_engine",
    "unit_scaling",
    "unit_scaling.functional",
    "unit_scaling.transforms",
    "unit_scaling.transforms.utils",
    "unit_scaling.optim",
    "unit_scaling.parameter",
    "unit_scaling.analysis",
    "unit_scaling.utils",
    "unit_scaling.formats",
    "unit_scaling.constraints",
    "unit_scaling.scale",
)


# Before a line that begins with `name: ` or `name, name: `, or with the dash of a list.
_ARGUMENT = re.compile(r"\n\s*(?=[\w*]+(?:, [\w*]+)*: |- )")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A documented object. ``name``: with its module, as it is imported."""

    name: str
    value: Any

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def link(self) -> str:
        """Where it is, from another page of the reference."""
        return f"{self.name.rpartition('.')[0]}.html#{self.name}"


def entries() -> dict[str, list[Entry]]:
    """Module -> what is documented on its page, modules left out."""
    found: dict[str, list[Entry]] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        names = [n for n in module.__all__ if n != "__version__"]
        made = [Entry(f"{name}.{n}", getattr(module, n)) for n in names]
        found[name] = [entry for entry in made if not isinstance(entry.value, ModuleType)]
    return found


def links(pages: dict[str, list[Entry]]) -> dict[str, str]:
    """Name -> where it is documented: by its full name, and by the module that it is written in."""
    found: dict[str, str] = {}
    for name, page in pages.items():
        found[name] = f"{name}.html"
        for entry in page:
            written = f"{getattr(entry.value, '__module__', '')}.{entry.short}"
            found[entry.name] = found.setdefault(written, entry.link)
    return found


def signature(entry: Entry) -> str:
    """The call of a function or class, an argument a line where it is long."""
    try:
        made = inspect.signature(entry.value)
    except (TypeError, ValueError):  # no callable, or an exception, which has none
        return entry.short
    lines, star = [], False
    for one in made.parameters.values():
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not star:
            lines.append("*")
        star = star or one.kind in (one.KEYWORD_ONLY, one.VAR_POSITIONAL)
        lines.append(_cleaned(str(one)))
    returns = made.return_annotation
    of_class = inspect.isclass(entry.value) or returns is made.empty
    arrow = "" if of_class else f" -> {_cleaned(str(returns))}"
    whole = f"{entry.short}({', '.join(lines)}){arrow}"
    if len(whole) <= 80:
        return whole
    return "\n".join([f"{entry.short}(", *(f"    {line}," for line in lines), f"){arrow}"])


def _cleaned(text: str) -> str:
    """An argument or annotation: types without quotes, functions and modules by name alone."""
    text = re.sub(r"<(?:module '([\w.]+)' [^>]*|function (\S+) at [^>]*)>", r"\1\2", text)
    text = re.sub(r"<class '([\w.]+)'>", r"\1", text)
    text = re.sub(r"\.<locals>\.\w+", "()", text)  # what a function of the module has made
    return re.sub(r"^(\**\w+: )'(.*?)'(?= = |$)|^'(.*)'$", r"\1\2\3", text)


def prose(docstring: str, known: dict[str, str]) -> str:
    """A docstring as HTML: examples and indented parts as they are, a line for each argument."""
    parts = []
    for part in re.split(r"\n{2,}", docstring):
        if part.startswith(">>> "):
            parts.append(f"```pycon\n{part.replace('<BLANKLINE>', '')}\n```")
        elif all(line.startswith("    ") for line in part.splitlines()):
            parts.append(f"<pre>{html.escape(inspect.cleandoc(part))}</pre>")
        else:
            lines = _ARGUMENT.sub("<br>", html.escape(part, quote=False))
            parts.append(f"<p>{_with_code(lines, known)}</p>")
    return "\n\n".join(parts)


def _with_code(text: str, known: dict[str, str]) -> str:
    def coded(match: re.Match[str]) -> str:
        name = match[1].strip("`")
        code = f"<code>{name}</code>"
        return f'<a href="{known[name]}">{code}</a>' if name in known else code

    return re.sub(r"(``.+?``|`[^`]+`)", coded, text, flags=re.DOTALL)


def methods(entry: Entry) -> Iterator[Entry]:
    """The documented public methods and properties that a class itself defines."""
    for name, value in vars(entry.value).items():
        value = getattr(value, "__func__", value)  # of a class method
        kinds = inspect.isfunction(value) or isinstance(value, property)
        if kinds and not name.startswith("_") and value.__doc__:
            yield Entry(f"{entry.name}.{name}", value)


def body(entry: Entry, known: dict[str, str]) -> str:
    """What stands below the heading of an entry."""
    if not callable(entry.value) or not getattr(entry.value, "__doc__", None):
        rows = ", ".join(f"`{row}`" for row in entry.value) if hasattr(entry.value, "keys") else ""
        return rows or f"`{entry.value}`"
    made = f"```python\n{signature(entry)}\n```"
    parts = [made, prose(inspect.getdoc(entry.value) or "", known)]
    op = OPS.get(entry.short) if entry.name.startswith("unit_scaling.functional.") else None
    if op is not None and op.rule.__doc__:
        parts.append(f"<p><b>Factors</b></p>\n\n{prose(inspect.getdoc(op.rule) or '', known)}")
    if inspect.isclass(entry.value):
        parts += [_method(method, known) for method in methods(entry)]
    return "\n\n".join(parts)


def _method(entry: Entry, known: dict[str, str]) -> str:
    parts = [f"#### {entry.short} {{: #{entry.name} }}"]
    if not isinstance(entry.value, property):
        parts.append(f"```python\n{signature(entry)}\n```")
    return "\n\n".join([*parts, prose(inspect.getdoc(entry.value) or "", known)])


def page(name: str, listed: list[Entry], known: dict[str, str]) -> str:
    """The Markdown of a module's page."""
    parts = [f"# {name}", prose(inspect.getdoc(importlib.import_module(name)) or "", known)]
    for entry in listed:
        home = known[entry.name]
        other = f'The same as <a href="{home}"><code>{home.partition("#")[2]}</code></a>.'
        text = body(entry, known) if home == entry.link else f"<p>{other}</p>"
        parts.append(f"## {entry.short} {{: #{entry.name} }}\n\n{text}")
    return "\n\n".join(parts) + "\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the pages of the reference to the navigation."""
    config.nav.append({"API": [{name: f"api/{name}.md"} for name in MODULES]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the reference to the site."""
    pages = entries()
    known = links(pages)
    for name, listed in pages.items():
        text = page(name, listed, known)
        files.append(File.generated(config, f"api/{name}.md", content=text))
    return files
