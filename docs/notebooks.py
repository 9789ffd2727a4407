"""Makes a page of each notebook, with its outputs, while mkdocs builds the site (`hooks`)."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FOLDER = Path(__file__).parents[1] / "notebooks"

_LOCAL = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]+\)")
"""A link to a file of the repository, which the site does not have."""


def output(made: dict[str, Any]) -> str:
    """An output of a cell: its picture, or its text."""
    data = made.get("data", {})
    if "image/png" in data:
        source = "".join(data["image/png"]).replace("\n", "")
        return f'<img alt="figure" src="data:image/png;base64,{source}">'
    text = "".join(made.get("text", data.get("text/plain", "")))
    return f"<pre>{html.escape(text)}</pre>"


def page(notebook: dict[str, Any]) -> str:
    """The Markdown of a notebook."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(_LOCAL.sub(r"`\1`", source))
        else:
            parts += [f"```python\n{source}\n```", *map(output, cell["outputs"])]
    return "\n\n".join(parts) + "\n"


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages to the site."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        text = page(json.loads(path.read_text(encoding="utf-8")))
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to notebooks lead to their pages."""
    return re.sub(r"\(\.\./notebooks/(\w+)\.ipynb\)", r"(notebooks/\1.md)", markdown)
