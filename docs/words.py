"""`python -m docs.words`: the words of the pages that users read, code included, tables aside.

A page is a file of the navigation of mkdocs.yml, the README or CONTRIBUTING. Rows of tables and
generated parts, between ``<!-- NAME -->`` and ``<!-- /NAME -->``, do not count.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

LIMIT = 35_000
"""The most words of all pages together."""


def pages() -> list[Path]:
    """The README, CONTRIBUTING and the Markdown pages of the navigation."""
    navigation = (
        (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nextra:")[0]
    )
    names = re.findall(r": ([\w-]+\.md)$", navigation, re.MULTILINE)
    return [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs" / name for name in names),
    ]


def words(path: Path) -> int:
    """The number of words of a page."""
    text = path.read_text(encoding="utf-8")
    text = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", text, flags=re.DOTALL)
    return len(re.sub(r"^\|.*$", "", text, flags=re.MULTILINE).split())


if __name__ == "__main__":
    for page in pages():
        print(f"{words(page):6} {page.relative_to(ROOT).as_posix()}")
    print(f"{sum(map(words, pages())):6} of {LIMIT}")
