"""mkdocs hook: adds the API pages and the notebooks to the site (`hooks` in mkdocs.yml).

The API pages consist of one mkdocstrings directive for each name in the ``__all__`` of a module.
The notebooks are outside of docs/; their pages are Markdown of their cells and outputs.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
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
    "fp8.recipes.scaling",
    "fp8.recipes.tensor_cores",
    "fp8.lab.preflight.preflight",
    "fp8.lab.stats",
    "fp8.lab.parity.parity",
    "fp8.lab.blame",
    "fp8.lab.alarm",
    "fp8.lab.preflight.findings",
    "fp8.lab.forecast.result",
    "fp8.lab.hardware",
    "fp8.lab.trace",
    "fp8.lab.preflight.training",
    "fp8.layers.policies",
    "fp8.layers.roles",
    "fp8.training.gradient_hook",
    "fp8.training.fsdp",
    "fp8.checkpoints.weights",
    "fp8.checkpoints.layouts",
    "fp8.common.libraries",
    "fp8.adapters.accelerate",
    "fp8.adapters.composer",
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
"""Pages that have nearly every word: the search leaves them out."""

_SECTIONS = re.compile(r"\n\n(?:Args|Returns|Raises):")
"""Where the sections of a docstring in Google style begin."""


_LINK = re.compile(r"(?<!!)\[([^]]+)\]\(([^)\s]+)\)")
"""A link of Markdown that is no picture."""


def public_names(module: str) -> dict[str, Any]:
    """Returns the exported objects of a module by name, without submodules and the version."""
    imported = importlib.import_module(module)
    found = {
        name: getattr(imported, name)
        for name in imported.__all__
        if name != "__version__"
    }
    return {
        name: value
        for name, value in found.items()
        if not isinstance(value, ModuleType)
    }


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


def notebook(path: Path) -> str:
    """Returns the Markdown of the cells of a notebook and of their outputs."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(_LINK.sub(_of_the_site, source))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            if "text" in output:
                parts.append(f"```text\n{''.join(output['text']).rstrip()}\n```")
            else:
                picture = "".join(output["data"]["image/png"].split())
                parts.append(f"![figure](data:image/png;base64,{picture})")
    return "\n\n".join(parts) + "\n"


def _of_the_site(link: re.Match[str]) -> str:
    """A link of a notebook: to a page, or the text alone where the site has no such file."""
    text, target = link.groups()
    if target.startswith(("#", "http")):
        return link[0]
    page = target.removeprefix("../docs/")
    return f"[{text}](../{page})" if page != target else text


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the pages of the API to the section "Look up" of the navigation."""
    (reference,) = (
        section["Look up"] for section in config.nav if "Look up" in section
    )
    reference.append({"API": [{module: f"api/{module}.md"} for module in MODULES]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the API and the notebooks to the files of the site."""
    canonical = canonical_names()
    for module in MODULES:
        text = api_page(module, canonical)
        files.append(File.generated(config, f"api/{module}.md", content=text))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        files.append(
            File.generated(config, f"notebooks/{path.stem}.md", content=notebook(path))
        )
    return files


def on_page_markdown(
    markdown: str, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Redirects links to notebooks, and leaves long tables out of the search."""
    if page.file.src_uri in LONG_TABLES:
        page.meta["search"] = {"exclude": True}
    return re.sub(r"\(\.\./(notebooks/\w+)\.ipynb\)", r"(\1.md)", markdown)
