"""mkdocs hook: adds the API pages and the notebooks to the site (`hooks` in mkdocs.yml).

The API pages consist of one mkdocstrings directive for each name in the ``__all__`` of a module.
The notebooks are outside of docs/, rendered by mkdocs-jupyter.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from bs4 import BeautifulSoup
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.markdown import as_markdown
from unit_scaling.rules.table import OPS

ROOT = Path(__file__).parents[1]

#: The public modules. A name that several of them export is documented in the first.
MODULES = (
    "fp8",
    "fp8.optim",
    "fp8.formats.quantize",
    "fp8.norms.norm",
    "fp8.recipes.scaling",
    "fp8.recipes.tensor_cores",
    "fp8.lab.preflight.preflight",
    "fp8.lab.stats",
    "fp8.lab.parity.parity",
    "fp8.lab.blame",
    "fp8.lab.preflight.findings",
    "fp8.lab.hardware",
    "fp8.lab.preflight.training",
    "fp8.selection.policies",
    "fp8.selection.roles",
    "fp8.distributed.gradient_hook",
    "fp8.distributed.fsdp",
    "fp8.distributed.tensor_parallel",
    "fp8.checkpoints.weights",
    "fp8.checkpoints.layouts",
    "fp8.common.libraries",
    "fp8.adapters.accelerate",
    "fp8.adapters.composer",
    "fp8.adapters.last_good",
    "fp8.adapters.lightning",
    "fp8.adapters.msamp",
    "fp8.adapters.policies",
    "fp8.adapters.torchao",
    "fp8.adapters.torchtitan",
    "fp8.adapters.transformer_engine",
    "fp8.adapters.transformers",
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

LONG_TABLES = ("benchmarks-all.md", "parity.md")
"""Pages that have nearly every word: the search lists them after the pages about a word."""

_SECTIONS = re.compile(r"\n\n(?:Args|Returns|Raises):")
"""Where the sections of a docstring in Google style begin."""

_PAGE = re.compile(r"\.\./docs/([\w-]+)\.md(#.*)?")
"""A link from a notebook to a page."""

_REMOVED = "script, style, .zeroclipboard-container, .celltoolbar, .clipboard-copy-txt"
"""What a notebook page has besides its content: MathJax from elsewhere, colours of one theme only,
and buttons that the site's theme has too."""


def public_names(module: str) -> dict[str, Any]:
    """Returns the exported objects of a module by name, without submodules and the version."""
    imported = importlib.import_module(module)
    found = {name: getattr(imported, name) for name in imported.__all__ if name != "__version__"}
    return {name: value for name, value in found.items() if not isinstance(value, ModuleType)}


def canonical_names() -> dict[str, str]:
    """Returns, for each public name with its module, the name under which it is documented."""
    first: dict[tuple[str, str], str] = {}
    found = {}
    for module in MODULES:
        for name, value in public_names(module).items():
            key = (getattr(value, "__module__", None) or f"id {id(value)}", name)
            found[f"{module}.{name}"] = first.setdefault(key, f"{module}.{name}")
    return found


def details(path: str, value: Any) -> str:
    """Returns what follows the docstring: the rule of an op, the keys or value of a constant."""
    name = path.rpartition(".")[2]
    if path.startswith("unit_scaling.functional.") and name in OPS:
        rule = _SECTIONS.split(inspect.getdoc(OPS[name].rule) or "")[0]
        return f"**Scale factors.** {as_markdown(rule)}\n\n" if rule else ""
    if isinstance(value, Mapping):
        return f"Keys: {', '.join(f'`{key}`' for key in value)}\n\n"
    if inspect.isroutine(value) or inspect.isclass(value):
        return ""
    return f"Value: `{value!r}`\n\n"


def api_page(module: str, canonical: dict[str, str]) -> str:
    """Returns the Markdown of the page of a module."""
    parts = [
        f"# {module}\n\n::: {module}\n    options:\n      members: false\n"
        "      show_root_toc_entry: false\n      show_root_heading: false\n"
    ]
    for name, value in public_names(module).items():
        path = f"{module}.{name}"
        home = canonical[path]
        if home == path:
            parts.append(f"::: {path}\n\n{details(path, value)}")
        else:
            heading = f"## {name} {{: #{path} .doc-heading }}"
            link = f"[`{home}`]({home.rpartition('.')[0]}.md#{home})"
            parts.append(f"{heading}\n\nThe same as {link}.\n")
    return "\n".join(parts)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the pages of the API to the section "Reference" of the navigation."""
    (reference,) = (section["Reference"] for section in config.nav if "Reference" in section)
    reference.insert(0, {"API": [{module: f"api/{module}.md"} for module in MODULES]})
    return config


@event_priority(100)  # before mkdocs-jupyter, which looks for notebooks among the files
def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the API and the notebooks to the files of the site."""
    canonical = canonical_names()
    for module in MODULES:
        text = api_page(module, canonical)
        files.append(File.generated(config, f"api/{module}.md", content=text))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        source = path.relative_to(ROOT).as_posix()
        files.append(File(source, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Redirects links to notebooks, and ranks a page in the search."""
    if page.file.src_uri in LONG_TABLES:
        page.meta["search"] = {"boost": 0.2}
    return re.sub(r"\(\.\./(notebooks/\w+\.ipynb)\)", r"(\1)", markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Reduces notebooks to their content, which the site's theme styles."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    soup = BeautifulSoup(html, "html.parser")
    for element in soup.select(_REMOVED):
        element.decompose()
    for anchor in soup.select("a.anchor-link"):
        anchor["class"] = "headerlink"
    for link in soup.select("a[href]"):
        target = str(link["href"])
        if _PAGE.fullmatch(target):
            link["href"] = _PAGE.sub(r"../\1.html\2", target)
        elif not target.startswith(("#", "http")):
            link.unwrap()  # to a file of the repository, which the site does not have
    for block in soup.select(".highlight pre"):
        block.name = "code"
        block.wrap(soup.new_tag("pre"))
    for picture in soup.select("img"):
        picture["alt"] = "figure"
    return str(soup)
