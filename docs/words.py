"""`python -m docs.words`: the words of the pages that users read, code included, tables aside.

A page is the README, CONTRIBUTING or a Markdown file of docs/ that `make docs` does not write as a
whole. Rows of tables and generated parts, between ``<!-- NAME -->`` and ``<!-- /NAME -->``, do not
count.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

LIMIT = 33_000
"""The most words of all pages together."""


GENERATED = (
    "benchmarks-all.md",
    "benchmarks.md",
    "papers-numbers.md",
    "parity.md",
    "tables.md",
)


def pages() -> list[Path]:
    """The README, CONTRIBUTING and the pages of docs/ that are written by hand."""
    found = sorted((ROOT / "docs").glob("*.md"))
    written = [page for page in found if page.name not in GENERATED]
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *written]


def words(path: Path) -> int:
    """The number of words of a page."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", text, flags=re.DOTALL)
    return len(re.sub(r"^\|.*$", "", text, flags=re.MULTILINE).split())


if __name__ == "__main__":
    for page in pages():
        print(f"{words(page):6} {page.relative_to(ROOT).as_posix()}")
    print(f"{sum(map(words, pages())):6} of {LIMIT}")
